"""The ledger adds up, also when the scheduler has forgotten a job."""

from __future__ import annotations

import time

import pytest

from windlass.files import append_line, write_json
from windlass.launch import ledger
from windlass.launch.executor import JobState
from windlass.launch.ledger import forecast_chain
from windlass.runs import Run


class Fake:
    """A scheduler with a fixed memory."""

    name = "slurm"

    def __init__(self, **states):
        self.by_job = {state.job: state for state in states.values()}
        self.cancelled = []

    def states(self, jobs):
        return {job: self.by_job[job] for job in jobs if job in self.by_job}

    def cancel(self, jobs):
        self.cancelled += jobs


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "x"
    for name in ("ranks", "logs"):
        (folder / name).mkdir(parents=True)
    write_json(
        folder / "config.json",
        {
            "name": "x",
            "model": {"layers": 1, "width": 8, "ffn": 8, "heads": 1, "vocab": 8},
            "train": {"steps": 100},
            "data": {"batch_tokens": 2048},
        },
    )
    return Run(folder)


def submit(run, job, **more):
    append_line(run.jobs_file, {"record": "submitted", "time": 0.0, "job": job, "link": 1, "links": 1, "executor": "slurm", "cluster": "lumi-g", "account": "p1", "nodes": 4, "seconds": 7200.0, "units_per_node_hour": 4.0, "unit": "GPU-hour", **more})  # fmt: skip


def test_node_hours_and_units_by_hand(run):
    submit(run, "1")
    (entry,) = ledger.entries(
        run, {"slurm": Fake(a=JobState(job="1", state="TIMEOUT", elapsed_seconds=5400, nodes=4, evidence="squeue"))}
    )
    assert entry.node_hours == pytest.approx(6.0) and entry.units == pytest.approx(
        24.0
    )  # 4 nodes x 1.5 h; 4 per node-hour


def test_an_end_is_kept_when_the_scheduler_forgets(run):
    submit(run, "1")
    ledger.entries(
        run,
        {
            "slurm": Fake(
                a=JobState(
                    job="1", state="COMPLETED", elapsed_seconds=3600, nodes=4, energy_joules=7.2e6, evidence="sacct"
                )
            )
        },
    )
    (entry,) = ledger.entries(run, {"slurm": Fake()})
    assert entry.state.state == "COMPLETED" and entry.node_hours == 4.0 and entry.as_dict()["kwh"] == 2.0


def test_unknown_is_not_zero(run):
    submit(run, "1")
    (entry,) = ledger.entries(run, {"slurm": Fake()})
    assert entry.state.state == "UNKNOWN" and entry.node_hours is None
    (total,) = ledger.totals([entry], "run")
    assert total.unknown_hours == 1 and total.energy_joules is None


def test_own_records_heartbeat_and_log_in_this_order(run):
    submit(run, "1")
    now = time.time()
    append_line(run.jobs_file, {"record": "began", "time": now - 100, "job": "1", "restart": 0})
    (run.logs / "1.out").write_text("*** JOB 1 ON n1 CANCELLED AT now DUE TO TIME LIMIT ***\n")
    assert ledger.entries(run, {})[0].state.state == "TIMEOUT"
    write_json(run.heartbeat_file(0), {"time": now})
    assert ledger.entries(run, {})[0].state.evidence == "heartbeat"
    append_line(run.jobs_file, {"record": "ended", "time": now - 40, "job": "1", "restart": 0, "code": 75})
    (entry,) = ledger.entries(run, {})
    assert (
        entry.state.evidence == "record"
        and entry.state.exit_code == 75
        and entry.node_hours == pytest.approx(60 * 4 / 3600, rel=1e-3)
    )


def test_energy_of_a_link_is_the_meters_rise_in_it(run):
    for job, began in (("1", 100.0), ("2", 200.0)):
        submit(run, job)
        append_line(run.jobs_file, {"record": "began", "time": began, "job": job, "restart": 0})
    for moment, joules in ((110, 5.0), (190, 30.0), (210, 45.0), (290, 90.0)):
        append_line(run.metrics_file, {"time": float(moment), "energy_joules": joules})
    result = {e.job: e.energy_joules for e in ledger.entries(run, {})}
    assert result == {"1": 30.0, "2": 60.0}


def test_what_waits_and_runs_is_committed_in_full(run):
    for job in ("1", "2", "3"):
        submit(run, job)
    fake = Fake(
        a=JobState(job="1", state="COMPLETED", elapsed_seconds=3600, nodes=4),
        b=JobState(job="2", state="RUNNING", elapsed_seconds=60, nodes=4),
        c=JobState(job="3", state="PENDING"),
    )
    result = ledger.entries(run, {"slurm": fake})
    assert ledger.committed_node_hours(result, cluster="lumi-g", account="p1") == pytest.approx(4 + 8 + 8)
    assert ledger.committed_node_hours(result, cluster="lumi-g", account="p2") == 0


def test_outlook_from_speed_and_target(run):
    submit(run, "1")
    append_line(run.metrics_file, {"step": 50, "tokens": 102_400, "tokens_per_second": 1024.0, "time": time.time()})
    result = ledger.entries(run, {"slurm": Fake(a=JobState(job="1", state="RUNNING", elapsed_seconds=3600, nodes=4))})
    view = forecast_chain(run, result)
    assert view.tokens_target == 204_800 and view.remaining_seconds == pytest.approx(100.0)
    assert (
        view.node_hours_used == 4.0
        and view.node_hours_left == 4.0
        and any("estimated end" in line for line in view.lines())
    )


def test_a_controller_that_is_away_leaves_what_the_folder_knows(run):
    from windlass.errors import LaunchError

    class Away(Fake):
        def states(self, jobs):
            raise LaunchError("launch.slurm-error", "squeue said: Unable to contact slurm controller")

    submit(run, "1")
    append_line(run.jobs_file, {"record": "began", "time": time.time(), "job": "1", "restart": 0})
    write_json(run.heartbeat_file(0), {"time": time.time()})
    assert ledger.entries(run, {"slurm": Away()})[0].state.evidence == "heartbeat"
    with pytest.raises(LaunchError):  # but nothing is launched or cancelled on a guess
        ledger.entries(run, {"slurm": Away()}, strict=True)
