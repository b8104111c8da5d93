"""Does an exported folder compute what the run computes, and does an import bring the same bytes back? Asked of transformers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.data.tokenizer import Tokenizer, train_bpe
from windlass.errors import CheckpointError, ConfigError, RunError
from windlass.evaluate import verify
from windlass.evaluate.export import export
from windlass.evaluate.imports import import_model
from windlass.evaluate.opened import open_model
from windlass.evaluate.stream import open_weights
from windlass.runs.folder import Run

transformers = pytest.importorskip("transformers")


def real_tokens(tokenizer: Tokenizer, corpus: dict[str, Path]) -> torch.Tensor:
    text = " ".join(json.loads(line)["text"] for line in corpus["dutch"].read_text().splitlines()[:20])
    return torch.tensor(tokenizer.encode(text)[:1024]).view(-1, 32)


@pytest.mark.parametrize("model", [{}, {"tied": True}, {"kv_heads": 4, "rope_theta": 1e4}, {"head_dim": 16}])
def test_exported_logits_are_ours(
    make_run: Any, tmp_path: Path, tokenizer: Tokenizer, corpus: dict[str, Path], model: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "run", **model)
    made = export(run.path, tmp_path / "hf", shard_bytes=60_000)
    assert made.files > 1 and made.check.ok and made.check.how == "whole" and made.check.positions == 128
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = real_tokens(tokenizer, corpus)
    ours = open_model(run.path).model(tokens)[..., : tokenizer.vocab_size]
    with torch.no_grad():
        other = theirs(input_ids=tokens).logits
    assert other.shape == ours.shape
    assert float((ours - other).abs().max()) < 1e-4
    assert float((ours.argmax(-1) == other.argmax(-1)).float().mean()) >= 0.999


def test_the_exported_tokenizer_is_ours(llama_run: Run, tmp_path: Path, tokenizer: Tokenizer) -> None:
    export(llama_run.path, tmp_path / "hf", verify=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("de zware last", "  naïve\n\tharbour 12345", "日本"):
        assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos
    settings = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert settings["eos_token_id"] == tokenizer.eos
    assert (tmp_path / "hf/README.md").is_file()


def test_a_wrong_weight_is_found(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and shapes stay right; only the logits tell."""
    from windlass.evaluate import export as room

    real = room.exported_tensor

    def swapped(model: Any, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = real(model, name, tensor, dtype)
        return out.flip(0) if name == "model.layers.1.self_attn.k_proj.weight" else out

    monkeypatch.setattr(room, "exported_tensor", swapped)
    with pytest.raises(CheckpointError, match="does not compute what ours does"):
        export(llama_run.path, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_layer_by_layer_sees_the_same(
    make_run: Any, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "available_bytes", lambda: 1000)
    run = make_run(tmp_path / "run", tied=tied)
    made = export(run.path, tmp_path / "hf")
    assert made.check.how == "layer by layer" and made.check.ok and made.check.difference < 1e-4
    weights = tmp_path / "hf/model.safetensors"
    from safetensors.torch import load_file, save_file

    held = load_file(weights)
    held["model.layers.1.mlp.up_proj.weight"] = held["model.layers.1.mlp.up_proj.weight"].flip(0).contiguous()
    save_file(held, weights, metadata={"format": "pt"})
    check = verify.check_export(run.recipe(), open_model(run.path).source, tmp_path / "hf", "fp32", None)
    assert not check.ok


def test_bf16_export_is_compared_after_rounding(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", precision="bf16")
    made = export(run.path, tmp_path / "hf")
    assert made.dtype == "bf16" and made.check.ok
    weights = open_weights(tmp_path / "hf")
    assert {weights.dtype(name) for name in weights} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_import_then_export_gives_the_same_bytes(llama_run: Run, tmp_path: Path, dtype: str) -> None:
    export(llama_run.path, tmp_path / "hf", dtype=dtype, verify=False)
    made = import_model(tmp_path / "hf", tmp_path / "imported")
    assert made.check.ok and made.family == "llama" and made.dtype == dtype
    export(tmp_path / "imported", tmp_path / "again", verify=False)
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (tmp_path / "again/tokenizer.json").read_bytes()


def test_a_llama_of_transformers_is_imported(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=131,
        max_position_embeddings=64, rope_theta=20000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    made = import_model(tmp_path / "hf", tmp_path / "run")
    assert made.check.ok and made.vocab == 131
    assert open_model(tmp_path / "run").recipe.model.rope_theta == 20000.0


def test_another_family_is_imported_as_transformers_builds_it(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=120,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    made = import_model(tmp_path / "hf", tmp_path / "run")
    assert made.family == "hf" and made.check.ok and "its family is qwen2" in made.notes[0]
    shutil.rmtree(tmp_path / "hf")  # the run stands alone
    again = export(tmp_path / "run", tmp_path / "again")
    assert again.check.ok


def test_retnet_goes_out_and_comes_back(retnet_run: Run, tmp_path: Path) -> None:
    made = export(retnet_run.path, tmp_path / "out")
    assert made.check.ok and json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "windlass_retnet"
    ours, theirs = open_model(retnet_run.path).model, open_model(tmp_path / "out").model
    tokens = torch.randint(0, ours.vocab, (1, 20))
    assert torch.equal(ours(tokens), theirs(tokens))
    again = import_model(tmp_path / "out", tmp_path / "run")
    export(again.run, tmp_path / "twice", verify=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "twice/model.safetensors").read_bytes()


def test_folders_that_exist_are_left_alone(llama_run: Run, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(RunError, match="exists"):
        export(llama_run.path, tmp_path / "hf")
    with pytest.raises(RunError, match="exists"):
        import_model(llama_run.path, tmp_path / "hf")


def test_what_is_no_llama_is_not_called_one(make_run: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SwiGLU"):
        export(make_run(tmp_path / "run", activation="gelu").path, tmp_path / "hf")


def test_weights_that_do_not_fit_their_config(llama_run: Run, tmp_path: Path) -> None:
    export(llama_run.path, tmp_path / "hf", verify=False)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="9 missing"):
        import_model(tmp_path / "hf", tmp_path / "run")


def test_a_cut_file_is_named(llama_run: Run, tmp_path: Path) -> None:
    export(llama_run.path, tmp_path / "hf", verify=False)
    weights = tmp_path / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_model(tmp_path / "hf", tmp_path / "run")


def test_the_vocabulary_grows_from_the_old_pieces(
    llama_run: Run, tmp_path: Path, tokenizer: Tokenizer, corpus: dict[str, Path]
) -> None:
    texts = [json.loads(line)["text"] for line in corpus["dutch"].read_text().splitlines()]
    new = train_bpe([*texts, "scheepslier " * 300], 420, tmp_path / "new", eos="</s>")
    made = import_model(llama_run.path, tmp_path / "grown", tokenizer=new.path)
    assert made.vocab == new.vocab_size and "keep or take one old row" in made.notes[0]
    old_rows = open_weights(open_model(llama_run.path).source)["embed.weight"]
    model = open_model(tmp_path / "grown").model
    assert torch.equal(model.embed.weight[new.eos], old_rows[tokenizer.eos])
    (token,) = new.encode(" scheepslier")
    assert torch.allclose(model.embed.weight[token], old_rows[tokenizer.encode(" scheepslier")].mean(0), atol=1e-6)
    (single,) = new.encode("Z")
    assert torch.equal(model.embed.weight[single], old_rows[tokenizer.encode("Z")[0]])


def test_one_shard_is_in_memory_at_a_time(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    from windlass.evaluate.stream import Checkpoint

    read: list[str] = []
    real_get, real_save = Checkpoint.__getitem__, safetensors.torch.save_file

    def get(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return real_get(self, name)

    def save(tensors: dict[str, torch.Tensor], *args: Any, **more: Any) -> None:
        assert len(read) == len(tensors)  # nothing was read ahead
        read.clear()
        real_save(tensors, *args, **more)

    monkeypatch.setattr(Checkpoint, "__getitem__", get)
    monkeypatch.setattr(safetensors.torch, "save_file", save)
    made = export(llama_run.path, tmp_path / "hf", verify=False, shard_bytes=40_000)
    sizes = [path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")]
    assert made.files == len(sizes) > 3 and max(sizes) < 90_000
