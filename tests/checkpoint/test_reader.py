"""A checkpoint is data: nothing in it is run, and every checkpoint of today and of version 0.1 can be read."""

from __future__ import annotations

import ast
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.untrusted import HIDING_PLACES, Canary, plant_code

import windlass
from windlass.checkpoint.load import find_latest, load_model_weights, read_tensors, restore
from windlass.checkpoint.reader import CheckpointReader
from windlass.checkpoint.save import Saver
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError

OLD = Path(__file__).parent / "version_0_1"


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_resume_and_load_run_no_code_of_a_checkpoint(run, net, tmp_path, place) -> None:
    canary, folder = tmp_path / "canary", run.checkpoint(1)
    Saver(run, SaveConfig()).save(1, {"model": dict(net().state_dict())}, {}, block=True)
    plant_code(folder, place, canary)
    for load in (
        lambda: restore(find_latest(run), {"model": dict(net().state_dict())}),
        lambda: load_model_weights(folder, net()),
        lambda: load_model_weights(run.path, net(), verify=False),
    ):
        with pytest.raises(CheckpointError) as error:
            load()
        assert error.value.code == "checkpoint.unsafe" and str(folder) in error.value.message and error.value.hint
        assert "mkdir" in error.value.message or place == "object"
    assert not canary.exists() and folder.is_dir()  # refused, not set aside: an earlier one is not used unasked


def test_values_beside_tensors_are_read_without_running_code(tmp_path) -> None:
    values = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", {"b": None}]}
    dcp.save(values, checkpoint_id=tmp_path / "good", no_dist=True)
    read_tensors(CheckpointReader(tmp_path / "good"), state := {"lr": 0.0, "betas": (0, 0), "names": ["", {"b": 1}]})
    assert state == values
    dcp.save({"lr": Canary(tmp_path / "canary")}, checkpoint_id=tmp_path / "bad", no_dist=True)
    with pytest.raises(CheckpointError) as error:
        read_tensors(CheckpointReader(tmp_path / "bad"), {"lr": 0.0})
    assert error.value.code == "checkpoint.unsafe" and "mkdir" in error.value.message
    assert not (tmp_path / "canary").exists()


def test_metadata_that_is_no_pickle_is_damaged(tmp_path) -> None:
    for content in (b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(torch.float32)[:-3]):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            CheckpointReader(tmp_path).read_metadata()
        assert error.value.code == "checkpoint.damaged" and ".metadata" in error.value.message


def test_a_checkpoint_of_version_0_1_is_restored_bit_for_bit(run) -> None:
    shutil.copytree(OLD / "step-000000003", run.checkpoint(3))
    state = {
        "model": {"weight": torch.empty(2, 3), "bias": torch.empty(2, dtype=torch.bfloat16)},
        "optim": {"exp_avg": {"weight": torch.empty(2, 3)}},
        "count": torch.tensor(0),
    }
    assert restore(find_latest(run), state) == {"tokens": 30, "step": 3}
    assert torch.equal(state["model"]["weight"], torch.arange(6.0).view(2, 3))
    assert state["model"]["bias"].tolist() == [0.5, -2.0] and state["count"].item() == 3
    assert torch.equal(state["optim"]["exp_avg"]["weight"], torch.full((2, 3), 0.25))


def test_plain_dcp_checkpoints_are_read(tmp_path) -> None:
    """Of every common dtype; other keys are Python objects, which are not read; the writer's Python was another."""
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool complex64"
    tensors = {name: torch.zeros(2, dtype=getattr(torch, name)) for name in names.split()}
    dcp.save({"model": tensors, "lr": 0.1, "names": ["a", {"b"}]}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": {name: torch.ones(2).to(tensor.dtype) for name, tensor in tensors.items()}}
    read_tensors(CheckpointReader(tmp_path), state)
    assert not any(tensor.view(torch.uint8).any() for tensor in state["model"].values())
    # Python 3.13 has PosixPath in pathlib._local: the same pickle (in one frame) with the longer name in it.
    content, short, long = (tmp_path / ".metadata").read_bytes(), b"\x8c\x07pathlib", b"\x8c\x0epathlib._local"
    assert content.count(short) == 1
    length = int.from_bytes(content[3:11], "little") + len(long) - len(short)
    (tmp_path / ".metadata").write_bytes(content[:3] + length.to_bytes(8, "little") + content[11:].replace(short, long))
    assert {"lr", "model.bfloat16"} <= set(CheckpointReader(tmp_path).read_metadata().state_dict_metadata)


SUSPECT = re.compile(
    r"pickle|marshal|shelve|dill|yaml|dcp|torch\.load|distributed\.checkpoint|from_(pretrained|config)|trust_remote"
    r"|\b(eval|exec)\("
)


def _unsafe_calls(tree: ast.AST) -> list[str]:
    """Calls that can run code from a file, by the name of the function and its arguments."""
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
            calls.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch.distributed.checkpoint"):
            calls += [alias.name for alias in node.names if alias.name in ("FileSystemReader", "load")]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_unsafe = (
            name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "dcp.load", "marshal.loads", "eval", "exec")
            or (name == "torch.load" and options.get("weights_only") != "True")
            or ("allow_pickle" in options and options["allow_pickle"] != "False")
            or (name.startswith("yaml") and name.endswith((".load", ".load_all", ".unsafe_load", ".full_load")))
            or options.get("trust_remote_code", "False") != "False"
            or (name.endswith((".from_pretrained", ".from_config")) and "trust_remote_code" not in options)
        )
        calls += [ast.unparse(node)] if is_unsafe else []
    return calls


def test_no_module_reads_files_that_can_run_code() -> None:
    source = Path(windlass.__file__).parent
    texts = {str(path.relative_to(source)): path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    suspects = {path: text for path, text in texts.items() if SUSPECT.search(text)}  # parsing every file takes seconds
    calls = {path: unsafe for path, text in suspects.items() if (unsafe := _unsafe_calls(ast.parse(text)))}
    assert calls == {
        "checkpoint/load.py": ["load"],  # one call, with our reader
        "checkpoint/reader.py": ["FileSystemReader"],
        # Generated code under `--run-code`, in a process that can neither write outside its folder nor reach the network.
        "evaluate/sandbox_child.py": ["exec(compile(text, f'<{part}>', 'exec', dont_inherit=True), names)"],
        "launch/sweep/dvc.py": ["yaml_module().load(text, Loader=DvcLoader)"],  # a subclass of SafeLoader
    }
