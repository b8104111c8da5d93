"""Imported Hugging Face folders: other families unchanged after an export, and folders with a fault refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.convert import imports
from windlass.convert.config_json import match_format
from windlass.convert.export import export
from windlass.convert.imports import import_model
from windlass.convert.target import new_folder
from windlass.convert.weights import open_weights
from windlass.data.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, RunError
from windlass.evaluate.generate import Sampling, generate
from windlass.evaluate.open_model import open_model
from windlass.models.hf_parts import read_layer_types
from windlass.report.collect import find_runs

transformers = pytest.importorskip("transformers")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # tied, and its config calls length otherwise
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},  # no fused attention, no word for length
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2},
    "gpt_neox": {**SHAPE, "max_position_embeddings": 64},  # its head has an older name in files
    "gemma2": {**SHAPE, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 16},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(family: str, **more: Any) -> Path:
        config = transformers.AutoConfig.for_model(family, **{"vocab_size": 120, **FAMILIES.get(family, {}), **more})
        torch.manual_seed(0)
        net = transformers.AutoModelForCausalLM.from_config(config)
        for weight in net.parameters():  # so large that a wrong one shows
            weight.data.add_(0.05 * torch.randn_like(weight))
        folder = tmp_path_factory.mktemp(family) / "hf"
        net.save_pretrained(folder)
        return folder

    return make


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = open_weights(folder)
    return {name: found[name] for name in found}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_llama_and_mistral_become_ours(folder_of: Any, tmp_path: Path) -> None:
    llama = import_model(
        folder_of("llama", **SHAPE, max_position_embeddings=64, rope_theta=20000.0), tmp_path / "llama"
    )
    assert llama.check.ok and llama.family == "llama" and llama.vocab == 120 and not llama.notes
    assert open_model(tmp_path / "llama").recipe.model.rope_theta == 20000.0
    sizes = {**SHAPE, "max_position_embeddings": 64}
    cases = (("mistral", {"sliding_window": None}, "llama"), ("mistral", {"sliding_window": 16}, "hf"))
    for number, (family, changes, expected) in enumerate(cases):
        imported = import_model(folder_of(family, **sizes, **changes), tmp_path / str(number))
        assert imported.family == expected and imported.check.ok


def test_an_import_that_fails_can_be_repeated(folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = folder_of("llama", **SHAPE, max_position_embeddings=64), tmp_path / "runs" / "llama"
    left = target.with_name(".llama.tmp")  # of a process that was killed
    (left / "checkpoints").mkdir(parents=True)
    (left / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(imports.Saver, "save", lambda *a, **k: None)  # as on a full disk
        with pytest.raises(CheckpointError) as failed:
            import_model(folder, target)
    assert failed.value.code == "convert.checkpoint-not-written" and "iB are free" in failed.value.message
    assert not list(target.parent.iterdir())
    with new_folder(target, "--run") as temporary:
        (temporary / "config.json").write_text("{}")
        (temporary / "recipe.toml").write_text("")
        assert find_runs(target.parent) == []  # no list shows a run that is not complete
        with pytest.raises(RunError) as busy:
            import_model(folder, target)
        assert busy.value.code == "convert.target-busy"
    shutil.rmtree(target)
    assert import_model(folder, target).run == target
    assert [path.name for path in target.parent.iterdir()] == ["llama"]
    assert open_model(target).recipe.name == "llama"


def test_imported_run_needs_no_original_folder(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("mistral", **SHAPE, max_position_embeddings=64, tie_word_embeddings=True, sliding_window=16)
    imported = import_model(folder, tmp_path / "run")
    assert imported.family == "hf" and imported.check.ok and "window of 16" in imported.notes[0]
    shutil.rmtree(folder)
    assert export(tmp_path / "run", tmp_path / "again").check.ok


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_in_and_goes_out_unchanged(family: str, folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of(family)
    made = import_model(folder, tmp_path / "run")
    assert made.family == "hf" and made.check.ok and made.check.difference < 1e-4
    back = export(made.run, tmp_path / "back")
    assert back.check.ok and same(weights_of(folder), weights_of(tmp_path / "back"))
    # The folder itself can be asked, too: the same logits without an import.
    tokens = torch.arange(30)[None]
    assert torch.equal(open_model(folder).model(tokens), open_model(made.run).model(tokens))


def test_gpt2_as_it_was_published(folder_of: Any, tmp_path: Path) -> None:
    """Only the body's names, masks among the weights, and nothing in the config about a tied head."""
    from safetensors.torch import save_file

    folder = folder_of("gpt2")
    held = {name.removeprefix("transformer."): tensor for name, tensor in weights_of(folder).items()}
    save_file(
        {**held, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    made = import_model(folder, tmp_path / "run")
    assert made.check.ok
    export(made.run, tmp_path / "back")
    assert "lm_head.weight" not in weights_of(tmp_path / "back")


def test_learned_positions_end(folder_of: Any) -> None:
    model = open_model(folder_of("gpt2")).model
    with pytest.raises(ConfigError) as error:
        generate(model, [1, 2], Sampling(tokens=68))
    assert error.value.code == "evaluate.too-many-positions"
    assert all(number in error.value.message for number in ("70", "64"))
    assert len(generate(model, [1, 2], Sampling(tokens=62, ignore_eos=True)).ids) == 62


def test_half_precision_goes_out_as_it_came(folder_of: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = folder_of("llama", **SHAPE, max_position_embeddings=4096)
    half = {name: tensor.half() for name, tensor in weights_of(folder).items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    made = import_model(folder, tmp_path / "run")
    assert made.dtype == "fp16" and any("4,096 tokens" in note for note in made.notes)
    assert export(made.run, tmp_path / "back").check.ok and same(half, weights_of(tmp_path / "back"))
    # The sequences noted for training are shorter; the model still takes what it took.
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["max_position_embeddings"] == 4096 and config["dtype"] == "float16"


def test_an_import_keeps_the_settings_of_its_tokenizer(folder_of: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_of("llama", **SHAPE, max_position_embeddings=64)
    config = json.loads((folder / "config.json").read_text())
    shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
    begin = tokenizer.decode([5])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": begin},
        "eos_token": tokenizer.decode([tokenizer.eos or 0]),
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    grown = {**weights_of(folder)}
    from safetensors.torch import save_file

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        grown[name] = torch.randn(tokenizer.vocab_size, 32)
    save_file(grown, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokenizer.vocab_size}))
    export(import_model(folder, tmp_path / "run").run, tmp_path / "back")
    assert json.loads((tmp_path / "back/tokenizer_config.json").read_text()) == settings
    assert (tmp_path / "back/chat_template.jinja").read_text() == "{{ messages }}"
    made = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert (made["bos_token_id"], made["eos_token_id"]) == (5, tokenizer.eos)


@pytest.fixture
def llama_folder(folder_of: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder_of("llama", **SHAPE, max_position_embeddings=64), tmp_path / "hf"))


@pytest.mark.parametrize(
    ("changes", "code", "numbers"),
    [
        ({"intermediate_size": 80}, "convert.weights-do-not-fit", ("6 ", "(64, 32)", "(80, 32)")),
        ({"hidden_size": None}, "convert.config-keys-missing", ("hidden_size",)),
        ({"num_hidden_layers": -3}, "convert.config-size-invalid", ("num_hidden_layers = -3",)),
        ({"vocab_size": "many"}, "convert.config-size-invalid", ("vocab_size = 'many'",)),
        ({"rms_norm_eps": -1}, "config.invalid", ("norm_eps", "-1")),
        ({"num_key_value_heads": 3}, "config.invalid", ("kv_heads (3)",)),
        ({"model_type": "foobar"}, "model.config-unreadable", ("foobar",)),
        ({"model_type": None}, "convert.config-json-damaged", ("config.json",)),
        ({"quantization_config": {"quant_method": "gptq"}}, "convert.weights-quantized", ("gptq",)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "convert.weights-quantized", ("mxfp4",)),
    ],
)
def test_config_that_does_not_fit(
    llama_folder: Path, changes: dict[str, Any], code: str, numbers: tuple[str, ...]
) -> None:
    config = json.loads((llama_folder / "config.json").read_text())
    changed = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (llama_folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises((CheckpointError, ConfigError)) as error:
        import_model(llama_folder, llama_folder.parent / "run")
    assert error.value.code == code and all(number in error.value.message for number in numbers)
    assert not (llama_folder.parent / "run").exists()


def test_kinds_of_layers_that_our_modules_do_not_have() -> None:
    """Such a layer is never read as full attention: transformers builds the model, or the pattern is refused."""
    kinds = ["full_attention", "linear_attention"]
    _, reasons = match_format({"model_type": "qwen3", "layer_types": kinds})
    assert len(reasons) == 1 and "linear_attention" in reasons[0]
    assert match_format({"model_type": "qwen3", "layer_types": ["full_attention"] * 2})[1] == []
    assert read_layer_types({"layer_types": [*kinds, "sliding_attention"], "sliding_window": 8})["pattern"] == "F?W"


def test_a_model_that_sees_later_tokens_is_refused(
    folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its setting, and, where no setting says so, by its logits at the first position."""
    shape = {**SHAPE, "max_position_embeddings": 64, "head_dim": 8}
    folder = folder_of("gemma3_text", **shape, use_bidirectional_attention=True)
    for code_path in (folder, folder_of("bert", **SHAPE)):
        with pytest.raises(ConfigError) as error:
            import_model(code_path, tmp_path / "refused")
        assert error.value.code == ("model.not-causal" if code_path is folder else "model.encoder")
    monkeypatch.setattr("windlass.models.hf.LATER_TOKENS", {})
    with pytest.raises(ConfigError) as error:
        import_model(folder, tmp_path / "run")
    assert error.value.code == "model.not-causal"


def test_weights_that_cannot_be_imported(llama_folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = weights_of(llama_folder)
    no_head = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    eight_bits = {k: v.to(torch.float8_e4m3fn) if v.dim() == 2 else v for k, v in tensors.items()}
    cases = [
        (no_head, "convert.weights-do-not-fit", ("1 ", "head.weight")),  # not made up from the embedding
        (eight_bits, "convert.weight-format", ("F8_E4M3",)),
    ]
    for weights, code, numbers in cases:
        save_file(weights, llama_folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            import_model(llama_folder, llama_folder.parent / "run")
        assert error.value.code == code and all(number in error.value.message for number in numbers)
    (llama_folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ConfigError) as error:
        import_model(llama_folder, llama_folder.parent / "run")
    assert error.value.code == "convert.config-json-damaged"


def test_folders_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("x")
    for folder, text in (("data", "a.txt"), ("none", "none")):
        with pytest.raises(CheckpointError) as error:
            import_model(tmp_path / folder, tmp_path / "run")
        assert error.value.code == "convert.nothing-to-import" and text in error.value.message


def test_a_missing_file_of_several_is_named(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("llama", **SHAPE, max_position_embeddings=64)
    export(import_model(folder, tmp_path / "run", verify=False).run, tmp_path / "hf", verify=False, shard_bytes=20_000)
    parts = sorted((tmp_path / "hf").glob("*.safetensors"))
    # A second form of the same weights beside the indexed one (as Mistral's folders have) is not read.
    shutil.copyfile(folder / "model.safetensors", tmp_path / "hf/consolidated.safetensors")
    assert same(weights_of(tmp_path / "hf"), weights_of(folder))
    parts[1].unlink()
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path / "hf", tmp_path / "again")
    assert error.value.code == "checkpoint.weights-incomplete"
    assert all(text in error.value.message for text in ("1 ", f"{len(parts)} ", parts[1].name))


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_a_trained_model_with_a_tied_head_is_opened_exported_and_gone_on_from(
    family: str, folder_of: Any, store: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Training saves a weight with two names once; whoever reads it asks for it once."""
    from tests.train.helpers import run_here

    from windlass.config import Loaded, Recipe
    from windlass.runs.folder import create_run

    folder = folder_of(family, vocab_size=tokenizer.vocab_size)

    def train(name: str, **save: Any) -> Path:
        value = {
            "name": name,
            "model": {"family": "hf", "config": str(folder), "vocab": tokenizer.vocab_size},
            "layout": {"micro_batch": 2},
            "train": {"steps": 2, "precision": "fp32"},
            "energy": {"enabled": False},
            "save": {"every": 1000, **save},
            "data": {"store": str(store.path), "seq_len": 32, "batch_tokens": 64, "max_epochs": 100},
            "optim": {"lr": 1e-3},
        }
        loaded = Loaded(recipe=Recipe.model_validate(value), text="", path=None, origins={})
        run = create_run(tmp_path / name, loaded)
        assert run_here(run.recipe(), run) == 0
        return run.path

    base = train("base")
    assert export(base, tmp_path / "hf").check.ok
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert float((open_model(base).model(tokens) - theirs(input_ids=tokens).logits).abs().max()) < 1e-4
    assert export(train("more", load=str(base)), tmp_path / "hf2").check.ok
