"""One folder per run: made once, refused to other recipes, found again by name, and locked while it is written."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from windlass.config import load_recipe
from windlass.errors import RunError
from windlass.runs import create_run, open_run
from windlass.runs.lock import holder, locked
from windlass.runs.manifest import collect, write

RECIPE = 'name = "tiny"\n[model]\nlayers = 2\nwidth = 64\nffn = 128\nheads = 4\nvocab = 256\n[data]\ntokens = "1M"\nseq_len = 64\n'


@pytest.fixture
def loaded(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return lambda *overrides: load_recipe(path, overrides)


def test_a_run_is_made_and_opened_again(tmp_path, loaded):
    run = create_run(tmp_path / "r", loaded("nodes=2"))
    again = open_run(tmp_path / "r")
    assert again.recipe() == loaded("nodes=2").recipe
    assert run.recipe_file.read_text() == RECIPE
    assert run.checkpoint(1000).name == "step-000001000"


def test_a_bare_name_is_looked_for_in_runs(tmp_path, loaded, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_run(Path("runs/gptnl-8b"), loaded())
    assert open_run("gptnl-8b").path == Path("runs/gptnl-8b")
    with pytest.raises(RunError, match="does not exist") as caught:
        open_run("gptnl-8")
    assert "gptnl-8b" in (caught.value.hint or "")


def test_the_same_recipe_may_come_back_with_another_layout(tmp_path, loaded):
    create_run(tmp_path / "r", loaded())
    create_run(tmp_path / "r", loaded("layout.shard=full", "nodes=8"))


def test_another_recipe_is_refused_with_the_difference(tmp_path, loaded):
    create_run(tmp_path / "r", loaded()).event("started")
    with pytest.raises(RunError, match=r"belongs to another recipe \(model.layers: 2 there, 3 here\)"):
        create_run(tmp_path / "r", loaded("model.layers=3"))
    assert open_run(tmp_path / "r").recipe().model.layers == 2


def test_a_mended_recipe_takes_the_folder_of_a_start_that_was_refused(tmp_path, loaded):
    run = create_run(tmp_path / "r", loaded())
    run.plan_file.write_text("{}")
    run.error_file(0).write_text("{}")
    assert create_run(tmp_path / "r", loaded("model.layers=3")).recipe().model.layers == 3
    assert run.plan() is None, "it was the plan of the other recipe"


@pytest.mark.parametrize("trace", ["events.jsonl", "metrics.jsonl", "jobs.jsonl", "manifest.json", "checkpoints/step-000000001/x"])  # fmt: skip
def test_a_folder_in_which_something_came_about_is_not_taken(tmp_path, loaded, trace):
    file = create_run(tmp_path / "r", loaded()).path / trace
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}\n")
    with pytest.raises(RunError, match="belongs to another recipe"):
        create_run(tmp_path / "r", loaded("model.layers=3"))


def test_a_folder_whose_process_is_about_to_begin_is_not_taken(tmp_path, loaded):
    from windlass.runs.lock import locked

    run = create_run(tmp_path / "r", loaded())
    with locked(run.lock_file, None), pytest.raises(RunError, match="belongs to another recipe"):
        create_run(tmp_path / "r", loaded("model.layers=3"))


def test_a_folder_with_other_files_is_refused(tmp_path, loaded):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="holds other files"):
        create_run(tmp_path / "r", loaded())


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path, loaded):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="cannot be made") as caught:
        create_run(tmp_path / "file" / "r", loaded())
    assert "--run" in (caught.value.hint or "")


def test_metrics_and_events_read_back(tmp_path, loaded):
    run = create_run(tmp_path / "r", loaded())
    run.event("started", world_size=2)
    run.metric({"step": 1, "loss": 3.0})
    assert [e["event"] for e in run.events()] == ["started"]
    assert run.last_metric() == {"step": 1, "loss": 3.0}


def _hold(path, ready):
    with locked(path):
        ready.set()
        time.sleep(60)


def test_two_processes_cannot_write_one_run(tmp_path):
    path = tmp_path / "run.lock"
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_hold, args=(path, ready))
    other.start()
    try:
        assert ready.wait(30)
        with pytest.raises(RunError, match=f"written by another process .*pid {other.pid}"), locked(path):
            pass
        assert (holder(path) or {}).get("pid") == other.pid
        other.kill()  # a crash leaves nothing to clean up
        other.join(30)
        with locked(path):
            assert (holder(path) or {}).get("pid") in (os.getpid(), None)
    finally:
        other.kill()
        other.join(30)


def test_a_manifest_keeps_earlier_starts(tmp_path, loaded):
    run = create_run(tmp_path / "r", loaded())
    write(run, collect(run.recipe(), world_size=2))
    write(run, collect(run.recipe(), world_size=4))
    manifest = run.manifest()
    assert manifest["world_size"] == 4
    assert [m["world_size"] for m in manifest["earlier"]] == [2]
    assert manifest["packages"]["pydantic"]
    assert manifest["recipe_hash"]


def test_a_second_start_is_refused_before_it_changes_anything(tmp_path, loaded):
    """`windlass train` and `windlass resume` with other values, into the folder of a run that is being written."""
    from windlass.cli.resume import resume
    from windlass.cli.train import train

    run = create_run(tmp_path / "run", loaded("layout.shard=none"))
    before = {path: path.read_bytes() for path in (run.config_file, run.recipe_file)}
    with locked(run.lock_file):
        with pytest.raises(RunError, match="is being written by another process"):
            train(tmp_path / "tiny.toml", ["layout.shard=none", "optim.lr=0.5"], run.path)
        with pytest.raises(RunError, match="is being written by another process"):
            resume(run.path, ["optim.lr=0.5"])
    assert {path: path.read_bytes() for path in before} == before and not run.plan_file.exists()
