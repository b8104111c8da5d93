"""The ledger adds up, also when the scheduler has forgotten a job."""

from __future__ import annotations

import time

import pytest

from windlass.errors import LaunchError
from windlass.files import append_line, read_json_lines, write_json
from windlass.launch import ledger
from windlass.launch.executor import JobState
from windlass.launch.job import folder_mark
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
    class Away(Fake):
        def states(self, jobs):
            raise LaunchError("launch.slurm-error", "squeue said: Unable to contact slurm controller")

    submit(run, "1")
    append_line(run.jobs_file, {"record": "began", "time": time.time(), "job": "1", "restart": 0})
    write_json(run.heartbeat_file(0), {"time": time.time()})
    assert ledger.entries(run, {"slurm": Away()})[0].state.evidence == "heartbeat"
    with pytest.raises(LaunchError):  # but nothing is launched or cancelled on a guess
        ledger.entries(run, {"slurm": Away()}, strict=True)


class Queue(Fake):
    """A scheduler whose queue holds jobs with marks."""

    def __init__(self, marks, **states):
        super().__init__(**states)
        self.marks = marks

    def marked(self, mark):
        return {job: text for job, text in self.marks.items() if text.startswith(mark)}


def test_a_job_that_only_the_queue_knows_is_adopted_once(run):
    mark = f"{folder_mark(run.path)}:1"
    request = {"mark": mark, "executor": "slurm", "kind": "train", "nodes": 4, "seconds": 7200.0, "link": 1, "links": 1}
    append_line(run.jobs_file, {"record": "submitting", "time": 5.0, **request})
    queue = Queue({"9": mark}, a=JobState(job="9", state="PENDING"))
    for _ in range(2):
        (entry,) = ledger.entries(run, {"slurm": queue})
    assert (entry.job, entry.nodes, entry.submitted_at) == ("9", 4, 5.0) and entry.state.waiting
    lines = [line for line in read_json_lines(run.jobs_file) if line["record"] == "submitted"]
    assert [(line["job"], line["adopted"]) for line in lines] == [("9", True)]


def test_a_queue_that_cannot_be_read_adopts_nothing_and_refuses_a_launch(run):
    class Away(Fake):
        def marked(self, mark):
            raise LaunchError("launch.slurm-timeout", "squeue did not answer within 60 s")

    append_line(run.jobs_file, {"record": "submitting", "time": 5.0, "mark": "m", "executor": "slurm"})
    assert ledger.entries(run, {"slurm": Away()}) == []
    with pytest.raises(LaunchError):
        ledger.entries(run, {"slurm": Away()}, strict=True)


def test_a_closed_submission_asks_no_queue(run):
    append_line(run.jobs_file, {"record": "submitting", "time": 5.0, "mark": "m", "executor": "slurm"})
    append_line(run.jobs_file, {"record": "refused", "time": 6.0, "mark": "m", "reason": "invalid partition"})
    assert ledger.entries(run, {"slurm": Fake()}, strict=True) == []  # Fake has no queue to ask


def test_node_hours_before_a_requeue_count_while_the_job_waits_and_runs(run):
    """4 nodes: 1800 s until a clean end, 900 s until the last sign of life before a node failed, 360 s now."""
    submit(run, "1")
    append_line(run.jobs_file, {"record": "began", "time": 1000.0, "job": "1", "restart": 0})
    append_line(run.jobs_file, {"record": "ended", "time": 2800.0, "job": "1", "restart": 0, "code": 75})
    waiting = {"slurm": Fake(a=JobState(job="1", state="PENDING", elapsed_seconds=0.0, nodes=4))}
    (entry,) = ledger.entries(run, waiting)
    assert entry.node_hours == pytest.approx(2.0)
    committed = ledger.committed_node_hours([entry], cluster="lumi-g", account="p1")
    assert committed == pytest.approx(2.0 + 8.0)  # 4 nodes x 2 h of wall time still to come
    append_line(run.jobs_file, {"record": "began", "time": 5000.0, "job": "1", "restart": 1})
    append_line(run.metrics_file, {"step": 1, "time": 5900.0})
    append_line(run.jobs_file, {"record": "began", "time": 9000.0, "job": "1", "restart": 2})
    running = {"slurm": Fake(a=JobState(job="1", state="RUNNING", elapsed_seconds=360.0, nodes=4))}
    (entry,) = ledger.entries(run, running)
    assert entry.node_hours == pytest.approx(2.0 + 1.0 + 0.4)
    assert ledger.committed_node_hours([entry], cluster="lumi-g", account="p1") == pytest.approx(2.0 + 1.0 + 8.0)


def test_a_requeued_job_that_the_scheduler_forgot_is_not_counted_twice(run):
    submit(run, "1")
    for restart, (began, ended) in enumerate(((0.0, 3600.0), (5000.0, 6800.0))):
        append_line(run.jobs_file, {"record": "began", "time": began, "job": "1", "restart": restart})
        append_line(run.jobs_file, {"record": "ended", "time": ended, "job": "1", "restart": restart, "code": 0})
    (entry,) = ledger.entries(run, {})
    assert entry.node_hours == pytest.approx(4 * 1.5)
