"""The figures that follow from metrics.jsonl, each computed here alone: report, dashboard, comparison and sweep show
the same."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.runs.metrics import MetricsLine

Numbers = npt.NDArray[np.float64]
# The values of a key of metrics.jsonl in the file's order, NaN where unknown.
Column = Callable[[str], Numbers]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """None: not measured. Speeds are medians of the last 200 logged steps, without the first two (compilation)."""

    step: int | None
    tokens: float | None
    loss: float | None  # median of the last 10 logged steps
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    mfu: float | None
    hfu: float | None
    step_seconds: float | None
    utilization: float | None
    spread_seconds: float | None
    memory_bytes: float | None  # highest of the whole run: a restart resets the counters
    watts: float | None  # newest
    slowest_rank: int | None  # newest


def measure(column: Column, devices: int | None) -> Measured:
    speed, device_speed = (recent_median(column(f"tokens_per_second{end}")) for end in ("", "_per_device"))
    if device_speed is None and speed is not None and devices:
        device_speed = speed / devices
    step, rank = last_known(column("step")), last_known(column("slowest_rank"))
    memory = known(column("memory_bytes"))
    return Measured(
        step=None if step is None else int(step),
        tokens=last_known(column("tokens")),
        loss=recent_median(column("loss"), last=10, skip=0),
        tokens_per_second=speed,
        tokens_per_second_per_device=device_speed,
        mfu=recent_median(column("mfu")),
        hfu=recent_median(column("hfu")),
        step_seconds=recent_median(column("step_seconds")),
        utilization=recent_median(column("utilization")),
        spread_seconds=recent_median(column("spread_seconds")),
        memory_bytes=float(memory.max()) if len(memory) else None,
        watts=last_known(column("watts")),
        slowest_rank=None if rank is None else int(rank),
    )


def columns_of(lines: Iterable[MetricsLine]) -> Column:
    counted = [line for line in lines if line.step is not None]
    return lambda key: np.array([getattr(line, key) for line in counted], dtype=np.float64)


def known(values: Numbers) -> Numbers:
    return values[~np.isnan(values)]


def recent_median(values: Numbers, last: int = 200, skip: int = 2) -> float | None:
    """Median of the last values, without the first lines (compilation); None when there are none."""
    late = np.sort(known(values[skip:] if len(values) > skip + 2 else values)[-last:])
    # np.median takes ten times as long for so few, and a list of runs needs thousands of them.
    return float(late[(len(late) - 1) // 2] + late[len(late) // 2]) / 2 if len(late) else None


def last_known(values: Numbers) -> float | None:
    late = known(values)
    return float(late[-1]) if len(late) else None
