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


# A controller in two files: `queue` holds "id|comment" per job, `calls` one line per sbatch.
QUEUE = 'cat "$(dirname "$0")/queue" 2>/dev/null || true'
ENQUEUE = """\
here=$(dirname "$0"); number=$(( 70 + $(cat "$here/calls" 2>/dev/null | wc -l) )); echo "$*" >> "$here/calls"
for argument in "$@"; do case "$argument" in --comment=*) comment="${argument#--comment=}";; esac; done"""
LOST = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.fixture
def controller(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "RETRY_PAUSES_SECONDS", (0.0, 0.0))
    fake(tmp_path, "squeue", QUEUE)
    fake(tmp_path, "scancel", 'echo "$@" >> "$(dirname "$0")/cancelled"')
    return tmp_path


def submit(folder, comment="hello windlass:abc:1"):
    return slurm.SlurmScheduler().submit(folder / "job.sh", run_dir=folder, comment=comment)


def test_a_lost_reply_is_not_submitted_twice(controller):
    fake(controller, "sbatch", f'{ENQUEUE}\necho "$number|$comment" >> "$here/queue"\n{LOST}')
    assert submit(controller) == "70"
    assert len((controller / "calls").read_text().splitlines()) == 1


def test_an_error_of_another_kind_after_queueing_is_recognised_too(controller):
    fake(
        controller,
        "sbatch",
        f'{ENQUEUE}\necho "$number|$comment" >> "$here/queue"\necho "lua: plugin fault" >&2; exit 1',
    )
    assert submit(controller) == "70"


def test_a_transient_error_is_tried_again_with_a_limit(controller):
    fake(controller, "sbatch", f"{ENQUEUE}\n[ $number -ge 72 ] && {{ echo $number; exit 0; }}\n{LOST}")
    assert submit(controller) == "72"
    fake(controller, "sbatch", f"{ENQUEUE}\n{LOST}")
    (controller / "calls").unlink()
    with pytest.raises(LaunchError) as caught:
        submit(controller)
    assert caught.value.code == "launch.submission-unknown"
    assert len((controller / "calls").read_text().splitlines()) == 3


def test_a_job_that_arrives_late_is_kept_and_the_second_cancelled(controller):
    """The first sbatch is queued only after squeue was asked for it: two jobs with one mark."""
    late = '[ $number -ge 71 ] && { printf "70|%s\\n71|%s\\n" "$comment" "$comment" > "$here/queue"; echo 71; exit 0; }'
    fake(controller, "sbatch", f"{ENQUEUE}\n{late}\n{LOST}")
    assert submit(controller) == "70"
    assert (controller / "cancelled").read_text().split() == ["71"]


def test_a_refusal_is_not_tried_again(controller):
    fake(controller, "sbatch", f"{ENQUEUE}\necho 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(LaunchError) as caught:
        submit(controller)
    assert caught.value.code == "launch.slurm-error"
    assert len((controller / "calls").read_text().splitlines()) == 1


def test_marks_of_other_folders_and_blank_comments_are_not_ours(controller):
    (controller / "queue").write_text(
        "1|\n2|(null)\n3|mine\n4|windlass:abcd:1\n5|note windlass:abc:2\n6|windlass:abc:3\n"
    )
    assert slurm.SlurmScheduler().marked("windlass:abc") == {"5": "windlass:abc:2", "6": "windlass:abc:3"}
