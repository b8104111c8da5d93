"""Real training under the scheduler: ranks on several nodes over gloo, cut by the wall time, resumed, in a container."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from windlass.config import load_recipe
from windlass.runs import create_run

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker

PATIENT = 240.0


def last_loss(site, run: str) -> float:
    return site.events(run, "finished")[-1]["loss"]


@pytest.mark.timeout(600)
def test_a_chain_cut_by_the_wall_time_ends_with_the_same_loss(site):
    """Two nodes; first in one piece, then with a wall-time limit that falls into the first third of the training."""
    work = {"train__steps": 120, "model__width": 128, "model__ffn": 384, "save__every": 40}
    site.launch(site.recipe("whole", **work))
    assert site.wait_over("whole", PATIENT) == ["COMPLETED"]
    started = site.events("whole", "started")[0]
    assert (started["world_size"], started["nodes"]) == (2, 2)
    run, cut = "whole", 0.0
    for number in range(4):  # start-up takes longer or shorter on a busy machine: then estimate from the last try
        begun = next(r["time"] for r in site.records(run) if r["record"] == "began")
        times = [line["time"] for line in site.records(run, "metrics.jsonl")]
        cut = times[0] - begun + (times[-1] - times[0]) / 3 if times else 1.5 * cut  # no step: it was too early
        run = f"pieces-{number}"
        minutes = math.ceil((cut + 30) / 60)
        # SLURM's own early signal is left out: with limits this short it can come before the ranks are there to hear it.
        launch = {"time": f"{minutes}m", "sbatch": {"signal": False}}
        site.launch(site.recipe(run, **work, save__lead=60 * minutes - cut, launch=launch), "--chain", 6)
        site.wait_over(run, PATIENT)
        if site.events(run, "stopped") and site.events(run, "finished"):
            break
    stops = site.events(run, "stopped")
    assert stops and "wall-time" in stops[0]["reason"]
    assert len([r for r in site.records(run) if r["record"] == "began"]) >= 2 and site.events(run, "resumed")
    assert last_loss(site, run) == pytest.approx(last_loss(site, "whole"), abs=1e-6)
    view = site.json("jobs", run)
    assert view["verdict"] == "finished" and view["node_hours_used"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_several_ranks_on_each_node_and_torchrun(site):
    (Path(os.environ["XDG_CONFIG_HOME"]) / "windlass/clusters/dev.toml").write_text(
        (Path(__file__).parent / "dev.toml").read_text().replace("devices = 1", "devices = 2")
    )
    for starter in ("srun", "torchrun"):
        site.launch(site.recipe(starter, launch={"starter": starter}, layout__micro_batch=1))
        assert site.wait_over(starter, PATIENT) == ["COMPLETED"]
        started = site.events(starter, "started")[0]
        assert (started["world_size"], started["nodes"], started["devices_per_node"]) == (4, 2, 2)
    assert last_loss(site, "srun") == pytest.approx(last_loss(site, "torchrun"), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_crashed_node_costs_the_steps_since_the_last_save_and_nothing_else(site):
    """Everything on one node is killed; SLURM requeues, other nodes go on, and the loss is that of an undisturbed run."""
    work = {"train__steps": 600, "model__width": 128, "model__ffn": 384, "save__every": 50}
    site.launch(site.recipe("calm", **work))
    assert site.wait_over("calm", PATIENT) == ["COMPLETED"]
    (job,) = site.launch(site.recipe("storm", **work, launch={"requeue": True}))
    site.wait("a save", lambda: site.events("storm", "saved"), PATIENT)
    victim = site.tool(
        "scontrol", "show", "hostnames", site.tool("squeue", "-h", "-j", job, "-o", "%N").strip()
    ).split()[-1]
    site.tool(str(site.script), "crash", victim)
    try:
        assert site.wait_over("storm", 2 * PATIENT) == ["COMPLETED"], site.log("storm")
    finally:
        site.tool(str(site.script), "start", victim)
    assert site.events("storm", "resumed") and len([r for r in site.records("storm") if r["record"] == "began"]) == 2
    assert last_loss(site, "storm") == pytest.approx(last_loss(site, "calm"), abs=1e-6)


@pytest.fixture
def image(tmp_path) -> Path:
    """An empty root into which the host's system and Python are bound: a real Charliecloud container without a download."""
    root = tmp_path / "image"
    for name in ("usr", "lib", "lib64", "bin", "sbin", "etc", "dev", "proc", "sys", "tmp", "run", "var", "root", "opt"):
        (root / name).mkdir(parents=True)
    for place in bound():
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    programs = root / "opt" / "bin"  # found only inside: the host has no such files
    programs.mkdir(parents=True)
    for name in ("windlass", "python"):
        shim = programs / name
        shim.write_text(f'#!/bin/bash\necho "inside the image: $*"\nexec {Path(sys.executable).parent}/{name} "$@"\n')
        shim.chmod(0o755)
    for name in ("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf"):
        (root / "etc" / name).write_text(Path("/etc", name).read_text() if Path("/etc", name).exists() else "")
    return root


def bound() -> list[str]:
    """Where Python, its packages and windlass itself live on this host."""
    import windlass

    own = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), Path(windlass.__file__).resolve().parents[2]}
    system = [p for p in ("/usr", "/lib", "/lib64", "/bin", "/sbin") if Path(p).exists()]
    return [*system, *sorted(str(p) for p in own if not str(p).startswith("/usr/") and str(p) != "/usr")]


@pytest.mark.timeout(600)
def test_training_in_a_charliecloud_container(site, image):
    """The container path for real: the ranks see the image's files, and the run folder outside it."""
    launch = {
        "container": str(image),
        "runtime": "charliecloud",
        "binds": bound(),
        "env": {"PATH": "/opt/bin:/usr/bin:/bin"},
    }
    site.launch(site.recipe("boxed", nodes=1, train__steps=4, save__every=4, launch=launch))
    assert site.wait_over("boxed", PATIENT) == ["COMPLETED"], site.log("boxed")
    script = (site.folder / "runs/boxed/job.sh").read_text()
    assert "ch-run --bind=/usr" in script and site.events("boxed", "finished")
    for command in ("link before", "-m windlass.train.worker"):
        assert f"inside the image: {command}" in site.log("boxed")


@pytest.mark.timeout(600)
def test_a_queued_script_of_version_0_1_still_trains(site):
    """Written before the update: `srun windlass train RECIPE --run DIR`, in a folder without starts."""
    recipe = site.recipe("queued", train__steps=4, save__every=4)
    text = site.json("launch", recipe, "--dry-run")["script"]
    run = create_run(site.folder / "runs" / "queued", load_recipe(recipe))
    worker = f"python -m windlass.train.worker {run.path}"
    assert text.count(worker) == 1
    script = run.path / "job.sh"
    script.write_text(text.replace(worker, f"windlass train {run.recipe_file} --run {run.path}"))
    job = site.tool("sbatch", "--parsable", str(script)).strip()
    site.wait("the end", lambda: site.tool("squeue", "-h", "-j", job).strip() == "", PATIENT)
    assert site.events("queued", "finished"), site.log("queued")
    assert [p.name for p in run.starts.iterdir()] == [f"{job}-0.0.json"]
