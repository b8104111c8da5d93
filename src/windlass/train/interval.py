"""When the next checkpoint is due: by steps, tokens or minutes, or from measured start-up and save times. No torch."""

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from windlass.config.save import SaveConfig, parse_interval
from windlass.units import DAY, print_seconds, print_share

# The Italia team found 3 to 5 times the start-up time a good interval: a failure then loses about as much work as the
# restart costs.
STARTUPS = 5.0
# The largest share of its time that training waits for saves.
STALL_SHARE = 0.02


@dataclass(frozen=True)
class IntervalChoice:
    """The interval that save.every = "auto" uses, and why."""

    seconds: float
    reason: str


def choose_interval(
    startup_seconds: float, stall_seconds: float | None, write_seconds: float | None, failures_per_day: float
) -> IntervalChoice:
    """5 times the start-up, at most the optimum for the failure rate, and not so short that saves delay training."""
    seconds = STARTUPS * startup_seconds
    reasons = [f"{STARTUPS:g} times the start-up of {print_seconds(startup_seconds)}"]
    if stall_seconds is not None and failures_per_day > 0:
        # Young and Daly: sqrt(2 x cost of a save x mean time between failures).
        optimum = math.sqrt(2 * stall_seconds * DAY / failures_per_day)
        seconds = min(seconds, optimum)
        reasons.append(
            f"the optimum for a stall of {print_seconds(stall_seconds)} and {failures_per_day:g} failures a day "
            f"is {print_seconds(optimum)}"
        )
    by_stall, by_write = (stall_seconds or 0.0) / STALL_SHARE, 2 * (write_seconds or 0.0)
    if seconds < max(by_stall, by_write):
        seconds = max(by_stall, by_write)
        reasons.append(
            f"but at least {print_seconds(by_stall)}, so that training waits at most {print_share(STALL_SHARE, digits=0)} of the time"
            if by_stall >= by_write
            else f"but at least twice the {print_seconds(write_seconds)} that writing takes"
        )
    return IntervalChoice(seconds, f"save every {print_seconds(seconds)}: {'; '.join(reasons)}")


def process_seconds() -> float:
    """Age of this process: imports, waiting for other ranks and restoring are part of the start-up too."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return time.process_time()  # no /proc: the CPU time is a lower bound
    return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


class SaveTimer:
    """Says when the next save is due. Uses a monotonic clock, so that a clock change has no effect.

    Counts are the same on all ranks; clocks are not, so a save by the clock goes through `signals.StopFlag.agree`.
    """

    def __init__(self, config: SaveConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._unit, self._size = ("seconds", math.inf) if config.every == "auto" else parse_interval(config.every)
        self._step, self._tokens, self._time = 0, 0, clock()
        self._startup_seconds: float | None = None
        self._stall_seconds: list[float] = []
        self._write_seconds: list[float] = []
        # What "auto" chose; None before the start-up was measured, and when the recipe sets the interval.
        self.choice: IntervalChoice | None = None

    def restart(self, step: int, tokens: int) -> None:
        """Count from this position: the start, a save or a rollback."""
        self._step, self._tokens, self._time = step, tokens, self._clock()

    def measured(
        self,
        *,
        startup_seconds: float | None = None,
        stall_seconds: float | None = None,
        write_seconds: float | None = None,
    ) -> IntervalChoice | None:
        """Report how long start-up or a save took; the new choice of "auto" when it changes by more than a tenth."""
        if startup_seconds is not None:
            self._startup_seconds = startup_seconds
        self._stall_seconds += [] if stall_seconds is None else [stall_seconds]
        self._write_seconds += [] if write_seconds is None else [write_seconds]
        if self._config.every != "auto" or self._startup_seconds is None:
            return None
        # The median of the newest few, so that one slow save on a busy file system changes little.
        stall, write = (
            statistics.median_high(values[-9:]) if values else None
            for values in (self._stall_seconds, self._write_seconds)
        )
        new = choose_interval(self._startup_seconds, stall, write, self._config.failures_per_day)
        if self.choice is not None and abs(new.seconds - self.choice.seconds) <= 0.1 * self.choice.seconds:
            return None
        self.choice, self._size = new, new.seconds
        return new

    def due_by_count(self, step: int, tokens: int) -> bool:
        """A multiple of the steps or tokens was passed: the same on every rank."""
        if self._unit == "steps":
            return step // self._size > self._step // self._size
        return self._unit == "tokens" and tokens // self._size > self._tokens // self._size

    def due_by_clock(self, step: int) -> bool:
        """The time is over on this rank's clock: the ranks have to agree on it."""
        return self._unit == "seconds" and step > self._step and self._clock() - self._time >= self._size
