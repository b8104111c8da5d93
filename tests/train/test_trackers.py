"""Exports: all at once, one id over restarts, and never a reason to stop training."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.report.sample_run import make_run, metric

from windlass.runs.folder import Run
from windlass.train.trackers.mlflow import metric_name
from windlass.train.tracking import Exporter, Trackers, numbers, public_config, tracker_id

KEY = "0123456789abcdef0123456789abcdef01234567"


class FakeTracker:
    uploads_later = True

    def __init__(self, *, fails: int = 0, hangs: float = 0.0) -> None:
        self.lines, self.counts, self.closed, self._fails, self._hangs = [], [], False, fails, hangs

    def log(self, line, count):
        time.sleep(self._hangs)
        if self._fails:
            self._fails -= 1
            raise RuntimeError("server said no")
        self.lines.append(line)
        self.counts.append(count)

    def close(self):
        self.closed = True


@pytest.fixture
def job(tmp_path):
    run = Run(make_run(tmp_path / "s"))
    recipe = run.recipe()
    recipe = recipe.model_copy(update={"trackers": recipe.trackers.model_copy(update={"wandb": True})})
    messages: list[str] = []
    return SimpleNamespace(
        run=run, recipe=recipe, step=0, world=SimpleNamespace(is_main=True), say=messages.append, messages=messages
    )


def feed(job, tracker, lines: int = 5) -> Trackers:
    hook = Trackers({"wandb": lambda run, recipe, first: tracker})
    hook.on_start(job)
    for step in range(1, lines + 1):
        hook.on_log(job, metric(step, 1.0, None))
    hook.on_stop(job, None)
    return hook


def test_every_line_with_a_counter_that_goes_on(job):
    tracker = FakeTracker()
    feed(job, tracker)
    before = len(job.run.metrics_file.read_bytes().splitlines())
    assert [line["step"] for line in tracker.lines] == [1, 2, 3, 4, 5]
    assert tracker.counts == list(range(before + 1, before + 6))
    assert tracker.closed


def test_a_trigger_for_sync_is_left(job):
    feed(job, FakeTracker())
    assert (job.run.requests / "sync").exists()


def test_a_part_is_closed_and_another_begun_when_somebody_asks(job, monkeypatch):
    monkeypatch.setattr("windlass.train.tracking.REQUEST_POLL_SECONDS", 0.0)
    job.run.requests.mkdir(exist_ok=True)
    (job.run.requests / "part").write_text("now")
    opened: list[FakeTracker] = []

    def opener(run, recipe, first):
        opened.append(FakeTracker())
        return opened[-1]

    hook = Trackers({"wandb": opener})
    hook.on_start(job)
    for step in range(1, 4):
        hook.on_log(job, {"step": step})
    hook.on_stop(job, None)
    first, second = opened
    assert [line["step"] for line in first.lines] == [1] and [line["step"] for line in second.lines] == [2, 3]
    assert first.closed and second.counts[0] == first.counts[0] + 1
    assert not (job.run.requests / "part").exists() and (job.run.requests / "sync").exists()


def test_a_failing_tracker_is_closed_and_said_and_training_goes_on(job):
    tracker = FakeTracker(fails=99)
    feed(job, tracker)
    assert tracker.closed and not tracker.lines
    assert len(job.messages) == 1 and "wandb" in job.messages[0] and "RuntimeError: server said no" in job.messages[0]


def test_one_failure_is_forgiven(job):
    tracker = FakeTracker(fails=1)
    feed(job, tracker)
    assert len(tracker.lines) == 4 and not job.messages


def test_a_tracker_that_does_not_open_is_said(job):
    def absent(run, recipe, first):
        raise ModuleNotFoundError("No module named 'wandb'")

    hook = Trackers({"wandb": absent})
    hook.on_start(job)
    hook.on_log(job, {"step": 1})
    hook.on_stop(job, None)
    assert len(job.messages) == 1 and "ModuleNotFoundError: No module named 'wandb'" in job.messages[0]


def test_a_hanging_tracker_is_left_behind(job, monkeypatch):
    monkeypatch.setattr("windlass.train.tracking.CLOSE_SECONDS", 0.1)
    began = time.monotonic()
    feed(job, FakeTracker(hangs=120.0), lines=3)
    assert time.monotonic() - began < 60.0
    assert "0 s" in job.messages[0]


def test_a_full_queue_drops_and_counts(job, monkeypatch):
    monkeypatch.setattr("windlass.train.tracking.MAX_QUEUED_LINES", 2)
    exporter = Exporter(job.run, job.recipe, {}, first_step=0, say=job.say)
    for step in range(5):
        exporter.put({"step": step})
    assert exporter.dropped == 3
    exporter.start()
    exporter.stop()
    assert len(job.messages) == 1 and "3 lines" in job.messages[0]


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_tracker_that_exits_does_not_take_the_others_with_it(job, where):
    """Some libraries call exit() when they are not configured."""
    good, bad = FakeTracker(), FakeTracker()

    def leave(*_):
        raise SystemExit("please log in")

    def opened(run, recipe, first):
        return leave() if where == "open" else bad

    if where != "open":
        setattr(bad, where, leave)
    both = job.recipe.trackers.model_copy(update={"tensorboard": True})
    job.recipe = job.recipe.model_copy(update={"trackers": both})
    hook = Trackers({"wandb": opened, "tensorboard": lambda *_: good})
    hook.on_start(job)
    for step in range(5):
        hook.on_log(job, {"step": step})
    hook.on_stop(job, None)
    assert len(good.lines) == 5 and good.closed
    assert len(job.messages) == (where != "close")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "loss"),
        ("val_loss/wiki (nl)", "val_loss/wiki _nl_"),
        ("val_loss/Käse", "val_loss/K_se"),
        ("a/../b", "a/b"),
        ("..", "_"),
    ],
)
def test_names_that_mlflow_takes(key, name):
    assert metric_name(key) == name


def test_other_ranks_and_unwanted_trackers_do_nothing(job):
    tracker = FakeTracker()
    job.world.is_main = False
    feed(job, tracker)
    assert not tracker.lines


def test_one_id_for_ever(job):
    assert tracker_id(job.run) == tracker_id(Run(job.run.path))


def test_only_numbers_and_no_environment(job):
    assert numbers({"loss": 1, "note": "x", "flag": True, "mfu": None}) == {"loss": 1.0}
    launch = job.recipe.launch.model_copy(update={"env": {"WANDB_API_KEY": KEY}})
    assert KEY not in str(public_config(job.recipe.model_copy(update={"launch": launch})))


CODE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from windlass.runs.folder import Run
from windlass.train.tracking import Trackers
run = Run(Path(sys.argv[1])); first = int(sys.argv[2])
recipe = run.recipe()
recipe = recipe.model_copy(update={"trackers": recipe.trackers.model_copy(update={"wandb": True, "tensorboard": True, "mlflow": True})})
job = SimpleNamespace(run=run, recipe=recipe, step=first, world=SimpleNamespace(is_main=True), say=lambda text: print("SAID", text))
hook = Trackers()
hook.on_start(job)
for step in range(first + 1, first + 6):
    line = {"step": step, "tokens": step * 10, "loss": 5.0 / step, "time": 1.79e9 + step}
    run.metric(line); hook.on_log(job, line)
hook.on_stop(job, None)
"""


@pytest.mark.slow
def test_the_real_three_at_once_over_a_restart_without_network_or_keys(tmp_path):
    """Two processes, as after a crash: one W&B id in two parts, one MLflow run, TensorBoard goes on; the key is nowhere."""
    for name in ("wandb", "tensorboard", "mlflow"):
        pytest.importorskip(name)
    path = make_run(tmp_path / "s")
    (path / "metrics.jsonl").unlink()
    env = {
        **os.environ,
        "WANDB_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
    }
    for first in ("0", "3"):
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(path), first],
            capture_output=True,
            text=True,
            env=env,
            timeout=200,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        assert "SAID" not in done.stdout
        time.sleep(1.1)  # W&B names a part by the second
    parts = sorted(path.glob("trackers/wandb/**/*.wandb"))
    assert len(parts) == 2 and len({p.name for p in parts}) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "trackers/tensorboard")).Reload()
    assert [s.step for s in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    runs = list(path.glob("trackers/mlflow/*/*/metrics/loss"))
    assert len(runs) == 1 and len(runs[0].read_text().splitlines()) == 10
    everything = b"".join(p.read_bytes() for p in path.rglob("*") if p.is_file())
    assert KEY.encode() not in everything
