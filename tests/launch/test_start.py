"""Starts: one process binds the layout for the devices that are there, and workers wait for exactly that file."""

from __future__ import annotations

import json
import tarfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from windlass.cli.resume import resume
from windlass.cli.train import train_start
from windlass.config import Loaded, Recipe, load_recipe, validate
from windlass.errors import ConfigError, RunError
from windlass.files import append_line, write_json
from windlass.launch import chain
from windlass.launch.start import bind_start, create_planned_run, local_cluster
from windlass.runs.events import LayoutChanged
from windlass.runs.folder import Run, create_run
from windlass.runs.starts import Start, last_start, read_start, wait_for_start, write_start
from windlass.train import supervisor, worker

RAW: dict[str, Any] = {
    "name": "tiny",
    "model": {"layers": 2, "width": 32, "ffn": 64, "heads": 4, "kv_heads": 4, "vocab": 128},
    "data": {"seq_len": 16, "batch_tokens": 384},  # 24 sequences
    "train": {"precision": "fp32", "steps": 4},
}


@pytest.fixture
def make_run(tmp_path):
    """`make_run(tensor=2)`: a run of a recipe with this `[layout]`; without one the planner chooses for 4 devices."""

    def make(**layout: Any) -> Run:
        raw = RAW | ({"layout": {"micro_batch": 2, **layout}} if layout else {})
        loaded = Loaded(validate(Recipe, raw, "test"), "", None, {})
        if layout:
            return create_run(tmp_path / "run", loaded)
        return create_planned_run(tmp_path / "run", loaded, local_cluster(loaded.recipe, 4), 1)[0]

    return make


def bind(run: Run, devices: int, **options: Any) -> Start:
    return bind_start(run, devices=devices, devices_per_node=options.pop("per_node", devices), **options)


# -- layouts on other world sizes ------------------------------------------------------------------------------------


def test_another_world_size_keeps_the_recipes_degrees_and_recomputes_data_and_accumulation(make_run):
    run = make_run(tensor=2, shard="full")
    first = bind(run, 4, job="1")
    assert (first.layout.data, first.layout.accumulation) == (2, 6)  # by hand: 4 / 2; 24 / (2 x 2)
    assert not list(run.events())
    second = bind(run, 8, job="2")
    kept = ("tensor", "pipeline", "context", "shard", "micro_batch")
    assert [getattr(second.layout, k) for k in kept] == [getattr(first.layout, k) for k in kept] == [2, 1, 1, "full", 2]
    assert (second.layout.data, second.layout.accumulation) == (4, 3)
    assert second.layout.sequences_per_step == first.layout.sequences_per_step == 24
    [event] = run.events(LayoutChanged)
    assert (event.old["data"], event.new["data"], event.new["accumulation"]) == (2, 4, 3)
    assert "4 -> 8" in event.reason
    bind(run, 8, job="3")
    assert len(list(run.events(LayoutChanged))) == 1, "the same devices again: nothing changed"


@pytest.mark.parametrize(
    ("devices", "code", "nearest"),
    # By hand: 24 sequences in micro-batches of 2 divide among 1, 2, 3, 4, 6 or 12 replicas of 2 devices.
    [(5, "layout.devices-not-divisible", "4 or 6 devices"), (10, "layout.batch-not-divisible", "8 or 12 devices")],
)
def test_a_recipes_layout_that_is_not_valid_is_refused_with_the_nearest_size(make_run, devices, code, nearest):
    run = make_run(tensor=2)
    bind(run, 4)
    with pytest.raises(ConfigError) as caught:
        bind(run, devices)
    assert caught.value.code == code and nearest in (caught.value.hint or "")
    assert len(list(run.starts.iterdir())) == 1 and not list(run.events()), "nothing was written"


def test_a_planned_layout_is_kept_while_it_is_valid_and_searched_again_otherwise(make_run):
    run = make_run()
    assert run.layout_from() == "planner"
    wish = run.recipe().layout
    first, second = bind(run, 4, job="1"), bind(run, 2, job="2")
    assert wish is not None and second.layout.micro_batch == first.layout.micro_batch == wish.micro_batch
    assert second.layout.devices == 2
    # Micro-batches that three devices cannot divide 24 sequences into.
    config = json.loads(run.config_file.read_text())
    config["layout"]["micro_batch"] = 6
    write_json(run.config_file, config)
    third = bind(run, 3, job="3")
    assert third.layout.devices == 3 and third.layout.micro_batch != 6 and third.reason
    assert third.layout.sequences_per_step == 24
    assert [e.reason for e in run.events(LayoutChanged)] == ["4 -> 2 devices", "2 -> 3 devices"]


# -- names -----------------------------------------------------------------------------------------------------------


def submitted(run: Run, job: str = "71", **changes: Any) -> None:
    record = {"record": "submitted", "job": job, "executor": "slurm", "nodes": 2, "tasks_per_node": 2}
    append_line(run.jobs_file, {**record, "devices_per_node": 2, "time": time.time(), **changes})


@pytest.mark.parametrize(
    ("env", "name", "devices"),
    [
        ({"SLURM_JOB_ID": "71"}, "71.0", 4),
        ({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "2"}, "71.2", 4),
        # launch.sbatch = { array = "1-4%1" }: every task is a job of the chain with an id of its own.
        ({"SLURM_JOB_ID": "72", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "3"}, "71_3.0", 4),
        # `sbatch job.sh` by hand, on more nodes and with one task per node less.
        ({"SLURM_JOB_ID": "99", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "1"}, "99.0", 3),
    ],
)
def test_the_workers_of_a_slurm_job_wait_for_the_name_that_its_first_command_writes(
    make_run, monkeypatch, env, name, devices
):
    from windlass.cli.launch import link

    run = make_run(shard="none")
    submitted(run)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(typer.Exit) as caught:
        link("before", run.path)
    assert caught.value.exit_code == 0
    start = read_start(run, name)
    assert start is not None and start.devices == devices
    assert waited_for(run, monkeypatch) == name


def waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    """The start that a worker in this environment waits for."""
    names: list[str] = []

    def wait(run: Run, name: str) -> Start:
        names.append(name)
        raise RunError("runs.start-missing", "stop here")

    monkeypatch.setattr(worker, "wait_for_start", wait)
    with pytest.raises(RunError):
        worker.main([str(run.path)])
    return names[0]


def test_torchrun_has_one_task_per_node_and_all_its_devices(make_run, monkeypatch):
    run = make_run(shard="none")
    submitted(run, nodes=1, tasks_per_node=1, devices_per_node=4)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    assert chain.before(run, "71", 0, "node01").answer == "go"
    start = last_start(run)
    assert start is not None and (start.devices, start.devices_per_node) == (4, 4)


def test_a_job_whose_layout_is_refused_ends_its_chain_with_the_reason(make_run):
    run = make_run(tensor=2)
    submitted(run, nodes=5, devices_per_node=1, tasks_per_node=1)
    verdict = chain.before(run, "71", 0, "node01")
    assert verdict.answer == "hopeless" and "5" in verdict.reason
    assert [e.event for e in run.events()] == ["gave_up"]
    assert not [r for r in chain.records(run) if r["record"] == "began"]


def test_a_script_of_version_0_1_binds_its_own_start_beside_the_jobs(make_run, monkeypatch):
    """`srun windlass train RECIPE --run DIR`: rank 0 of the step binds, the others wait for that, not for the job's."""
    run = make_run(shard="none")
    submitted(run)
    assert chain.before(run, "71", 1, "node01").answer == "go"
    step = {"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
    step |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"}
    for key, value in step.items():
        monkeypatch.setenv(key, value)
    used: list[list[str]] = []
    monkeypatch.setattr(worker, "main", lambda argv: used.append(argv) or 0)
    for rank in ("0", "3"):
        monkeypatch.setenv("SLURM_PROCID", rank)
        assert train_start(run, lambda per_node, nodes: f"{nodes} x {per_node}", devices=1) == 0
    assert [argv[1:] for argv in used] == [["--start", "71-0.1", "--locked"]] * 2
    start = read_start(run, "71-0.1")
    assert start is not None and (start.devices, start.reason) == (4, "2 x 2")


# -- races -----------------------------------------------------------------------------------------------------------


def test_workers_of_a_restart_never_read_an_earlier_start(make_run, monkeypatch):
    """The file of restart 0 exists; the workers of restart 1 wait until theirs is written."""
    run = make_run(shard="none")
    first = bind(run, 1, job="71")
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    started = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: (started.set(), sleep(seconds)))
    results: list[Start] = []
    waiting = threading.Thread(target=lambda: results.append(wait_for_start(run, "71.1", 30)))
    waiting.start()
    assert started.wait(10) and not results
    write_start(run, replace(first, restart=1, reason="second"))
    waiting.join(10)
    assert [start.reason for start in results] == ["second"]
    assert waited_for(run, monkeypatch) == "71.1"
    with pytest.raises(RunError) as caught:
        wait_for_start(run, "71.2", 0.1)
    assert caught.value.code == "runs.start-missing" and "71.2" in caught.value.message


def test_ranks_started_by_hand_do_not_take_the_file_that_an_earlier_start_left(make_run, monkeypatch):
    run = make_run(shard="none")
    name = "torchrun-none-29500.0"
    old = replace(bind(run, 1, job="torchrun-none-29500"), created_at=time.time() - 600, reason="old")
    write_start(run, old)
    later = threading.Timer(0.3, lambda: write_start(run, replace(old, created_at=time.time(), reason="new")))
    later.start()
    assert wait_for_start(run, name, reused_name=True).reason == "new"
    monkeypatch.setattr("windlass.runs.starts.REPLACED_SECONDS", 0.2)
    write_start(run, old)  # rank 0 began ten minutes ago, for instance by hand on another node
    assert wait_for_start(run, name, reused_name=True).reason == "old"


def test_each_attempt_of_the_supervisor_has_a_start_of_its_own(make_run):
    run = make_run(shard="none")
    start = bind(run, 2, job="local-1")
    argv = supervisor.worker_argv(run, start, "--quiet")
    assert argv(0)[1:] == ["-m", "windlass.train.worker", str(run.path), "--start", "local-1.0", "--locked", "--quiet"]
    assert read_start(run, "local-1.1") is None
    assert argv(1)[5] == "local-1.1" and read_start(run, "local-1.1") == replace(start, restart=1)


def test_a_start_file_with_the_former_lead_still_loads(make_run):
    run = make_run(shard="none")
    start = bind(run, 2, job="local-1")
    write_json(run.starts / "local-1.0.json", {**asdict(start), "lead_seconds": 300.0})
    assert read_start(run, "local-1.0") == last_start(run) == start


# -- run folders of version 0.1 --------------------------------------------------------------------------------------

# Losses of steps 7 and 8 as version 0.1 itself computed them after a resume of this folder.
OLD_LOSSES = {1: ["0x1.0a2aee0000000p+2", "0x1.0a5ec60000000p+2"], 2: ["0x1.0a2aee0000000p+2", "0x1.0a5ec40000000p+2"]}


@pytest.fixture
def old_run(tmp_path) -> Run:
    """6 steps on 2 devices with shard = "full", written by version 0.1."""
    with tarfile.open(Path(__file__).parents[1] / "runs" / "old" / "version-0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return Run(tmp_path / "version-0.1")


@pytest.mark.multi
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_folder_of_version_0_1_resumes_as_it_did_there(old_run, monkeypatch, devices):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    files = [old_run.metrics_file, old_run.events_file]
    before = [file.read_bytes() for file in files]
    with pytest.raises(typer.Exit) as caught:
        resume(old_run.path, ["train.steps=8"], devices=devices, restarts=0, quiet=True)
    assert caught.value.exit_code == 0
    assert all(file.read_bytes().startswith(content) for file, content in zip(files, before, strict=True))
    assert [float(line.loss or 0).hex() for line in old_run.metrics_lines()][6:] == OLD_LOSSES[devices]
    changes = [event.reason for event in old_run.events(LayoutChanged)]
    assert changes == ([] if devices == 2 else ["2 -> 1 devices"])


def test_who_chose_the_layout_of_an_old_run_is_read_from_its_recipe(old_run):
    assert old_run.layout_from() == "recipe"
    text = old_run.recipe_file.read_text()
    old_run.recipe_file.write_text(text.replace('[layout]\nshard = "full"\nmicro_batch = 2\n', ""))
    assert old_run.layout_from() == "planner"
    assert load_recipe(old_run.recipe_file).recipe.layout is None
