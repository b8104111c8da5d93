"""The output of SLURM's commands, as SLURM 22.05 and later sites print it, and fakes with recorded output."""

from __future__ import annotations

import pytest

from windlass.errors import LaunchError
from windlass.launch import slurm
from windlass.launch.executor import JobState


@pytest.mark.parametrize(
    "text", ["4711\n", "4711;lumi\n", "Welcome!\nSubmitted batch job 4711\n", "note: your budget is low\n4711\n"]
)
def test_job_id_among_banners(text):
    assert slurm.read_job_id(text) == "4711"


def test_no_job_id_is_an_error_that_shows_the_answer():
    with pytest.raises(LaunchError) as caught:
        slurm.read_job_id("quota exceeded")
    assert caught.value.code == "launch.no-job-id"


SQUEUE = """\
12|12|RUNNING|None|2|1:30|1-00:00:00|2026-11-15T03:00:00|2026-11-16T03:00:00|node[01-02]|ada
13|13|PENDING|DependencyNeverSatisfied|2|0:00|10:00|N/A|N/A||ada
20_0|20|COMPLETED|None|1|0:05|1:00:00|2026-11-15T03:00:00|2026-11-15T03:00:05|node01|ada
20_1|20|FAILED|NonZeroExitCode|1|0:07|1:00:00|2026-11-15T03:00:00|2026-11-15T03:00:07|node01|ada
99|99|RUNNING|None|1|0:01|UNLIMITED|2026-11-15T03:00:00|N/A|node03|eve
"""


def test_squeue():
    result = slurm.read_states(SQUEUE, ["12", "13", "20"], "squeue")
    assert set(result) == {"12", "13", "20"}
    running = result["12"]
    assert (
        running.active and running.elapsed_seconds == 90 and running.limit_seconds == 86400 and running.ended_at is None
    )
    assert result["13"].never_starts and not result["13"].over
    array = result["20"]
    assert (
        array.state == "FAILED"
        and array.reason == "1 of 2 tasks completed; NonZeroExitCode"
        and array.elapsed_seconds == 12
    )


SACCT = """\
12|CANCELLED by 1000|0:15|125|4|2026-11-15T03:00:00|2026-11-15T03:02:05|1440|nid[001-004]|ada|987654
13|TIMEOUT|0:0|600|1|2026-11-15T03:00:00|2026-11-15T03:10:00|10|nid001|ada|
14|PENDING|0:0|0|1|Unknown|Unknown|UNLIMITED|None assigned|ada|0
"""


def test_sacct():
    result = slurm.read_states(SACCT, ["12", "13", "14"], "sacct")
    assert result["12"].state == "CANCELLED" and result["12"].energy_joules == 987654 and result["12"].nodes == 4
    assert result["13"].state == "TIMEOUT" and result["13"].limit_seconds == 600 and result["13"].energy_joules is None
    assert result["14"].limit_seconds is None and result["14"].started_at is None and result["14"].energy_joules is None


@pytest.mark.parametrize("output, hint", [
    ("sbatch: error: invalid partition specified: nosuch", "sinfo -s"),
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "launch.account"),
    ("sbatch: error: AssocMaxSubmitJobLimit", "no account was given"),
    ("scancel: error: Kill job error on job id 7: Access/permission denied", "another user"),
    ("squeue: error: Unable to contact slurm controller (connect failure)", "controller does not answer"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "--probe"),
])  # fmt: skip
def test_the_schedulers_own_words_and_our_hint(output, hint):
    error = slurm.slurm_error("sbatch", output)
    assert output in error.message and hint in (error.hint or "")


def test_no_slurm_here(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LaunchError) as caught:
        slurm.SlurmScheduler().states(["1"])
    assert caught.value.code == "launch.slurm-not-available"
    assert "--local" in (caught.value.hint or "")


@pytest.mark.parametrize("text, state", [
    ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-15T03:54:07 DUE TO TIME LIMIT ***", "TIMEOUT"),
    ("*** JOB 5 ON n1 CANCELLED AT 2026 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "NODE_FAIL"),
    ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026 DUE TO PREEMPTION ***", "PREEMPTED"),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.batch.", "OUT_OF_MEMORY"),
    ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-15T03:57:10 ***", "CANCELLED"),
])  # fmt: skip
def test_the_log_is_the_last_resort(text, state):
    result = slurm.state_from_log("5", f"step 1 loss 3\n{text}\n")
    # A plain CANCELLED stands in the reasons' lines too; the reason stands later in the line and wins.
    assert isinstance(result, JobState) and result.state == state


def fake(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_squeue_forgets_and_sacct_remembers(tmp_path, monkeypatch):
    """Recorded-output fakes of both commands: SLURM proper keeps a job for minutes, the accounting database for years."""
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake(tmp_path, "sacct", f"cat <<'E'\n{SACCT}E")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = slurm.SlurmScheduler().states(["13"])
    assert result["13"].state == "TIMEOUT" and result["13"].evidence == "sacct"
    fake(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert slurm.SlurmScheduler().states(["13"]) == {}


def test_a_controller_that_is_away_is_an_error_not_an_end(tmp_path, monkeypatch):
    fake(tmp_path, "squeue", "echo 'squeue: error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LaunchError) as caught:
        slurm.SlurmScheduler().states(["13"])
    assert caught.value.code == "launch.slurm-error"


def test_variables_of_an_outer_job_do_not_reach_sbatch(tmp_path, monkeypatch):
    fake(tmp_path, "sbatch", 'env | grep -c "^SLURM_" >&2; echo 77')
    fake(tmp_path, "sbatch", '[ -z "$SLURM_NNODES" ] && [ "$SBATCH_ACCOUNT" = mine ] && echo 77')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_NNODES", "64")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    assert slurm.SlurmScheduler().submit(tmp_path / "job.sh", run_dir=tmp_path, after="afterany:5") == "77"
