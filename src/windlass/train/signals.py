"""Requests to stop or to save: signals, the wall-time limit and request files, agreed on by all ranks.

The ranks agree by one tiny all-reduce per step on a CPU group of its own. It is started at one step and read at the
next, so no step waits for it and the device is never synchronised.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from windlass.clusters import scheduler
from windlass.config.save import SaveConfig
from windlass.runs.folder import Run
from windlass.runs.walltime import wall_time_lead_seconds

NONE, SIGTERM, SIGUSR1, SIGINT, WALL_TIME, REQUEST, SIGHUP = range(7)
STOP_REASONS = {
    SIGTERM: "SIGTERM",
    SIGUSR1: "SIGUSR1",
    SIGINT: "Ctrl-C",
    WALL_TIME: "the wall-time limit is near",
    REQUEST: "a request in the run folder",
    SIGHUP: "SIGHUP (the terminal was closed)",
}
_CODES = {signal.SIGTERM: SIGTERM, signal.SIGUSR1: SIGUSR1, signal.SIGINT: SIGINT, signal.SIGHUP: SIGHUP}
STOPPING = b"\nstopping after this step and a save; a second Ctrl-C ends at once, without a save\n"
# How often the scheduler is asked for the end time, which may be extended.
END_TIME_SECONDS = 300.0
# How often rank 0 looks for request files and at the end time.
STOP_POLL_SECONDS = 2.0


@contextlib.contextmanager
def handled_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass the signals that ask to stop to `handle` for a block; not SIGHUP under nohup, where a run outlives its
    terminal."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {number: signal.signal(number, handle) for number in _CODES if number not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalListener:
    """The first signal that asked this process to stop. Signals are per process: `listener` is the only value."""

    code = NONE

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C has its default effect: it ends the process even inside a collective, and without a word.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if sys.stderr.isatty():
                os.write(2, STOPPING)
        self.code = self.code or _CODES[signal.Signals(number)]


listener = SignalListener()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handle the signals for a block. Only the main thread may do so; in other threads nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener.code = NONE
    try:
        with handled_signals(listener.handle):
            yield
    finally:
        listener.code = NONE


@dataclass(frozen=True)
class Agreed:
    """What all ranks do now."""

    # Why to stop: finish the step, save, mark the run resumable and exit with EXIT_RESUMABLE.
    stop: str | None = None
    save: bool = False


class StopFlag:
    """Collects requests to stop or save on this rank, and lets all ranks agree on them."""

    def __init__(
        self,
        run: Run,
        config: SaveConfig | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        end_time: Callable[[], float | None] = scheduler.end_time,
    ) -> None:
        self.run, self.rank = run, rank
        self._config = config or SaveConfig()
        self._code, self._save_requested, self._save_postponed = NONE, False, False
        self._ask_end_time = end_time
        self._end_time: float | None = None
        self._asked_at = self._polled_at = -1e18
        self._save_seconds: float | None = None
        self._step_seconds: float | None = None
        self._group: Any = None
        # The tensor and the handle of the all-reduce under way.
        self._vote: Any = None
        if world_size > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo")

    def measured(self, *, save_seconds: float | None = None, step_seconds: float | None = None) -> None:
        """Report how long a save and a step take; the lead before the wall-time limit depends on them."""
        self._save_seconds = save_seconds if save_seconds is not None else self._save_seconds
        self._step_seconds = step_seconds if step_seconds is not None else self._step_seconds

    @property
    def lead_seconds(self) -> float:
        """How long before the end of the job to stop: save.lead, or what the measured save and step need."""
        lead = self._config.lead
        return wall_time_lead_seconds(self._save_seconds, self._step_seconds) if lead == "auto" else float(lead)

    def agree(self, save: bool = False) -> Agreed:
        """Call once per step on every rank, with this rank's request to save.

        With several ranks the answer is what was requested at the call before, so it is the same on all of them.
        """
        self._poll()
        code, save = self._code, save or self._save_requested
        if self._group is not None:
            import torch
            import torch.distributed as dist

            vote = torch.tensor((code, int(save)), dtype=torch.int32)
            code, save = self._finish_vote()
            self._vote = vote, dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if save:
            self._save_requested = False
        agreed, self._save_postponed = Agreed(STOP_REASONS.get(code), save or self._save_postponed), False
        return agreed

    def agreed_to_stop(self) -> str | None:
        """`agree` between steps (in each batch of a validation pass): a save waits for the next `agree`."""
        agreed = self.agree()
        self._save_postponed = agreed.save
        return agreed.stop

    def _poll(self) -> None:
        """Read signals; rank 0 also checks the end time and request files, every few seconds at most."""
        self._code = self._code or listener.code
        now = time.monotonic()
        if self.rank or self._code or now - self._polled_at < STOP_POLL_SECONDS:
            return
        self._polled_at = now
        if now - self._asked_at > END_TIME_SECONDS:
            self._asked_at = now
            threading.Thread(target=self._learn_end_time, name="windlass-end-time", daemon=True).start()
        if self._end_time is not None and time.time() >= self._end_time - self.lead_seconds:
            self._code = WALL_TIME
        elif _consume_request(self.run, "stop"):
            self._code = REQUEST
        self._save_requested = self._save_requested or _consume_request(self.run, "save")

    def _learn_end_time(self) -> None:
        self._end_time = self._ask_end_time()

    def _finish_vote(self) -> tuple[int, bool]:
        if self._vote is None:
            return NONE, False
        (vote, work), self._vote = self._vote, None
        work.wait()
        code, save = vote.tolist()
        return code, bool(save)

    def close(self) -> None:
        """Finish the all-reduce that is still in progress."""
        with contextlib.suppress(RuntimeError):  # another rank is gone already
            self._finish_vote()


def _consume_request(run: Run, name: str) -> bool:
    """Whether the request file exists; it is removed, so that a request counts once."""
    path = run.requests / name
    if not path.exists():
        return False
    with contextlib.suppress(OSError):
        path.unlink()
    return True
