"""Exports metrics lines to trackers (W&B, TensorBoard, MLflow) in a thread of its own; no tracker can stop training.

All exports of a run carry one id, kept in the run folder, and a counter that continues over restarts, because W&B
drops lines whose number goes back. Keys and passwords are the tracker's own business and are never written by
windlass.
"""

import contextlib
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from windlass.config import Recipe
from windlass.files import write_atomic
from windlass.registry import TRACKERS
from windlass.runs.folder import Run
from windlass.train.hooks import Hook, Training

# Lines that may wait for a slow tracker; further ones are dropped and counted (they are in metrics.jsonl).
MAX_QUEUED_LINES = 10_000
# Failures in a row after which a tracker is closed.
MAX_FAILURES = 3
CLOSE_SECONDS = 30.0
# How often the exporter checks whether `windlass sync` asks for closed files.
REQUEST_POLL_SECONDS = 5.0


class Tracker(Protocol):
    # It writes offline files that `windlass sync` uploads; they are closed and reopened when sync asks.
    uploads_later: bool

    def log(self, line: dict[str, Any], count: int) -> None:
        """Export one metrics line, the `count`-th of the run."""

    def close(self) -> None: ...


# (run, recipe, first step) -> tracker; may take seconds and may fail.
OpenTracker = Callable[[Run, Recipe, int], Tracker]


class Trackers(Hook):
    """The hook, on the main rank only. Lines go into a queue; one thread opens the trackers and feeds them.

    So a slow disk or a hang does not delay training. `openers` replaces the registry, for tests."""

    def __init__(self, openers: Mapping[str, OpenTracker] | None = None) -> None:
        self._openers = openers
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED_LINES)
        self._thread: threading.Thread | None = None
        self._trackers: dict[str, Tracker] = {}
        self._failures: dict[str, int] = {}
        self._opened_at: dict[str, float] = {}
        self._polled_at = time.monotonic()
        self._lines = self._dropped = 0

    def on_start(self, training: Training) -> None:
        self._run, self._recipe, self._first_step = training.run, training.recipe, training.step
        self._say = training.say
        if training.recipe.trackers.enabled and training.world.is_main:
            self._count = count_lines(training.run)  # before the first new line, so that no line is counted twice
            self._thread = threading.Thread(target=self._export, name="windlass-trackers", daemon=True)
            self._thread.start()

    def on_log(self, training: Training, line: dict[str, Any]) -> None:
        self._lines += 1
        if self._thread is None or (self._lines - 1) % self._recipe.trackers.every:
            return
        try:
            self._queue.put_nowait(dict(line))
        except queue.Full:
            self._dropped += 1

    def on_stop(self, training: Training, reason: str | None) -> None:
        """Wait a little for the queue to drain; a tracker that hangs is abandoned."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._dropped:
            training.say(
                f"trackers were too slow: {self._dropped:,} lines were not exported; metrics.jsonl has every line"
            )
        if self._thread.is_alive():
            training.say(
                f"trackers did not close within {CLOSE_SECONDS:.0f} s and were abandoned; metrics.jsonl has every line"
            )

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _export(self) -> None:
        for name in self._recipe.trackers.enabled:
            self._open(name)
        while (line := self._queue.get()) is not None:
            self._count += 1
            for name in list(self._trackers):
                try:
                    self._trackers[name].log(line, self._count)
                    self._failures[name] = 0
                except (Exception, SystemExit) as error:
                    self._failures[name] = self._failures.get(name, 0) + 1
                    if self._failures[name] >= MAX_FAILURES:
                        self._say(f"tracker {name} was disabled after {MAX_FAILURES} failures: {_first_line(error)}")
                        self._close(name)
            # `windlass sync` uploads closed files only, because W&B appends whatever it is sent, also twice.
            offline, now, request = self._offline_names(), time.monotonic(), self._run.requests / "part"
            if not offline or now - self._polled_at < REQUEST_POLL_SECONDS:
                continue
            self._polled_at = now
            if request.exists():
                for name in offline:
                    self._close(name)
                    # W&B names a file by the second it was opened in: another of that name would overwrite the first.
                    time.sleep(max(0.0, 1.1 - (time.monotonic() - self._opened_at[name])))
                    self._open(name)
                with contextlib.suppress(OSError):
                    request.unlink()
                self._request_sync()
        offline = self._offline_names()
        for name in list(self._trackers):
            self._close(name)
        if offline:
            self._request_sync()

    def _open(self, name: str) -> None:
        try:
            opener: OpenTracker = self._openers[name] if self._openers else TRACKERS.load(name)
            self._trackers[name] = opener(self._run, self._recipe, self._first_step)
            self._opened_at[name] = time.monotonic()
        except (Exception, SystemExit) as error:  # a tracker must not end a training run; some leave by exit()
            self._say(f"tracker {name} was disabled: {_first_line(error)}; metrics.jsonl has every line")

    def _close(self, name: str) -> None:
        with contextlib.suppress(Exception, SystemExit):
            self._trackers.pop(name).close()

    def _offline_names(self) -> list[str]:
        return [name for name, tracker in self._trackers.items() if tracker.uploads_later]

    def _request_sync(self) -> None:
        """Leave the file that `windlass sync --watch` waits for."""
        with contextlib.suppress(OSError):
            write_atomic(self._run.requests / "sync", f"{time.time()}\n", sync=False)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# -- what trackers use -----------------------------------------------------------------------------------------------


def count_lines(run: Run) -> int:
    """Lines of metrics.jsonl: the counter of a resumed export continues from there."""
    try:
        with run.metrics_file.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numeric values of a metrics line; trackers take nothing else."""
    return {k: float(v) for k, v in line.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def tracker_id(run: Run) -> str:
    """One id for all exports of a run, on every machine it moves to."""
    file = run.trackers / "id"
    with contextlib.suppress(OSError):
        if text := file.read_text().strip():
            return text
    new_id = f"{re.sub(r'[^A-Za-z0-9-]+', '-', run.name)[:40].strip('-')}-{uuid.uuid4().hex[:8]}"
    write_atomic(file, new_id + "\n")
    return new_id


def public_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe for a tracker to show, without the launch environment, which may hold keys."""
    return recipe.model_dump(mode="json", exclude={"launch": {"env"}})
