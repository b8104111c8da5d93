"""Do folders of other families come in and go out as they are? Small ones of transformers itself, as published folders look."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.data.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.evaluate.export import export
from windlass.evaluate.generate import Sampling, generate
from windlass.evaluate.imports import import_model
from windlass.evaluate.opened import open_model
from windlass.evaluate.stream import open_weights

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
    with pytest.raises(ConfigError, match=r"70 tokens .* 64 positions"):
        generate(model, [1, 2], Sampling(tokens=68))
    assert len(generate(model, [1, 2], Sampling(tokens=62, go_on=True)).ids) == 62


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
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"content": begin}, "eos_token": tokenizer.decode([tokenizer.eos or 0]),
        "chat_template": "{{ messages }}",
    }  # fmt: skip
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


# -- folders with a fault -------------------------------------------------------------------------------------------------


@pytest.fixture
def llama_folder(folder_of: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder_of("llama", **SHAPE, max_position_embeddings=64), tmp_path / "hf"))


def change(folder: Path, **words: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**config, **words}.items() if v is not None}))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"intermediate_size": 80}, r"6 of another shape .*\(64, 32\) there, \(80, 32\) by the config"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"model_type": "foobar"}, "transformers cannot read"),
        ({"model_type": None}, "names no model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights(llama_folder: Path, words: dict[str, Any], said: str) -> None:
    change(llama_folder, **words)
    with pytest.raises((CheckpointError, ConfigError), match=said):
        import_model(llama_folder, llama_folder.parent / "run")
    assert not (llama_folder.parent / "run").exists()


def test_a_head_that_is_missing_is_not_made_up(llama_folder: Path) -> None:
    from safetensors.torch import save_file

    held = {name: tensor for name, tensor in weights_of(llama_folder).items() if name != "lm_head.weight"}
    save_file(held, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing \(head.weight\)"):
        import_model(llama_folder, llama_folder.parent / "run")


def test_a_config_that_was_cut(llama_folder: Path) -> None:
    (llama_folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ConfigError, match="is not JSON"):
        import_model(llama_folder, llama_folder.parent / "run")


def test_weights_in_eight_bits(llama_folder: Path) -> None:
    from safetensors.torch import save_file

    held = {k: v.to(torch.float8_e4m3fn) if v.dim() == 2 else v for k, v in weights_of(llama_folder).items()}
    save_file(held, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        import_model(llama_folder, llama_folder.parent / "run")


def test_a_missing_file_of_several_is_named(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("llama", **SHAPE, max_position_embeddings=64)
    export(import_model(folder, tmp_path / "run", verify=False).run, tmp_path / "hf", verify=False, shard_bytes=20_000)
    parts = sorted((tmp_path / "hf").glob("*.safetensors"))
    # A second form of the same weights beside the indexed one (as Mistral's folders have) is not read.
    shutil.copyfile(folder / "model.safetensors", tmp_path / "hf/consolidated.safetensors")
    assert same(weights_of(tmp_path / "hf"), weights_of(folder))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of its {len(parts)} weight files .{parts[1].name}"):
        import_model(tmp_path / "hf", tmp_path / "again")


def test_devices_that_are_not_there(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="is no device"):
        open_model(llama_folder, device="gpu0")
    with pytest.raises(ConfigError, match=r"torch sees \d+ GPUs"):
        open_model(llama_folder, device="cuda:99")


def test_text_that_is_none(tmp_path: Path) -> None:
    from windlass.evaluate.tasks import read_task

    (tmp_path / "task.jsonl").write_bytes('{"context": "\u2028a", "answer": "b"}\n'.encode() + b"\n\xff")
    with pytest.raises(DataError, match="byte 0xff at place"):
        read_task(tmp_path / "task.jsonl")
    (tmp_path / "task.jsonl").write_text('{"context": "\u2028a", "answer": "b"}\r\n', encoding="utf-8")
    assert read_task(tmp_path / "task.jsonl").items[0]["context"] == "\u2028a"  # a line separator inside a line


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_a_trained_model_with_a_tied_head_is_opened_exported_and_gone_on_from(
    family: str, folder_of: Any, store: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Training saves a weight with two names once; whoever reads it asks for it once."""
    from windlass.clusters.scheduler import Place
    from windlass.config import Loaded, Recipe
    from windlass.runs.folder import create_run
    from windlass.train import loop

    folder = folder_of(family, vocab_size=tokenizer.vocab_size)

    def train(name: str, **save: Any) -> Path:
        value = {
            "name": name, "model": {"family": "hf", "config": str(folder), "vocab": tokenizer.vocab_size}, "layout": {"micro_batch": 2},
            "train": {"steps": 2, "precision": "fp32"}, "energy": {"enabled": False}, "save": {"every": 1000, **save},
            "data": {"store": str(store.path), "seq_len": 32, "batch_tokens": 64, "max_epochs": 100}, "optim": {"lr": 1e-3},
        }  # fmt: skip
        loaded = Loaded(recipe=Recipe.model_validate(value), text="", path=None, origins={})
        run = create_run(tmp_path / name, loaded)
        assert loop.run(run.recipe(), run, where=Place(0, 1, 0, 1, 0, 1, None, None, "single"), hooks=[]) == 0
        return run.path

    base = train("base")
    assert export(base, tmp_path / "hf").check.ok
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert float((open_model(base).model(tokens) - theirs(input_ids=tokens).logits).abs().max()) < 1e-4
    assert export(train("more", load=str(base)), tmp_path / "hf2").check.ok
