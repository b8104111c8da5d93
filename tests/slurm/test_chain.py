"""Job chains on a real scheduler, with a stand-in for training, so that only the scheduler's time counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest
from tests.slurm.conftest import login

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker


def launch_chain(site, name, mode, *argv, **launch):
    """Launch a run of the stand-in; its job ids."""
    recipe = site.recipe(name, launch={"venv": str(site.standin), "env": {"STANDIN": mode}, **launch})
    return site.launch(recipe, *argv)


@pytest.fixture
def chain(site):
    return partial(launch_chain, site)


@pytest.fixture(scope="module")
def chains(scheduler, tmp_path_factory):
    """(site, job ids by name): chains that do not disturb each other, all in the queue at once.

    Most of their time is the scheduler's, so that together they take little longer than the longest of them."""
    with login(scheduler, tmp_path_factory.mktemp("chains")) as site:
        # The scheduler's warning comes 60 s before the limit; the limit is brought near, because one cannot wait for it.
        jobs = {"warned": launch_chain(site, "warned", "hold", "--chain", 2, signal_lead="60s")}
        failing = site.tool("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 1; exit 3").strip()
        jobs["waits"] = launch_chain(site, "waits", "finish", "--after", failing)
        jobs["broken"] = launch_chain(site, "broken", "fail", "--chain", 4)
        site.wait("start of warned", lambda: site.log("warned").count("begins at step 0") == 2)
        site.tool("scontrol", "update", f"jobid={jobs['warned'][0]}", "EndTime=now+75")
        jobs["spare"] = launch_chain(site, "spare", "stop", "--chain", 3)
        jobs["alone"] = launch_chain(site, "alone", "stop", "--chain", "self")
        jobs["followed"] = launch_chain(site, "followed", "stop", "--chain", 2)
        yield site, jobs


def test_following_the_log_goes_from_link_to_link(chains):
    site, _ = chains
    text = site.windlass("logs", "followed", "--follow").stdout
    assert "begins at step 0" in text and "begins at step 10" in text and "the run is finished" in text


def test_the_next_link_resumes_and_the_spare_one_ends_at_once(chains):
    site, jobs = chains
    assert len(jobs["spare"]) == 3
    # 75 is no success to SLURM, and afterany does not mind
    assert site.wait_over("spare") == ["FAILED", "COMPLETED", "COMPLETED"]
    began = [r for r in site.records("spare") if r["record"] == "began"]
    assert [r["job"] for r in began] == jobs["spare"][:2] and [r["step"] for r in began] == [None, 10]
    assert "the run is finished" in site.log("spare")
    view = site.json("jobs", "spare")
    assert view["verdict"] == "finished" and view["node_hours_left"] == 0
    assert [job["state"]["exit_code"] for job in view["jobs"]] == [75, 0, 0]  # without an accounting database
    assert view["jobs"][2]["state"]["elapsed_seconds"] < 40


def test_a_job_that_fails_twice_in_the_same_way_stops_the_chain(chains):
    site, _ = chains
    site.wait_over("broken")
    assert len([r for r in site.records("broken") if r["record"] == "began"]) == 2
    gave_up = site.events("broken", "gave_up")
    assert len(gave_up) == 1 and "step 0" in gave_up[0]["reason"]
    assert site.json("jobs", "broken")["verdict"] == "hopeless"


def test_a_self_chain_submits_its_next_link(chains):
    site, jobs = chains
    assert len(jobs["alone"]) == 1
    site.wait("two links", lambda: len(site.states("alone")) == 2)
    assert site.wait_over("alone") == ["FAILED", "COMPLETED"]
    assert site.events("alone", "finished")


def test_a_condition_that_cannot_be_met_ends_the_job_instead_of_leaving_it(chains):
    site, _ = chains
    assert site.wait_over("waits") == ["CANCELLED"]
    assert not [r for r in site.records("waits") if r["record"] == "began"]


def test_the_warning_before_the_wall_time_reaches_every_rank(chains):
    site, _ = chains
    assert site.wait_over("warned") == ["FAILED", "COMPLETED"]
    assert site.log("warned").count("heard SIGUSR1") == 2
    assert [r["code"] for r in site.records("warned") if r["record"] == "ended"] == [75, 0]


def test_cancel_ends_every_link_and_says_so(site, chain):
    jobs = chain("unwanted", "hold", "--chain", 3)
    site.wait("start", lambda: "begins at step 0" in site.log("unwanted"))
    assert site.json("cancel", "unwanted")["cancelled"] == jobs[::-1]
    assert set(site.wait_over("unwanted")) == {"CANCELLED"}
    assert site.json("cancel", "unwanted")["cancelled"] == []


def test_a_run_that_is_active_is_not_launched_twice(site, chain):
    chain("once", "hold")
    again = site.windlass("launch", site.folder / "once.toml", check=False)
    assert again.returncode == 6 and "once" in again.stderr


def test_an_unknown_job_is_no_condition(site, chain):
    recipe = site.recipe("ghost", launch={"venv": str(site.standin), "env": {"STANDIN": "finish"}})
    done = site.windlass("launch", recipe, "--after", "999999", check=False)
    assert done.returncode == 6 and "999999" in done.stderr


def test_a_node_taken_down_requeues_the_job_which_goes_on(site, chain):
    (job,) = chain("fragile", "hold", requeue=True)
    site.wait("start", lambda: "begins at step 0" in site.log("fragile"))
    node = site.tool("squeue", "-h", "-j", job, "-o", "%B").strip()
    site.tool("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        assert site.wait_over("fragile") == ["COMPLETED"]
    finally:
        site.tool("scontrol", "update", f"nodename={node}", "state=resume")
    began = [r for r in site.records("fragile") if r["record"] == "began"]
    assert [r["restart"] for r in began] == [0, 1] and site.events("fragile", "finished")


def test_preemption_saves_requeues_and_goes_on(site, chain):
    (job,) = chain("humble", "hold", requeue=True, partition="low")
    # Both ranks: one that has no handler yet would die from the signal.
    site.wait("start", lambda: site.log("humble").count("begins at step 0") == 2)
    site.tool("sbatch", "--parsable", "-p", "main", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    assert site.wait_over("humble") == ["COMPLETED"]
    began = [r for r in site.records("humble") if r["record"] == "began"]
    assert [(r["job"], r["restart"]) for r in began] == [(job, 0), (job, 1)]


@pytest.fixture
def fast():
    """A fast file system that all nodes share; below /tmp it would count as a node's own."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_cpu_job_stages_store_and_checkpoints_and_training_reads_the_copy(site, fast):
    own = Path(os.environ["XDG_CONFIG_HOME"]) / "windlass/clusters/dev.toml"
    own.write_text(own.read_text() + f'\n[storage.fast]\npath = "{fast}"\nquota = "1 GB"\nfast = true\n')
    store = site.folder / "store"
    store.mkdir()
    (store / "shard.bin").write_bytes(b"tokens")
    launch = {"venv": str(site.standin), "env": {"STANDIN": "stop"}, "checkpoints_on": "fast"}
    recipe = site.recipe("staged", data__store=str(store), launch=launch)
    jobs = site.launch(recipe, "--chain", 2, "--force")  # the store is no real one
    assert site.wait_over("staged") == ["COMPLETED", "FAILED", "COMPLETED"]
    stage, first, _ = [r for r in site.records("staged") if r["record"] == "submitted"]
    assert (stage["kind"], stage["nodes"], stage["devices_per_node"]) == ("stage", 1, 0)
    assert first["job"] == jobs[0] and first["after"] == f"afterok:{stage['job']}"
    assert (fast / "windlass/store/shard.bin").read_bytes() == b"tokens"
    assert f"--store {fast}/windlass/store" in (site.folder / "runs/staged/job.sh").read_text()
    link = site.folder / "runs/staged/checkpoints"
    assert link.is_symlink() and link.resolve().parent == fast / "windlass/checkpoints"
    assert site.json("launch", recipe, "--dry-run", "--force").get("stage") is None  # nothing is left to copy


def test_no_training_starts_when_the_copy_fails(site, fast):
    own = Path(os.environ["XDG_CONFIG_HOME"]) / "windlass/clusters/dev.toml"
    own.write_text(own.read_text() + f'\n[storage.fast]\npath = "{fast}"\nfast = true\n')
    launch = {"venv": str(site.standin), "env": {"STANDIN": "finish"}}
    site.launch(site.recipe("missing", data__store=str(site.folder / "none"), launch=launch), "--force")
    assert site.wait_over("missing") == ["FAILED", "CANCELLED"]
    assert "there is nothing to copy" in site.log("missing") and "begins at step" not in site.log("missing")


def test_a_partition_that_does_not_exist(site):
    recipe = site.recipe("lost", launch={"partition": "nosuch"})
    refused = site.windlass("launch", recipe, check=False)
    assert (
        refused.returncode == 6
        and "'nosuch'" in refused.stderr
        and "main, short" in refused.stderr.replace("low, ", "")
    )
    forced = site.windlass("launch", recipe, "--force", check=False)
    assert (
        forced.returncode == 6
        and "invalid partition specified: nosuch" in forced.stderr
        and "sinfo -s" in forced.stderr
    )


def test_a_request_that_would_pend_for_ever_is_refused(site):
    recipe = site.recipe("big", nodes=5)
    done = site.windlass("launch", recipe, check=False)
    assert done.returncode == 6 and "5 nodes" in done.stderr
    long = site.windlass(
        "launch", site.recipe("long", nodes=1, launch={"partition": "short", "time": "10m"}), check=False
    )
    assert long.returncode == 6 and "10 min" in long.stderr and "5 min of short" in long.stderr
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout == ""


def test_somebody_elses_job_is_not_ours_to_cancel(site, chain):
    other = site.tool("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 60").strip()
    chain("mine", "hold")
    done = site.windlass("cancel", "mine", "--job", other, check=False)
    assert done.returncode == 6 and f"job {other}" in done.stderr


def test_a_folder_that_compute_nodes_cannot_see(site):
    recipe = site.recipe("hidden")
    done = site.windlass("launch", recipe, "--run", "/dev/shm/windlass-hidden", check=False)
    assert done.returncode == 6 and "shared_folder" in done.stderr
