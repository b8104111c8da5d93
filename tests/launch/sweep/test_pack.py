"""Points that share allocations: what is submitted, what runs inside, and which outcome counts when an allocation ends. The scheduler is a fake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.small_recipe import recipe_tables

from windlass.clusters.load import load_cluster
from windlass.config.sweep import load_sweep
from windlass.errors import LaunchError
from windlass.launch.executor import JobState
from windlass.launch.sweep.execute import command_of, run_points
from windlass.launch.sweep.expect import expect_all
from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
from windlass.launch.sweep.pack import pack_of_this_task, settle, submit_packs
from windlass.launch.sweep.points import make_points

COMMAND = "name = 'cmd'\ncommand = 'true {n}'\nallocation = '1h'\n[matrix]\nn = [1, 2, 3]\n"


def two_points_on(cluster: str) -> str:
    head = 'name = "rec"\ntime_limit = "10m"\n'
    return head + recipe_tables(cluster=cluster, batch_tokens=65536) + "[matrix]\nnodes = [1, 2]\n"


class Fake:
    """Takes every job; answers as the test set it."""

    name = "fake"

    def __init__(self) -> None:
        self.scripts: list[str] = []
        self.answers: dict[str, JobState] = {}

    def submit(self, script: Path, **more) -> str:
        self.scripts.append(script.read_text())
        return str(len(self.scripts))

    def states(self, jobs):
        return {job: self.answers[job] for job in jobs if job in self.answers}


def work_of(folder: Path, text: str, cluster: str | None = None) -> SweepRun:
    (folder / "s.toml").write_text(text)
    loaded = load_sweep(folder / "s.toml")
    points = make_points(loaded)
    expected, _ = expect_all(loaded.sweep, points, cluster)
    return SweepRun(loaded=loaded, folder=open_sweep_folder(folder / "run", loaded, points), points=points, expected=expected)  # fmt: skip


def inside(work: SweepRun, task: str, monkeypatch):
    """As the array task sees it."""
    job, index = task.split("_")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", job)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", index)
    file = sorted((work.folder.path / "packs").glob("*/packs.json"), key=lambda p: p.parent.name.split("-")[1])[-1]
    return pack_of_this_task(work, file)


@pytest.fixture
def fake():
    return Fake()


def test_a_repeated_point_runs_again_inside_and_a_requeued_job_goes_on_where_it_was(tmp_path, monkeypatch, fake):
    work = work_of(tmp_path, COMMAND)
    work.folder.add_outcome({"point": "n-1", "outcome": "oom"})
    work.folder.add_outcome({"point": "n-2", "outcome": "oom"})
    (pack,) = submit_packs(work, work.points[:2], cluster="snellius-h100", executor=fake)["packs"]
    points, _ = inside(work, pack["job"], monkeypatch)
    assert [p.name for p in points] == ["n-1", "n-2"], "an old outcome does not count"
    assert run_points(work, points[:1]) == {"n-1": "ok"}
    assert [p.name for p in inside(work, pack["job"], monkeypatch)[0]] == ["n-2"]


def test_the_scheduler_speaks_for_what_its_job_ran_and_for_nothing_else(tmp_path, monkeypatch, fake):
    work = work_of(tmp_path, COMMAND)
    first = submit_packs(work, work.points, cluster="snellius-h100", executor=fake)["packs"][0]["job"]
    work.folder.begin("n-1", first)
    second = submit_packs(work, work.points[:1], cluster="snellius-h100", executor=fake)["packs"][0]["job"]
    work.folder.begin("n-1", second)  # a second submission runs it by now
    fake.answers = {first: JobState(job=first, state="CANCELLED"), second: JobState(job=second, state="RUNNING")}
    assert settle(work, fake) == [], "the first job's end says nothing about the second's run"
    fake.answers[second] = JobState(job=second, state="NODE_FAIL", reason="n7")
    assert settle(work, fake) == ["n-1"] and settle(work, fake) == []
    result = work.folder.outcomes()
    assert (result["n-1"]["outcome"], result["n-1"]["job"]) == ("node-failure", second)
    assert "n-2" not in result, "what had not begun waits for the next submission"
    kept = json.loads((work.folder.point("n-1").path / "outcome.json").read_text())
    assert kept["evidence"] == "scheduler" and kept["detail"] == "NODE_FAIL (n7)"


def test_the_job_sees_the_same_machine_and_stage_as_the_submission(tmp_path, fake):
    work = work_of(tmp_path, COMMAND)
    submit_packs(
        work, work.points, cluster="snellius-h100", everything=True, options=["--stage", "eval"], executor=fake
    )
    assert "--cluster snellius-h100 --stage eval --all" in fake.scripts[0]


def test_a_sweeps_job_has_what_a_training_job_of_its_shape_has(tmp_path, fake):
    work = work_of(
        tmp_path, two_points_on("lumi-g") + "[set]\n'launch.modules' = ['torch/2']\n'launch.account' = 'p1'\n"
    )
    packs = submit_packs(work, work.points, cluster=None, executor=fake)["packs"]
    assert [p["nodes"] for p in packs] == [1, 2]
    one, two = fake.scripts
    machine = load_cluster("lumi-g")
    assert f"--mem={machine.slurm.mem}" in one
    assert machine.env and all(f"export {name}=" in one for name in machine.env), "the site's own settings"
    assert "MASTER_ADDR" in two and "MASTER_ADDR" not in one
    assert "--nodes=2" in two and "WANDB_DIR" not in two
    file = json.loads(next((work.folder.path / "packs").glob("2x*/packs.json")).read_text())
    assert file["step"][0] == "srun"


def test_points_over_several_nodes_cannot_start_from_inside_a_container(tmp_path, fake):
    text = two_points_on("snellius-h100") + "[set]\n'launch.environment' = 'container'\n'launch.container' = 'x.sif'\n"  # fmt: skip
    work = work_of(tmp_path, text)
    with pytest.raises(LaunchError) as caught:
        submit_packs(work, work.points, cluster=None, executor=fake)
    assert caught.value.code == "sweep.container-several-nodes"
    assert not fake.scripts and not (work.folder.path / "jobs.jsonl").exists(), "nothing was submitted"


def test_a_point_uses_its_allocation_to_the_end(tmp_path, monkeypatch):
    work = work_of(tmp_path, two_points_on("workstation"))
    run = work.folder.point(work.points[0].name)
    command_of(work, work.points[0])
    assert run.recipe().save.lead == "auto"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    command_of(work, work.points[0])
    assert run.recipe().save.lead == 0
    assert work.expected[1].verdict == "illegal" and "workstation" in work.expected[1].reason
