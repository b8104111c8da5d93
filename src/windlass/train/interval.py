"""How often is it worth saving? From steps, tokens or minutes, or from what start-up and saving were measured to cost. No torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from windlass.config.save import SaveConfig, interval
from windlass.units import print_seconds

STARTUP_LOW, STARTUP_HIGH = 3.0, 5.0
"""The Italia team found 3 to 5 times the start-up time a good interval: a failure then loses about as much work as the restart costs."""
STALL_SHARE = 0.02
"""Training never waits for saves longer than this share of its time."""


@dataclass(frozen=True)
class Choice:
    """An interval and why."""

    seconds: float
    reason: str


def choose(
    startup_seconds: float, stall_seconds: float | None, write_seconds: float | None, failures_per_day: float
) -> Choice:
    """3 to 5 times the start-up, no longer than the optimum for the failure rate, and never so short that saving gets in the way."""
    high = STARTUP_HIGH * startup_seconds
    optimum = _optimum(stall_seconds, failures_per_day)
    words = [
        f"start-up took {print_seconds(startup_seconds)}, so {print_seconds(STARTUP_LOW * startup_seconds)} to {print_seconds(high)}"
    ]
    seconds = high
    if optimum is not None:
        seconds = min(high, optimum)
        words.append(
            f"the optimum for a stall of {print_seconds(stall_seconds)} and {failures_per_day:g} failures a day is {print_seconds(optimum)}"
        )
    floor, why = _floor(stall_seconds, write_seconds)
    if seconds < floor:
        seconds = floor
        words.append(why)
    return Choice(seconds, f"save every {print_seconds(seconds)}: {'; '.join(words)}")


def _optimum(stall_seconds: float | None, failures_per_day: float) -> float | None:
    """Young and Daly: sqrt(2 x cost of a save x mean time between failures)."""
    if stall_seconds is None or failures_per_day <= 0:
        return None
    return math.sqrt(2 * stall_seconds * 86400.0 / failures_per_day)


def _floor(stall_seconds: float | None, write_seconds: float | None) -> tuple[float, str]:
    by_stall = (stall_seconds or 0.0) / STALL_SHARE
    by_write = 2 * (write_seconds or 0.0)
    if by_stall >= by_write:
        return (
            by_stall,
            f"but no shorter than {print_seconds(by_stall)}, so that training waits at most {STALL_SHARE:.0%} of the time",
        )
    return by_write, f"but no shorter than twice the {print_seconds(write_seconds)} that writing takes"


def _median(values: list[float]) -> float | None:
    """Of the newest few, so that one slow save on a busy file system changes little."""
    newest = sorted(values[-9:])
    return newest[len(newest) // 2] if newest else None


def process_seconds() -> float:
    """How long this process has lived: imports, waiting for other ranks and restoring are part of the start-up too."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return time.process_time()  # no /proc: the CPU time is a lower bound
    return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


class Interval:
    """Says when the next save is due. Time is monotonic: a clock that jumps changes nothing.

    Counts are the same on all ranks; clocks are not, so a wish by the clock goes through `signals.StopFlag.agree`.
    """

    def __init__(self, config: SaveConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._kind, self._size = ("seconds", math.inf) if config.every == "auto" else interval(config.every)
        self._step, self._tokens, self._time = 0, 0, clock()
        self._startup: float | None = None
        self._stalls: list[float] = []
        self._writes: list[float] = []
        self.choice: Choice | None = None
        """What "auto" has chosen; None before the start-up was measured, and when the recipe gives the interval."""

    @property
    def automatic(self) -> bool:
        return self._config.every == "auto"

    def began(self, step: int, tokens: int) -> None:
        """The position of the start or the newest save: the next one is counted from here."""
        self._step, self._tokens, self._time = step, tokens, self._clock()

    saved = began

    def measured(
        self,
        *,
        startup_seconds: float | None = None,
        stall_seconds: float | None = None,
        write_seconds: float | None = None,
    ) -> Choice | None:
        """Tell what start-up or a save took; the new choice of "auto" when it differs by more than a tenth from the last."""
        if startup_seconds is not None:
            self._startup = startup_seconds
        for value, known in ((stall_seconds, self._stalls), (write_seconds, self._writes)):
            if value is not None:
                known.append(value)
        if not self.automatic or self._startup is None:
            return None
        new = choose(self._startup, _median(self._stalls), _median(self._writes), self._config.failures_per_day)
        if self.choice is not None and abs(new.seconds - self.choice.seconds) <= 0.1 * self.choice.seconds:
            return None
        self.choice, self._size = new, new.seconds
        return new

    def due_by_count(self, step: int, tokens: int) -> bool:
        """A multiple of the steps or tokens was passed: every rank finds the same without asking."""
        if self._kind == "steps":
            return step // self._size > self._step // self._size
        return self._kind == "tokens" and tokens // self._size > self._tokens // self._size

    def due_by_clock(self, step: int) -> bool:
        """The time is over, on this rank's clock: a wish that the ranks have to agree on."""
        return self._kind == "seconds" and step > self._step and self._clock() - self._time >= self._size
