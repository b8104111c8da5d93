"""A run goes on with the data it began with, or says that it does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.train.helpers import new_run, place_here
from typer.testing import CliRunner

from windlass.cli import build
from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.data.run_check import accept_data, check_data
from windlass.errors import DataError
from windlass.runs.events import DataChanged
from windlass.runs.folder import Run

RECIPE = """
name = "t"
[model]
layers = 1
width = 32
ffn = 48
heads = 2
vocab = 100
[data]
store = "{store}"
seq_len = 16
batch_tokens = 128
max_epochs = 100
[train]
steps = 2
precision = "fp32"
[layout]
micro_batch = 8
[energy]
enabled = false
"""


def flat_store(folder: Path, first: int = 0) -> Path:
    folder.mkdir()
    for number in range(2):
        np.save(folder / f"part-{number}.npy", (np.arange(16 * 40 + 1, dtype="<u2") + first + number) % 90)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has trained on tmp_path/store."""
    flat_store(tmp_path / "store")
    run = new_run(tmp_path / "run")
    check(run, tmp_path / "store")
    run.metrics_file.write_text('{"step": 1}\n')
    return run


def check(run: Run, store: Path | None, *, new_data: bool = False, copy: Path | None = None, **at: int) -> list[str]:
    """The lines that a worker says."""
    data = {"store": None if store is None else str(store), "seq_len": 16, "batch_tokens": 128}
    model = {"layers": 1, "width": 32, "ffn": 48, "heads": 2, "vocab": 100}
    recipe = Recipe.model_validate({"name": "t", "model": model, "data": data, "train": {"steps": 2}})
    run.config_file.write_text(json.dumps(recipe.model_dump(mode="json")))
    if copy is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"store": str(copy)})})
    said: list[str] = []
    here: Place = replace(place_here(), **at)
    if new_data:
        accept_data(recipe, run, said.append)
    check_data(recipe, run, here, said.append)
    return said


def refused(*args: Any, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        check(*args, **keys)
    assert caught.value.code == "data.changed" and "--new-data" in (caught.value.hint or "")
    return caught.value.message


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


def test_the_same_data(run: Run, tmp_path: Path) -> None:
    recorded = run.store_file.read_text()
    assert check(run, tmp_path / "store") == []
    assert run.store_file.read_text() == recorded and list(run.events()) == []


def test_a_shard_that_changed_in_place(run: Run, tmp_path: Path) -> None:
    change(tmp_path / "store" / "part-1.npy")
    message = refused(run, tmp_path / "store")
    assert "part-1.npy" in message and "part-0.npy" not in message
    assert check(run, tmp_path / "store", new_data=True)
    (event,) = run.events(DataChanged)
    assert len(event.differences) == 1 and "part-1.npy" in event.differences[0]
    assert check(run, tmp_path / "store") == []  # from now on these are the run's data


def test_another_store(run: Run, tmp_path: Path) -> None:
    other = flat_store(tmp_path / "other", first=7)
    assert "part-0.npy" in refused(run, other)
    assert "synthetic" in refused(run, None)


def test_a_moved_store(run: Run, tmp_path: Path) -> None:
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    assert check(run, tmp_path / "elsewhere")
    (event,) = run.events(DataChanged)
    assert (event.old_store, event.store) == (str(tmp_path / "store"), str(tmp_path / "elsewhere"))
    assert event.differences == []
    assert check(run, tmp_path / "elsewhere") == []


def test_a_copy_on_the_disk_of_a_node(run: Run, tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "local"
    shutil.copytree(store, copy, copy_function=shutil.copyfile)
    recorded = run.store_file.read_text()
    assert check(run, store, copy=copy) == [] and list(run.events()) == []
    change(copy / "part-0.npy")
    assert "part-0.npy" in refused(run, store, copy=copy)
    # Every node has its own copy, and one of its ranks looks at it.
    assert "part-0.npy" in refused(run, store, copy=copy, rank=8, local_rank=0)
    assert check(run, store, copy=copy, rank=9, local_rank=1) == []
    assert run.store_file.read_text() == recorded


def test_other_ranks_do_not_look(run: Run, tmp_path: Path) -> None:
    change(tmp_path / "store" / "part-1.npy")
    assert check(run, tmp_path / "store", rank=1, local_rank=0) == []


def test_a_run_that_has_not_trained_takes_any_data(run: Run, tmp_path: Path) -> None:
    run.metrics_file.unlink()
    assert check(run, flat_store(tmp_path / "other", first=7)) == []
    assert json.loads(run.store_file.read_text())["store"] == str(tmp_path / "other")


def test_a_run_of_an_earlier_version(run: Run, tmp_path: Path) -> None:
    run.store_file.unlink()
    assert check(run, tmp_path / "store")  # it says that it records now
    assert run.store_file.is_file() and check(run, tmp_path / "store") == []
    run.store_file.unlink()
    run.manifest_file.write_text(json.dumps({"data_ledger": "1234abcd"}))
    assert "1234abcd" in refused(run, tmp_path / "store")


def test_train_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_DEVICE", "cpu")
    store = flat_store(tmp_path / "store")
    (tmp_path / "r.toml").write_text(RECIPE.format(store=store))
    run = Run(tmp_path / "run")

    def command(*argv: object) -> Any:
        return CliRunner().invoke(build(), [str(value) for value in argv])

    train = ("train", tmp_path / "r.toml", "--run", run.path, "-q")
    assert command(*train).exit_code == 0
    change(store / "part-0.npy")
    for argv in (("resume", run.path, "train.steps=4", "-q"), (*train, "train.steps=4")):
        result = command(*argv)
        error = result.exception
        assert isinstance(error, DataError) and error.code == "data.changed" and "part-0.npy" in error.message
    assert command("resume", run.path, "--new-data", "-q").exit_code == 0
    assert run.last_metrics().step == 4
    change(store / "part-0.npy")
    assert command(*train, "train.steps=6", "--new-data").exit_code == 0
    assert len(list(run.events(DataChanged))) == 2
