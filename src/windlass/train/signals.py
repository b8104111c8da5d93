"""Does anyone want this run to stop or to save? Signals, the scheduler's end time, and request files, agreed by all ranks.

The ranks agree by one tiny all-reduce per step on a CPU group of its own. It is started at one step and read at the next, so no
step waits for it and the device is never synchronised.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from windlass.clusters import scheduler
from windlass.config.save import SaveConfig
from windlass.runs.folder import Run
from windlass.runs.walltime import wall_time_lead_seconds

NONE, SIGTERM, SIGUSR1, SIGINT, WALL_TIME, REQUEST, SIGHUP = range(7)
REASONS = {
    SIGTERM: "SIGTERM",
    SIGUSR1: "SIGUSR1",
    SIGINT: "Ctrl-C",
    WALL_TIME: "the wall-time limit is near",
    REQUEST: "a request in the run folder",
    SIGHUP: "SIGHUP (the terminal was closed)",
}
_CODES = {signal.SIGTERM: SIGTERM, signal.SIGUSR1: SIGUSR1, signal.SIGINT: SIGINT, signal.SIGHUP: SIGHUP}
_ASK_AGAIN_SECONDS = 300.0
_LOOK_SECONDS = 2.0


class _Ears:
    """The first signal that asked this process to stop; heard from the very start, before there is a flag to ask."""

    code = NONE
    before: ClassVar[dict[signal.Signals, Any]] = {}


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Take the signals over for a block. They can only be taken in the main thread; elsewhere they keep their meaning."""
    if _Ears.before or threading.current_thread() is not threading.main_thread():
        yield  # an outer block listens already
        return
    _Ears.code = NONE
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # under nohup
    _Ears.before = {number: signal.signal(number, _heard) for number in _CODES if number not in ignored}
    try:
        yield
    finally:
        for number, handler in _Ears.before.items():
            signal.signal(number, handler)
        _Ears.before, _Ears.code = {}, NONE


def _heard(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:  # the second Ctrl-C is the kernel's: it ends the process even inside a collective
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _Ears.code = _Ears.code or _CODES[signal.Signals(number)]


@dataclass(frozen=True)
class Agreed:
    """What all ranks do now."""

    stop: str | None = None
    """Why to stop: finish the step, save, mark the run resumable and exit with EXIT_RESUMABLE."""
    save: bool = False
    """Save now and go on."""


class StopFlag:
    """Collects wishes to stop or save on this rank, and what all ranks agreed on."""

    def __init__(
        self,
        run: Run,
        config: SaveConfig | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        end_time: Callable[[], float | None] = scheduler.end_time,
    ) -> None:
        self.run, self.rank, self.world_size = run, rank, world_size
        self._config = config or SaveConfig()
        self._code, self._save_requested, self._carried = NONE, False, False
        self._ask_end, self._end, self._asked = end_time, None, -1e18
        self._looked = -1e18
        self._save_seconds: float | None = None
        self._step_seconds: float | None = None
        self._group, self._vote, self._work = _vote_group(world_size), None, None

    # -- hearing --------------------------------------------------------------------------------------------------------

    def request(self, code: int = REQUEST) -> None:
        """Ask for a stop from inside the process."""
        self._code = self._code or code

    def measured(self, *, save_seconds: float | None = None, step_seconds: float | None = None) -> None:
        """Tell how long a save and a step take: the lead before the wall-time limit follows."""
        self._save_seconds = save_seconds if save_seconds is not None else self._save_seconds
        self._step_seconds = step_seconds if step_seconds is not None else self._step_seconds

    @property
    def lead_seconds(self) -> float:
        """How long before the end of the job to stop."""
        return lead_seconds(self._config, self._save_seconds, self._step_seconds)

    # -- looking --------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> str | None:
        """Why this rank wants to stop, before the others were asked."""
        self._look()
        return REASONS.get(self._code)

    def _look(self) -> None:
        """Rank 0 looks at the end time and at request files, every few seconds at most."""
        self._code = self._code or _Ears.code
        now = time.monotonic()
        if self.rank or self._code or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if now - self._asked > _ASK_AGAIN_SECONDS:
            self._asked = now
            threading.Thread(target=self._learn_end, name="windlass-end-time", daemon=True).start()
        if self._end is not None and time.time() >= self._end - self.lead_seconds:
            self._code = WALL_TIME
        elif _take(self.run, "stop"):
            self._code = REQUEST
        self._save_requested = self._save_requested or _take(self.run, "save")

    def _learn_end(self) -> None:
        self._end = self._ask_end()

    # -- agreeing -------------------------------------------------------------------------------------------------------

    def agree(self, save: bool = False) -> Agreed:
        """Call once per step on every rank, with this rank's wish to save.

        With several ranks the answer is what was wished at the call before, so it is the same on all of them.
        """
        self._look()
        mine = (self._code, int(save or self._save_requested))
        agreed = Agreed(REASONS.get(mine[0]), bool(mine[1])) if self._group is None else self._exchange(mine)
        if agreed.save:
            self._save_requested = False
        agreed, self._carried = Agreed(agreed.stop, agreed.save or self._carried), False
        return agreed

    def agreed_to_stop(self) -> str | None:
        """The same between steps (in each batch of a validation pass); a save that was agreed on waits for the next `agree`."""
        agreed = self.agree()
        self._carried = agreed.save
        return agreed.stop

    def _exchange(self, mine: tuple[int, int]) -> Agreed:
        before = self._collect()
        self._send(mine)
        return before

    def _send(self, mine: tuple[int, int]) -> None:
        import torch
        import torch.distributed as dist

        self._vote = torch.tensor(mine, dtype=torch.int32)
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _collect(self) -> Agreed:
        if self._work is None or self._vote is None:
            return Agreed()
        self._work.wait()
        code, save = self._vote.tolist()
        self._work = None
        return Agreed(REASONS.get(code), bool(save))

    def close(self) -> None:
        """Read the vote that is still under way."""
        with contextlib.suppress(RuntimeError):  # another rank is gone already
            self._collect()

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopFlag]:
        with listening():
            try:
                yield self
            finally:
                self.close()


def lead_seconds(config: SaveConfig, save_seconds: float | None, step_seconds: float | None) -> float:
    """save.lead, or what the measured save and step need."""
    return float(config.lead) if config.lead != "auto" else wall_time_lead_seconds(save_seconds, step_seconds)


def _take(run: Run, name: str) -> bool:
    path = run.requests / name
    if not path.exists():
        return False
    with contextlib.suppress(OSError):
        path.unlink()
    return True


def _vote_group(world_size: int) -> Any:
    if world_size == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo")
