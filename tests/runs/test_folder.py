"""One folder per run: made once, refused to other recipes, found again by name, and locked while it is written."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from windlass.config import load_recipe
from windlass.errors import RunError
from windlass.runs import create_run, open_run
from windlass.runs.events import LayoutChanged, RecipeChanged, Started
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
    with pytest.raises(RunError) as caught:
        open_run("gptnl-8")
    assert caught.value.code == "runs.not-a-run-folder" and "gptnl-8b" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("overrides", "changes", "layout"),
    [
        ((), None, None),
        (("train.steps=9", "data.tokens=2M"), {"train.steps": [None, 9], "data.tokens": [10**6, 2 * 10**6]}, None),
        (("train.log_every=5", "train.eval_every=9"), {"train.log_every": [1, 5], "train.eval_every": [0, 9]}, None),
        (
            ("train.watchdog_seconds=60", "launch.account=P", "trackers.wandb=true"),
            {"train.watchdog_seconds": [600.0, 60.0], "launch.account": [None, "P"], "trackers.wandb": [False, True]},
            None,
        ),
        (("save.keep_last=7", "notes=x"), {"save.keep_last": [3, 7], "notes": ["", "x"]}, None),
        (("nodes=8", "layout.shard=full"), {"nodes": [1, 8]}, "full"),
        (("train.recompute=full",), None, None),
    ],
)
def test_what_may_change_between_two_starts_is_recorded(tmp_path, loaded, overrides, changes, layout):
    create_run(tmp_path / "r", loaded()).record(Started())
    run = create_run(tmp_path / "r", loaded(*overrides))
    assert run.recipe() == loaded(*overrides).recipe
    assert [e.changes for e in run.events(RecipeChanged)] == ([changes] if changes else [])
    moved = list(run.events(LayoutChanged))
    assert len(moved) == sum(o.startswith(("layout", "train.recompute")) for o in overrides)
    assert not layout or moved[0].new["shard"] == layout


@pytest.mark.parametrize(
    ("override", "diff"),
    [
        ("model.layers=3", "model.layers: 2 -> 3"),
        ("optim.lr=0.5", "optim.lr: 0.0003 -> 0.5"),
        ("seed=7", "seed: 0 -> 7"),
        ("data.seq_len=32", "data.seq_len: 64 -> 32"),
        ("train.precision=fp32", "train.precision: 'bf16' -> 'fp32'"),
        ("train.eval_tokens=1k", "train.eval_tokens: 262144 -> 1000"),
        ("data.batch_tokens=128", "data.batch_tokens: None -> 128"),
    ],
)
def test_any_other_change_is_refused_with_a_diff(tmp_path, loaded, override, diff):
    run = create_run(tmp_path / "r", loaded())
    run.record(Started())
    before = run.config_file.read_bytes(), run.recipe_file.read_bytes(), run.events_file.read_bytes()
    with pytest.raises(RunError) as caught:
        create_run(tmp_path / "r", loaded(override, "train.steps=9"))
    assert caught.value.code == "runs.recipe-changed" and diff in caught.value.message
    assert f"save.load={run.path}" in (caught.value.hint or "") and "train.steps" not in caught.value.message
    assert before == (run.config_file.read_bytes(), run.recipe_file.read_bytes(), run.events_file.read_bytes())


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
    with pytest.raises(RunError) as caught:
        create_run(tmp_path / "r", loaded("model.layers=3"))
    assert caught.value.code == "runs.recipe-changed"


def test_a_folder_whose_process_is_about_to_begin_is_not_taken(tmp_path, loaded):
    run = create_run(tmp_path / "r", loaded())
    with locked(run.lock_file, None), pytest.raises(RunError) as caught:
        create_run(tmp_path / "r", loaded("model.layers=3"))
    assert caught.value.code == "runs.recipe-changed"


def test_a_folder_with_other_files_is_refused(tmp_path, loaded):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("x")
    with pytest.raises(RunError) as caught:
        create_run(tmp_path / "r", loaded())
    assert caught.value.code == "runs.folder-not-empty" and "thesis.tex" in caught.value.message


def test_a_config_that_was_cut_is_written_anew_for_the_same_recipe_only(tmp_path, loaded):
    run = create_run(tmp_path / "r", loaded())
    write(run, collect(run.recipe()))
    run.record(Started(world_size=1))
    run.config_file.write_bytes(run.config_file.read_bytes()[:300])
    with pytest.raises(RunError) as caught:
        run.recipe()
    assert caught.value.code == "runs.config-damaged" and " 300 bytes" in caught.value.message
    with pytest.raises(RunError) as caught:
        create_run(tmp_path / "r", loaded("model.layers=3"))
    assert caught.value.code == "runs.config-damaged" and run.config_file.stat().st_size == 300
    assert create_run(tmp_path / "r", loaded()).recipe() == loaded().recipe
    assert "config.json" in next(run.events(RecipeChanged)).changes


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path, loaded):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError) as caught:
        create_run(tmp_path / "file" / "r", loaded())
    assert caught.value.code == "runs.folder-not-writable" and "--run" in (caught.value.hint or "")


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
        with pytest.raises(RunError) as caught, locked(path):
            pass
        assert caught.value.code == "runs.locked" and f"pid {other.pid}" in caught.value.message
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
        for start in (
            lambda: train(tmp_path / "tiny.toml", ["layout.shard=none", "optim.lr=0.5"], run.path),
            lambda: resume(run.path, ["optim.lr=0.5"]),
        ):
            with pytest.raises(RunError) as caught:
                start()
            assert caught.value.code == "runs.locked"
    assert {path: path.read_bytes() for path in before} == before and not run.plan_file.exists()
