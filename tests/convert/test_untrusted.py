"""Checkpoints and model folders are data: eval, generate, export and import run no code that is in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.untrusted import HIDING_PLACES, Canary, plant_code

from windlass.config import ModelConfig
from windlass.convert.export import export
from windlass.convert.imports import import_model
from windlass.convert.weights import open_weights
from windlass.data.tokenizer import load_tokenizer
from windlass.errors import CheckpointError, ConfigError, WindlassError
from windlass.evaluate.open_model import open_model
from windlass.models.build import build_model
from windlass.runs.folder import Run

CODE = "from pathlib import Path\nPath({canary!r}).mkdir()\nclass A: pass\n"


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_eval_generate_and_export_run_no_code_of_a_checkpoint(llama_run: Run, tmp_path: Path, place: str) -> None:
    run, canary = Run(shutil.copytree(llama_run.path, tmp_path / "run")), tmp_path / "canary"
    plant_code(run.checkpoint(7), place, canary)
    for command in (
        lambda: open_model(run.path, device="cpu"),  # eval and generate
        lambda: export(run.path, tmp_path / "out", verify=False),
        lambda: list(open_weights(run.checkpoint(7)).items()),  # import of a run whose vocabulary grows
    ):
        with pytest.raises(CheckpointError) as error:
            command()
        assert error.value.code == "checkpoint.unsafe" and "step-000000007" in error.value.message
    assert not canary.exists() and not (tmp_path / "out").exists()


def model_folder(folder: Path, canary: Path, *, model_type: str, auto_map: Any = None) -> Path:
    """A Hugging Face folder whose configuration, model and tokenizer classes are Python files in it."""
    folder.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"model_type": model_type, "vocab_size": 16, **sizes}
    (folder / "config.json").write_text(json.dumps(config | ({"auto_map": auto_map} if auto_map else {})))
    if auto_map:
        for name in ("configuration_a", "modeling_a", "tokenization_a"):
            (folder / f"{name}.py").write_text(CODE.format(canary=str(canary)))
    return folder


AUTO_MAP = {"AutoConfig": "configuration_a.A", "AutoModelForCausalLM": "modeling_a.AForCausalLM"}


@pytest.mark.parametrize("model_type", ["strange", "llama"])
def test_a_folder_with_its_own_code_is_refused(tmp_path: Path, model_type: str) -> None:
    pytest.importorskip("transformers")
    canary = tmp_path / "canary"
    folder = model_folder(tmp_path / "hf", canary, model_type=model_type, auto_map=AUTO_MAP)
    with pytest.raises(ConfigError) as imported:
        import_model(folder, tmp_path / "run")
    with pytest.raises(ConfigError) as opened:
        open_model(folder, device="cpu")
    for error in (imported.value, opened.value):
        assert error.code == "model.custom-code" and "modeling_a.AForCausalLM" in error.message and error.hint
    for config in (folder, folder / "config.json") if model_type == "strange" else ():
        with pytest.raises(ConfigError) as built, torch.device("meta"):
            build_model(ModelConfig(family="hf", config=str(config)), seq_len=8)
        assert built.value.code == "model.custom-code" and "configuration_a.A" in built.value.message
    assert not canary.exists() and not (tmp_path / "run").exists()


def test_a_tokenizer_with_its_own_code_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "hf", tmp_path / "canary", model_type="llama")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_a.A", None]}})
    )
    with pytest.raises(ConfigError) as error:
        import_model(folder, tmp_path / "run")
    assert error.value.code == "model.custom-code" and "tokenization_a.A" in error.value.message


def test_an_attention_kernel_of_the_hub_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "hf", tmp_path / "canary", model_type="llama")
    config = json.loads((folder / "config.json").read_text())
    for value, code in (("somebody/kernel", "model.custom-code"), ("sdpa", "checkpoint.no-safetensors")):
        (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": value}))
        with pytest.raises(WindlassError) as error:
            import_model(folder, tmp_path / "run")
        assert error.value.code == code


def test_a_run_of_a_family_of_transformers_ignores_the_code_its_config_names(tmp_path: Path) -> None:
    """Version 0.1 imported such folders with transformers' own class: those runs still open."""
    pytest.importorskip("transformers")
    canary = tmp_path / "canary"
    folder = model_folder(tmp_path / "hf", canary, model_type="llama", auto_map=AUTO_MAP)
    with torch.device("meta"):
        model = build_model(ModelConfig(family="hf", config=str(folder)), seq_len=8)
    assert type(model.net).__module__.startswith("transformers.models.llama") and not canary.exists()


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    """The tensors of a pytorch_model.bin are read (tests/train/test_tuning.py), and nothing else in it."""
    folder = model_folder(tmp_path / "hf", tmp_path / "canary", model_type="llama")
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt"):
        torch.save(Canary(tmp_path / "canary"), folder / name)
    for command in (lambda: import_model(folder, tmp_path / "run"), lambda: open_model(folder, device="cpu")):
        with pytest.raises(CheckpointError) as error:
            command()
        assert error.value.code == "checkpoint.unsafe" and not (tmp_path / "canary").exists()
    # Also where an index names one as if it were safetensors.
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        import_model(folder, tmp_path / "run")
    assert error.value.code == "checkpoint.unsafe" and not (tmp_path / "canary").exists()
    for name in ("pytorch_model.bin", "model.safetensors.index.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError) as error:
        import_model(folder, tmp_path / "run")
    assert error.value.code == "checkpoint.no-safetensors"  # other pickles are not looked at


def test_an_export_names_no_code(llama_run: Run, tokenizer: Any, tmp_path: Path) -> None:
    shutil.copytree(tokenizer.path.parent, tmp_path / "tokenizer")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_a.A", None]}, "eos_token": "x"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    named = load_tokenizer(tmp_path / "tokenizer").path
    export(llama_run.path, tmp_path / "out", tokenizer=named, verify=False)
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
