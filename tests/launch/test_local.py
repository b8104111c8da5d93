"""A machine without a scheduler runs the same job with the same commands."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.clusters import load_cluster
from windlass.errors import LaunchError
from windlass.launch.executor import LocalExecutor, start_ticks
from windlass.launch.job import train_job
from windlass.launch.script import render_local


def wait(local, job, *states, seconds=30.0):
    end = time.monotonic() + seconds
    while (state := local.states([job])[job]).state not in states:
        assert time.monotonic() < end, state
        time.sleep(0.05)
    return state


def test_a_job_runs_detached_and_its_code_is_kept(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text('echo "job $WINDLASS_JOB"; exit 3\n')
    local = LocalExecutor(tmp_path)
    job = local.submit(script, run_dir=tmp_path)
    state = wait(local, job, "FAILED")
    assert state.exit_code == 3 and (tmp_path / "logs" / f"{job}.out").read_text() == f"job {job}\n"
    assert LocalExecutor(tmp_path).states([job])[job].exit_code == 3  # any later shell can ask
    assert local.states(["local-never"]) == {}


def test_cancel_ends_the_whole_group_but_never_a_stranger(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("sleep 60 & wait\n")
    local = LocalExecutor(tmp_path)
    job = local.submit(script, run_dir=tmp_path)
    wait(local, job, "RUNNING")
    local.cancel([job])
    wait(local, job, "CANCELLED", "FAILED")
    pid = tmp_path / "logs" / f"{job}.pid"
    pid.write_text(f'{{"pid": {os.getpid()}, "ticks": 1, "started_at": 0}}')  # our own pid, another start time
    local.cancel([job])
    assert start_ticks(os.getpid()) is not None


def test_no_scheduler_no_conditions(tmp_path):
    with pytest.raises(LaunchError) as caught:
        LocalExecutor(tmp_path).submit(tmp_path / "job.sh", run_dir=tmp_path, after="afterok:1")
    assert caught.value.code == "launch.no-scheduler-for-dependency"


def test_the_local_script_is_read_by_bash_and_limits_time_only_when_asked(make_recipe):
    cluster = load_cluster("workstation")
    job = train_job(
        make_recipe(cluster="workstation", launch={"time": "1h", "chain": 3}), cluster, "/x", workdir="/x y"
    )
    text = render_local(job, cluster)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "timeout --signal=USR1 --kill-after=300 3300 " in text and "seq 3" in text and "#SBATCH" not in text


@pytest.mark.multi
def test_launch_on_this_machine_end_to_end(tmp_path, monkeypatch):
    """recipe -> launch --local -> jobs -> finished, as a person does it."""
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "here"\n[model]\nlayers = 1\nwidth = 32\nffn = 64\nheads = 2\nvocab = 128\n[data]\nseq_len = 32\nbatch_tokens = 64\n[train]\nsteps = 3\nprecision = "fp32"\n[layout]\n[energy]\nenabled = false\n')  # fmt: skip
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def windlass(*argv):
        return CliRunner().invoke(build(argv[0]), list(argv))

    started = windlass("launch", "r.toml", "--devices", "1")
    assert started.exit_code == 0 and "submitted: local-" in started.stdout, started.output
    followed = windlass("logs", "here", "-f")
    assert "the run is finished" in followed.stdout
    jobs = windlass("jobs", "here")
    assert "COMPLETED" in jobs.stdout and "the run is finished" in jobs.stdout
