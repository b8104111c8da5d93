"""Exported folders: logits equal to ours in transformers, the same bytes after an import, faults refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from windlass.convert import verify
from windlass.convert.export import export
from windlass.convert.imports import import_model
from windlass.convert.source import find_source
from windlass.convert.weights import StoredWeights, open_weights
from windlass.data.tokenizer import Tokenizer, train_bpe
from windlass.errors import CheckpointError, ConfigError, RunError
from windlass.evaluate.open_model import open_model
from windlass.runs.folder import Run
from windlass.units import print_bytes

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("model", [{}, {"tied": True}, {"kv_heads": 4, "rope_theta": 1e4}, {"head_dim": 16}])
def test_exported_logits_are_ours(
    make_run: Any, tmp_path: Path, tokenizer: Tokenizer, corpus: dict[str, Path], model: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "run", **model)
    exported = export(run.path, tmp_path / "hf", shard_bytes=60_000)
    assert exported.files > 1 and exported.check.ok
    assert exported.check.how == "whole" and exported.check.positions == 128
    text = " ".join(json.loads(line)["text"] for line in corpus["dutch"].read_text().splitlines()[:20])
    tokens = torch.tensor(tokenizer.encode(text)[:1024]).view(-1, 32)
    ours = open_model(run.path).model(tokens)[..., : tokenizer.vocab_size]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(tokens).logits
    assert theirs.shape == ours.shape and float((ours - theirs).abs().max()) < 1e-4
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.999


def test_verification_is_silent_where_torchao_cannot_load_its_libraries(
    llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torchao")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    export(llama_run.path, tmp_path / "hf")
    assert not logger.isEnabledFor(logging.WARNING)


def test_exported_tokenizer_is_ours(llama_run: Run, tmp_path: Path, tokenizer: Tokenizer) -> None:
    export(llama_run.path, tmp_path / "hf", verify=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("de zware last", "  naïve\n\tharbour 12345", "日本"):
        assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    settings = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert theirs.eos_token_id == settings["eos_token_id"] == tokenizer.eos
    assert (tmp_path / "hf/README.md").is_file()


def test_wrong_weight_is_detected_by_logits_only(
    llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StoredWeights.__getitem__
    bad = "layers.1.attention.wk.weight"
    monkeypatch.setattr(
        StoredWeights, "__getitem__", lambda self, name: read(self, name).flip(0) if name == bad else read(self, name)
    )
    with pytest.raises(CheckpointError) as error:
        export(llama_run.path, tmp_path / "hf")
    assert error.value.code == "convert.export-logits-differ"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_layer_by_layer_comparison(make_run: Any, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "available_bytes", lambda: 1000)
    run = make_run(tmp_path / "run", tied=tied)
    check = export(run.path, tmp_path / "hf").check
    assert check.how == "layer by layer" and check.ok and check.difference < 1e-4
    weights = tmp_path / "hf/model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].flip(0).contiguous()
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    assert not verify.compare_logits(
        run.recipe(), find_source(run.path).folder, tmp_path / "hf", torch.float32, None
    ).ok


def test_bf16_export_is_compared_after_rounding(make_run: Any, tmp_path: Path) -> None:
    exported = export(make_run(tmp_path / "run", precision="bf16").path, tmp_path / "hf")
    weights = open_weights(tmp_path / "hf")
    assert exported.dtype == "bf16" and exported.check.ok
    assert {weights.dtype(name) for name in weights} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_import_then_export_gives_the_same_bytes(llama_run: Run, tmp_path: Path, dtype: str) -> None:
    export(llama_run.path, tmp_path / "hf", dtype=dtype, verify=False)
    imported = import_model(tmp_path / "hf", tmp_path / "imported")
    assert imported.check.ok and imported.family == "llama" and imported.dtype == dtype
    export(tmp_path / "imported", tmp_path / "again", verify=False)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_full_disk_is_named_with_numbers_and_leaves_nothing(
    llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    weights = 4 * sum(tensor.numel() for tensor in open_model(llama_run.path).model.parameters())

    def fail(tensors: Any, path: Path, **options: Any) -> None:
        path.write_bytes(bytes(5 * 1024))
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("windlass.convert.export.save_file", fail)
    monkeypatch.setattr("windlass.convert.target.shutil.disk_usage", lambda path: usage._replace(free=weights))
    with pytest.raises(RunError) as full:
        export(llama_run.path, tmp_path / "hf", verify=False)
    assert full.value.code == "convert.no-space" and print_bytes(5 * 1024) in full.value.message
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    export(llama_run.path, tmp_path / "hf", verify=False)
    monkeypatch.setattr("windlass.convert.target.shutil.disk_usage", lambda path: usage._replace(free=1024))
    for write in (lambda to: export(llama_run.path, to, verify=False), lambda to: import_model(tmp_path / "hf", to)):
        with pytest.raises(RunError) as full:
            write(tmp_path / "new")
        assert full.value.code == "convert.no-space" and f"{print_bytes(1024)} are free" in full.value.message
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_retnet_folder_is_read_back(retnet_run: Run, tmp_path: Path) -> None:
    assert export(retnet_run.path, tmp_path / "out").check.ok
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "windlass_retnet"
    ours, theirs = open_model(retnet_run.path).model, open_model(tmp_path / "out").model
    tokens = torch.randint(0, ours.vocab, (1, 20))
    assert torch.equal(ours(tokens), theirs(tokens))
    export(import_model(tmp_path / "out", tmp_path / "run").run, tmp_path / "twice", verify=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "twice/model.safetensors").read_bytes()


def test_refusals(llama_run: Run, make_run: Any, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    gelu = make_run(tmp_path / "gelu", activation="gelu").path
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: export(llama_run.path, tmp_path / "hf"), RunError, "convert.target-exists"),
        (lambda: import_model(llama_run.path, tmp_path / "hf"), RunError, "convert.target-exists"),
        (lambda: export(gelu, tmp_path / "new"), ConfigError, "convert.not-expressible"),
        (lambda: export(llama_run.path, tmp_path / "new", dtype="fp4"), ConfigError, "convert.dtype-unknown"),
        (lambda: export(llama_run.path, tmp_path / "new", shard_bytes=0), ConfigError, "convert.shard-too-small"),
        (lambda: export(llama_run.path, tmp_path / "new", step=9), CheckpointError, "convert.step-missing"),
    ]
    for action, kind, code in cases:
        with pytest.raises(kind) as error:
            action()
        assert error.value.code == code
        assert not (tmp_path / "new").exists()


def test_damaged_folders(llama_run: Run, tmp_path: Path) -> None:
    export(llama_run.path, tmp_path / "hf", verify=False)
    config, weights = tmp_path / "hf/config.json", tmp_path / "hf/model.safetensors"
    shutil.copyfile(config, tmp_path / "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path / "hf", tmp_path / "run")
    assert error.value.code == "convert.weights-do-not-fit" and "9 " in error.value.message
    shutil.copyfile(tmp_path / "config.json", config)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path / "hf", tmp_path / "run")
    assert error.value.code == "convert.weights-unreadable"


def test_vocabulary_grows_from_the_old_pieces(
    llama_run: Run, tmp_path: Path, tokenizer: Tokenizer, corpus: dict[str, Path]
) -> None:
    texts = [json.loads(line)["text"] for line in corpus["dutch"].read_text().splitlines()]
    new = train_bpe([*texts, "scheepslier " * 300], 420, tmp_path / "new", eos="</s>")
    imported = import_model(llama_run.path, tmp_path / "grown", tokenizer=new.path)
    assert imported.vocab == new.vocab_size and f"{new.vocab_size:,}" in imported.notes[0]
    old_rows = open_weights(find_source(llama_run.path).folder)["embed.weight"]
    rows = open_model(tmp_path / "grown").model.embed.weight
    assert torch.equal(rows[new.eos], old_rows[tokenizer.eos])
    (token,) = new.encode(" scheepslier")
    assert torch.allclose(rows[token], old_rows[tokenizer.encode(" scheepslier")].mean(0), atol=1e-6)
    (single,) = new.encode("Z")
    assert torch.equal(rows[single], old_rows[tokenizer.encode("Z")[0]])


def test_one_shard_is_in_memory_at_a_time(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real_get, real_save = StoredWeights.__getitem__, safetensors.torch.save_file

    def get(self: StoredWeights, name: str) -> torch.Tensor:
        read.append(name)
        return real_get(self, name)

    def save(tensors: dict[str, torch.Tensor], *args: Any, **more: Any) -> None:
        assert len(read) == len(tensors)  # nothing was read ahead
        read.clear()
        real_save(tensors, *args, **more)

    monkeypatch.setattr(StoredWeights, "__getitem__", get)
    monkeypatch.setattr(safetensors.torch, "save_file", save)
    exported = export(llama_run.path, tmp_path / "hf", verify=False, shard_bytes=40_000)
    sizes = [path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")]
    assert exported.files == len(sizes) > 3 and max(sizes) < 90_000


@pytest.mark.parametrize("umask", [0o077, 0o007])
def test_a_run_and_its_export_follow_the_umask(make_run: Any, tmp_path: Path, umask: int) -> None:
    """077: only the owner reads them. 007: the group can read them and resume the run."""
    old_umask = os.umask(umask)
    try:
        run = make_run(tmp_path / "run")
        export(run.path, tmp_path / "hf", verify=False)
    finally:
        os.umask(old_umask)
    paths = [path for folder in ("run", "hf") for path in (tmp_path / folder, *(tmp_path / folder).rglob("*"))]
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in paths}
    expected = {name: (0o777 if (tmp_path / name).is_dir() else 0o666) & ~umask for name in modes}
    assert modes == expected and len(modes) > 12
