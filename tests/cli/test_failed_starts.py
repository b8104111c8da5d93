"""A start that fails is reported soon and leaves no run folder behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.cli.start import scan_folder
from windlass.cli.train import train_start
from windlass.config import load_recipe
from windlass.errors import ConfigError, RunError
from windlass.runs.events import FaultEvent, Started
from windlass.runs.folder import Run, create_run

RECIPE = """name = "tiny"
[model]
layers = 1
width = 32
ffn = 64
heads = 2
vocab = 128
[data]
seq_len = 16
batch_tokens = 32
[train]
steps = 2
precision = "fp32"
[layout]
micro_batch = 2
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return load_recipe(tmp_path / "tiny.toml")


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_missing_store_is_reported_before_torch_is_imported(tmp_path, recipe, command):
    """Also on resume, whose run keeps the store that it had."""
    target = "tiny.toml"
    if command == "resume":
        run = create_run(tmp_path / "runs" / "tiny", recipe)
        run.record(Started(world_size=1, nodes=1))
        before, target = run.config_file.read_bytes(), "tiny"
    code = (
        "import sys, windlass.cli, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.argv = ['windlass', '{command}', '{target}', 'data.store=/nowhere']\n"
        "windlass.cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == 5 and "/nowhere" in done.stderr and done.stdout.split() == ["False"]
    if command == "resume":
        assert run.config_file.read_bytes() == before
    else:
        assert not (tmp_path / "runs").exists()


def start_that_fails(monkeypatch, recipe, run: Run, error: BaseException | None, *events) -> None:
    """Start a run whose worker records these events and then fails."""

    def work(arguments):
        run.error_file(0).write_text("{}")
        for event in events:
            run.record(event)
        if error is not None:
            raise error
        return 8

    monkeypatch.setattr("windlass.train.worker.main", work)
    train_start(run, lambda per_node, nodes: create_run(run.path, recipe) and "", devices=1)


def test_a_new_run_that_does_not_begin_leaves_no_folder(tmp_path, recipe, monkeypatch):
    run, error = Run(tmp_path / "runs" / "tiny"), ConfigError("train.fp8-device", "no FP8 here")
    with pytest.raises(ConfigError):
        start_that_fails(monkeypatch, recipe, run, error)
    assert not run.path.exists() and scan_folder(tmp_path).runs == []
    start_that_fails(monkeypatch, recipe, run, None, FaultEvent(rank=0, error="no FP8 here"))
    assert not run.path.exists()


def test_other_files_of_the_folder_stay(tmp_path, recipe, monkeypatch):
    run = Run(tmp_path / "runs" / "tiny")
    (run.path / "data").mkdir(parents=True)
    (run.path / "data" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError):
        start_that_fails(monkeypatch, recipe, run, ConfigError("train.fp8-device", "no FP8 here"))
    assert [p.name for p in run.path.iterdir()] == ["data"]


def test_a_run_that_has_begun_stays_and_counts_as_failed(tmp_path, recipe, monkeypatch):
    run = Run(tmp_path / "runs" / "tiny")
    with pytest.raises(RunError):
        events = (Started(world_size=1, nodes=1), FaultEvent(rank=0, error="out of memory"))
        start_that_fails(monkeypatch, recipe, run, RunError("x", "y"), *events)
    (status,) = scan_folder(Path()).runs
    assert status.state == "failed" and run.config_file.is_file()
    with pytest.raises(ConfigError):  # nor does a later start that fails take the run away
        start_that_fails(monkeypatch, recipe, run, ConfigError("x", "y"))
    assert run.config_file.is_file() and run.recipe().name == "tiny"
