"""Exports metrics lines to trackers (W&B, TensorBoard, MLflow) in a thread of its own; no tracker can stop training.

All exports of a run carry one id, kept in the run folder, and a counter that continues over restarts, because W&B drops lines
whose number goes back. Keys and passwords are the tracker's own business and are never written by windlass.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from windlass.config import Recipe
from windlass.files import write_atomic
from windlass.registry import TRACKERS
from windlass.runs.folder import Run
from windlass.train.hooks import Hook

if TYPE_CHECKING:
    from windlass.train.job import Job

MAX_QUEUED_LINES = 10_000
"""Lines that may wait for a slow tracker; further ones are dropped and counted (they are in metrics.jsonl)."""
MAX_FAILURES = 3
"""Failures in a row after which a tracker is closed."""
CLOSE_SECONDS = 30.0
REQUEST_POLL_SECONDS = 5.0
"""How often the exporter checks whether `windlass sync` asks for closed files."""


class Tracker(Protocol):
    uploads_later: bool
    """It writes offline files that `windlass sync` uploads; they are closed and reopened when sync asks."""

    def log(self, line: dict[str, Any], count: int) -> None:
        """Export one metrics line, the `count`-th of the run."""

    def close(self) -> None: ...


OpenTracker = Callable[[Run, Recipe, int], Tracker]
"""(run, recipe, first step) -> tracker; may take seconds and may fail."""


class Trackers(Hook):
    """The hook; exports on the main rank only. `openers` replaces the registry, for tests."""

    def __init__(self, openers: Mapping[str, OpenTracker] | None = None) -> None:
        self._openers = openers
        self._exporter: Exporter | None = None
        self._every = 1
        self._lines = 0

    def on_start(self, job: Job) -> None:
        names = job.recipe.trackers.enabled
        if not names or not job.world.is_main:
            return
        self._every = job.recipe.trackers.every
        openers = {name: self._openers[name] if self._openers else load_opener(name) for name in names}
        self._exporter = Exporter(job.run, job.recipe, openers, first_step=job.step, say=job.say)
        self._exporter.start()

    def on_log(self, job: Job, line: dict[str, Any]) -> None:
        self._lines += 1
        if self._exporter is not None and (self._lines - 1) % self._every == 0:
            self._exporter.put(line)

    def on_stop(self, job: Job, reason: str | None) -> None:
        if self._exporter is not None:
            self._exporter.stop()


def load_opener(name: str) -> OpenTracker:
    """Opens the tracker `name`; its module is imported then, in the exporter's thread."""
    return lambda run, recipe, first_step: TRACKERS.load(name)(run, recipe, first_step)


class Exporter:
    """Lines go into a queue; one thread opens the trackers and feeds them, so that a slow disk or a hang does not delay training."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        openers: Mapping[str, OpenTracker],
        *,
        first_step: int,
        say: Callable[[str], None],
    ) -> None:
        self._run, self._recipe, self._openers, self._first_step, self._say = run, recipe, openers, first_step, say
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED_LINES)
        self._thread = threading.Thread(target=self._export, name="windlass-trackers", daemon=True)
        self._trackers: dict[str, Tracker] = {}
        self._failures: dict[str, int] = {}
        self._opened_at: dict[str, float] = {}
        self._polled_at = time.monotonic()
        self._count = 0
        self.dropped = 0

    def start(self) -> None:
        self._count = count_lines(self._run)  # before the first new line, so that no line is counted twice
        self._thread.start()

    def put(self, line: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(dict(line))
        except queue.Full:
            self.dropped += 1

    def stop(self) -> None:
        """Wait a little for the queue to drain; a tracker that hangs is abandoned."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self.dropped:
            self._say(f"trackers were too slow: {self.dropped:,} lines were not exported; metrics.jsonl has every line")
        if self._thread.is_alive():
            self._say(
                f"trackers did not close within {CLOSE_SECONDS:.0f} s and were abandoned; metrics.jsonl has every line"
            )

    # -- in the thread ----------------------------------------------------------------------------------------------------

    def _export(self) -> None:
        for name in self._openers:
            self._open(name)
        while (line := self._queue.get()) is not None:
            self._count += 1
            for name in list(self._trackers):
                self._log(name, line)
            self._reopen_if_requested()
        offline = self._offline_names()
        for name in list(self._trackers):
            self._close(name)
        if offline:
            self._request_sync()

    def _open(self, name: str) -> None:
        try:
            self._trackers[name] = self._openers[name](self._run, self._recipe, self._first_step)
            self._opened_at[name] = time.monotonic()
        except (Exception, SystemExit) as error:  # a tracker must not end a training run; some leave by exit()
            self._say(f"tracker {name} is off: {_first_line(error)}; metrics.jsonl has every line")

    def _log(self, name: str, line: dict[str, Any]) -> None:
        try:
            self._trackers[name].log(line, self._count)
            self._failures[name] = 0
        except (Exception, SystemExit) as error:
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] >= MAX_FAILURES:
                self._say(f"tracker {name} is off after {MAX_FAILURES} failures: {_first_line(error)}")
                self._close(name)

    def _close(self, name: str) -> None:
        with contextlib.suppress(Exception, SystemExit):
            self._trackers.pop(name).close()

    def _offline_names(self) -> list[str]:
        return [name for name, tracker in self._trackers.items() if tracker.uploads_later]

    def _reopen_if_requested(self) -> None:
        """`windlass sync` only uploads closed files, because W&B appends whatever it is sent, also twice: close and reopen."""
        names, now = self._offline_names(), time.monotonic()
        if not names or now - self._polled_at < REQUEST_POLL_SECONDS:
            return
        self._polled_at = now
        request = self._run.requests / "part"
        if not request.exists():
            return
        for name in names:
            self._close(name)
            # W&B names a file by the second it was opened in: another one of that name would overwrite the first.
            time.sleep(max(0.0, 1.1 - (time.monotonic() - self._opened_at[name])))
            self._open(name)
        with contextlib.suppress(OSError):
            request.unlink()
        self._request_sync()

    def _request_sync(self) -> None:
        """Leave the file that `windlass sync --watch` waits for."""
        with contextlib.suppress(OSError):
            write_atomic(self._run.requests / "sync", f"{time.time()}\n", sync=False)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# -- what trackers use ----------------------------------------------------------------------------------------------------


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
    name = re.sub(r"[^A-Za-z0-9-]+", "-", run.name)[:40].strip("-")
    new_id = f"{name}-{uuid.uuid4().hex[:8]}"
    write_atomic(file, new_id + "\n")
    return new_id


def public_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe for a tracker to show, without the launch environment, which may hold keys."""
    return recipe.model_dump(mode="json", exclude={"launch": {"env"}})
