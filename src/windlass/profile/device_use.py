"""Device utilisation, SM efficiency and occupancy, and what the device waited for while idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windlass.profile.event_names import Mode
from windlass.profile.intervals import gaps, running_sum, union
from windlass.profile.steps import Launches, Steps
from windlass.profile.trace import MISSING, Floats, Ints, Kind, Trace


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """One device over all steps; None where the trace does not have the value."""

    device: int
    utilization: float  # share of the steps in which at least one kernel ran, communication included, copies not
    sm_efficiency: float | None  # blocks per SM of the running kernels, at most 1, averaged over the steps
    occupancy_pct: float | None  # estimated achieved occupancy, weighted by kernel time


@dataclass(frozen=True, kw_only=True)
class IdleTime:
    """Mean per step: time in which the device ran nothing, by what the next work on it was waiting for."""

    idle_us: float
    host_wait_us: float  # the next kernel was not launched yet: the host is too slow
    kernel_wait_us: float  # the next kernel was launched but did not start
    other_us: float  # no launch is known for the next kernel, or no kernel follows


def measure_devices(trace: Trace, steps: Steps, mode: Mode) -> list[DeviceUse]:
    low, high = steps.first, steps.last
    if high <= low:
        return []

    def length_in_steps(start: Floats, end: Floats) -> Floats:
        return np.asarray(np.maximum(np.minimum(end, high) - np.maximum(start, low), 0.0))

    kernels = trace.rows(Kind.KERNEL)
    ids = _device_ids(trace, kernels, mode)
    devices = []
    for device in np.unique(ids[ids != MISSING]):
        rows = kernels[ids == device]
        busy = union(trace.start[rows], trace.end[rows]).within(np.array([low]), np.array([high]))[0]

        with_blocks = rows[trace.blocks[rows] > 0.0]
        start, end, blocks = running_sum(trace.start[with_blocks], trace.end[with_blocks], trace.blocks[with_blocks])
        level_length = length_in_steps(start, end)
        filled = float((np.minimum(blocks, 1.0) * level_length).sum())

        with_occupancy = rows[trace.occupancy[rows] >= 0.0]
        kernel_length = length_in_steps(trace.start[with_occupancy], trace.end[with_occupancy])
        occupied = float((trace.occupancy[with_occupancy] * kernel_length).sum())
        devices.append(
            DeviceUse(
                device=int(device),
                utilization=float(busy) / (high - low),
                sm_efficiency=filled / (high - low) if (level_length > 0).any() else None,
                occupancy_pct=occupied / float(kernel_length.sum()) if kernel_length.sum() > 0 else None,
            )
        )
    return devices


def measure_idle_time(trace: Trace, launches: Launches, steps: Steps, mode: Mode) -> IdleTime | None:
    """Each gap on a device's timeline is split at the launch of the work that ends it. None without a device."""
    if not len(launches.device_rows):
        return None
    ids = _device_ids(trace, launches.device_rows, mode)
    devices = np.unique(ids[ids != MISSING]) if (ids != MISSING).any() else np.array([MISSING])
    totals = np.zeros(4)
    for device in devices:
        rows, calls = launches.device_rows[ids == device], launches.call_of[ids == device]
        idle = gaps(union(trace.start[rows], trace.end[rows]), steps.first, steps.last)
        length = idle.end - idle.start
        following = np.searchsorted(trace.start[rows], idle.end, side="left")
        call = np.where(following < len(rows), calls[np.minimum(following, len(rows) - 1)], MISSING)
        host_wait, kernel_wait = np.zeros(len(idle)), np.zeros(len(idle))
        known = call >= 0
        launched_at = trace.start[launches.calls[call[known]]]
        host_wait[known] = np.clip(launched_at - idle.start[known], 0.0, length[known])
        kernel_wait[known] = length[known] - host_wait[known]
        other = length - host_wait - kernel_wait
        totals += np.array([length.sum(), host_wait.sum(), kernel_wait.sum(), other.sum()])
    idle_us, host_us, kernel_us, other_us = (float(v) for v in totals / len(steps) / len(devices))
    return IdleTime(idle_us=idle_us, host_wait_us=host_us, kernel_wait_us=kernel_us, other_us=other_us)


def _device_ids(trace: Trace, rows: Ints, mode: Mode) -> Ints:
    """The device of each row. Where an event does not name it, the process id is the device; the plugin had no id."""
    ids = trace.device[rows].astype(np.int64)
    if mode is Mode.TB:
        return ids
    pids = [int(pid) if pid.isdigit() and int(pid) < 1024 else MISSING for pid, _ in trace.threads]
    return np.where(ids == MISSING, np.array(pids, dtype=np.int64)[trace.thread[rows]], ids)
