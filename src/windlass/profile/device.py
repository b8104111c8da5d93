"""How busy was the device? Utilisation, SM efficiency, occupancy, and what it waited for while idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windlass.profile.intervals import gaps, level, union
from windlass.profile.roles import Mode
from windlass.profile.steps import Launches, Steps
from windlass.profile.trace import MISSING, Floats, Ints, Kind, Mask, Trace


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """One device over all steps. None: the trace does not carry it."""

    device: int
    utilization: float
    """Share of the steps in which at least one kernel ran, communication included, copies not."""
    sm_efficiency: float | None
    """Blocks per SM of the running kernels, at most 1, averaged over the steps."""
    occupancy_pct: float | None
    """Estimated achieved occupancy, weighted by kernel time."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Mean per step: time in which the device ran nothing, and what the next piece of work was waiting for."""

    idle_us: float
    host_wait_us: float
    """The next kernel had not been launched yet: the host is too slow."""
    kernel_wait_us: float
    """The next kernel was launched but did not start: it waited for another, or for the launch to arrive."""
    other_us: float
    """No launch is known for the next kernel, or none follows."""


def device_ids(trace: Trace, rows: Ints, mode: Mode) -> Ints:
    """The device of each row. Where the event does not say, the process id is the device; the plugin gave up there."""
    ids = trace.device[rows].astype(np.int64)
    if mode is Mode.TB:
        return ids
    process = np.array(
        [int(pid) if pid.isdigit() and int(pid) < 1024 else MISSING for pid, _ in trace.threads], dtype=np.int64
    )
    return np.where(ids == MISSING, process[trace.thread[rows]], ids)


def device_use(trace: Trace, steps: Steps, mode: Mode) -> list[DeviceUse]:
    kernels = trace.rows(Kind.KERNEL)
    ids = device_ids(trace, kernels, mode)
    span = steps.last - steps.first
    if span <= 0:
        return []
    return [_use_of(trace, kernels[ids == d], int(d), steps) for d in np.unique(ids) if d != MISSING]


def _use_of(trace: Trace, rows: Ints, device: int, steps: Steps) -> DeviceUse:
    low, high = steps.first, steps.last
    busy = union(trace.start[rows], trace.end[rows]).within(np.array([low]), np.array([high]))[0]
    return DeviceUse(
        device=device,
        utilization=float(busy) / (high - low),
        sm_efficiency=_sm_efficiency(trace, rows, low, high),
        occupancy_pct=_occupancy(trace, rows, low, high),
    )


def _sm_efficiency(trace: Trace, rows: Ints, low: float, high: float) -> float | None:
    rows = rows[trace.blocks[rows] > 0.0]
    start, end, total = level(trace.start[rows], trace.end[rows], trace.blocks[rows])
    length = _clipped(start, end, low, high)
    if not (length > 0).any():
        return None
    return float((np.minimum(total, 1.0) * length).sum()) / (high - low)


def _occupancy(trace: Trace, rows: Ints, low: float, high: float) -> float | None:
    rows = rows[trace.occupancy[rows] >= 0.0]
    length = _clipped(trace.start[rows], trace.end[rows], low, high)
    busy = float(length.sum())
    return float((trace.occupancy[rows] * length).sum()) / busy if busy > 0 else None


def _clipped(start: Floats, end: Floats, low: float, high: float) -> Floats:
    return np.asarray(np.maximum(np.minimum(end, high) - np.maximum(start, low), 0.0))


def idle_time(trace: Trace, launches: Launches, steps: Steps, mode: Mode) -> Idle | None:
    """Each hole on a device's timeline is split at the launch of the work that ends it. None without a device."""
    rows = launches.device_rows
    if not len(rows):
        return None
    ids = device_ids(trace, rows, mode)
    parts = np.zeros(4)
    devices = [d for d in np.unique(ids) if d != MISSING] or [MISSING]
    for device in devices:
        parts += _holes(trace, launches, ids == device, steps)
    idle, host, kernel, other = (float(v) for v in parts / len(steps) / len(devices))
    return Idle(idle_us=idle, host_wait_us=host, kernel_wait_us=kernel, other_us=other)


def _holes(trace: Trace, launches: Launches, mine: Mask, steps: Steps) -> Floats:
    rows, calls = launches.device_rows[mine], launches.call_of[mine]
    holes = gaps(union(trace.start[rows], trace.end[rows]), steps.first, steps.last)
    if not len(holes):
        return np.zeros(4)
    after = np.searchsorted(trace.start[rows], holes.end, side="left")
    follows = after < len(rows)
    call = np.where(follows, calls[np.minimum(after, len(rows) - 1)], MISSING)
    launched = np.where(
        call >= 0, trace.start[launches.calls[np.maximum(call, 0)]] if len(launches.calls) else 0.0, np.nan
    )
    length = holes.end - holes.start
    host = np.where(call >= 0, np.clip(launched - holes.start, 0.0, length), 0.0)
    kernel = np.where(call >= 0, length - host, 0.0)
    return np.array([length.sum(), host.sum(), kernel.sum(), (length - host - kernel).sum()])
