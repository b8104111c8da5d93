"""When did each step begin and end, and which call launched which kernel?

The host marks a step, but its kernels may still run when the mark ends; so a step lasts until the last kernel that was launched
inside it, and the next one begins where that ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windlass.profile.names import is_lightning
from windlass.profile.trace import MISSING, Floats, Ints, Kind, Mask, Trace

KEEP_LAST_SHARE = 0.8
"""The last step is dropped when it launched fewer than this share of the step before: the window closed over it."""
DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)


@dataclass(frozen=True)
class Launches:
    """Which runtime call launched each device event."""

    calls: Ints
    """Rows of the runtime calls, in order of time."""
    device_rows: Ints
    """Rows of kernels, copies and memsets, in order of time."""
    call_of: Ints
    """For each device row: an index into `calls`, or MISSING."""


@dataclass(frozen=True)
class Steps:
    start: Floats
    end: Floats
    numbers: list[int]
    """The profiler's own count; empty when the trace marks no steps and counts as one."""
    dropped: int
    """Steps at the end that the window cut off."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def seconds(self) -> float:
        return float((self.end - self.start).mean()) / 1e6

    @property
    def first(self) -> float:
        return float(self.start[0])

    @property
    def last(self) -> float:
        return float(self.end[-1])


def find_launches(trace: Trace, *, tb: bool) -> Launches:
    """Match by correlation id: the nearest earlier call with the id, or the first later one (clocks of host and device differ)."""
    calls = trace.rows(Kind.RUNTIME) if tb else trace.rows(Kind.RUNTIME, Kind.DRIVER)
    device_rows = trace.rows(*DEVICE_KINDS)
    if not len(calls) or not len(device_rows):
        return Launches(calls, device_rows, np.full(len(device_rows), MISSING))
    by_id = np.lexsort((calls, trace.correlation[calls]))
    ids = trace.correlation[calls][by_id]
    wanted = trace.correlation[device_rows]
    low, high = np.searchsorted(ids, wanted, "left"), np.searchsorted(ids, wanted, "right")
    # Among calls of one id (low..high) the last that stands before the device event, else the first.
    before = _count_before(calls[by_id], device_rows, low, high)
    pick = np.where(before > 0, low + before - 1, low)
    known = high > low
    if not tb:
        known &= wanted != MISSING
    call_of = np.where(known, by_id[np.minimum(pick, len(by_id) - 1)], MISSING)
    return Launches(calls, device_rows, call_of)


def _count_before(rows: Ints, device_rows: Ints, low: Ints, high: Ints) -> Ints:
    """How many of rows[low:high] are smaller than each device row; nearly always low..high is one call."""
    single = (high - low) == 1
    count = np.zeros(len(device_rows), dtype=np.int64)
    count[single] = rows[low[single]] < device_rows[single]
    for i in np.flatnonzero((high - low) > 1):
        count[i] = np.searchsorted(rows[low[i] : high[i]], device_rows[i])
    return count


def find_steps(trace: Trace, launches: Launches, *, tb: bool) -> Steps:
    """The host's marks, stretched to the end of their kernels, without a cut-off tail."""
    start, end, numbers = _marked(trace, tb=tb)
    inside, matched = _launched_in(trace, launches, start, end)
    if not matched.any():
        return Steps(start, end, numbers, 0)
    start, end = _stretch(trace, launches, start, end, inside)
    counts = np.bincount(inside[inside >= 0], minlength=len(start))
    keep = _kept(counts)
    return Steps(start[:keep], end[:keep], numbers[:keep], len(start) - keep)


def _marked(trace: Trace, *, tb: bool) -> tuple[Floats, Floats, list[int]]:
    # The plugin also took the device's copy of the marks for steps; that doubles them.
    rows = trace.rows(Kind.STEP, Kind.GPU_STEP) if tb else trace.rows(Kind.STEP)
    if not len(rows):  # a trace of the device alone
        rows = trace.rows(Kind.GPU_STEP)
    if len(rows):
        return trace.start[rows], trace.end[rows], [_number(trace.name_of(int(r))) for r in rows]
    host = trace.rows(Kind.OPERATOR, Kind.PYTHON)
    if tb and trace.of_lightning:
        host = host[~trace.names_where(is_lightning)[host]]
    if not len(host):
        host = np.arange(len(trace.kind))
    return trace.start[host].min(keepdims=True), trace.end[host].max(keepdims=True), []


def _number(name: str) -> int:
    tail = name.split("#", 1)[1].strip()
    return int(tail) if tail.isdigit() else MISSING


def _launched_in(trace: Trace, launches: Launches, start: Floats, end: Floats) -> tuple[Ints, Mask]:
    """For each device row: the step whose host span holds its launching call, or MISSING."""
    calls = launches.calls
    if not len(calls):
        none = np.full(len(launches.device_rows), MISSING)
        return none, none >= 0
    at, until = trace.start[calls], trace.end[calls]
    step = np.searchsorted(np.maximum.accumulate(end), at, side="right")
    safe = np.minimum(step, len(start) - 1)
    fits = (step < len(start)) & (at >= start[safe]) & (until <= end[safe])
    step_of_call = np.where(fits, safe, MISSING)
    inside = np.where(launches.call_of >= 0, step_of_call[launches.call_of], MISSING)
    return inside, inside >= 0


def _stretch(trace: Trace, launches: Launches, start: Floats, end: Floats, inside: Ints) -> tuple[Floats, Floats]:
    begins, ends = trace.start[launches.device_rows], trace.end[launches.device_rows]
    count = len(start)
    last = np.full(count, -np.inf)
    np.maximum.at(last, inside[inside >= 0], ends[inside >= 0])
    previous = float(start[0])
    in_first = inside == 0
    if in_first.any():
        # Kernels from before the window still occupy the device: the first step begins after them.
        stray = ends[(inside < 0) & (ends < begins[in_first].min())]
        previous = max(previous, float(stray.max())) if len(stray) else previous
    new_start, new_end = np.empty(count), np.empty(count)
    for i in range(count):
        new_start[i] = max(previous, start[i])
        new_end[i] = previous = max(end[i], last[i], new_start[i])
    return new_start, new_end


def _kept(counts: Ints) -> int:
    """How many steps remain when the cut-off tail is dropped."""
    if len(counts) == 1:
        return 1
    last = int(np.flatnonzero(counts)[-1])
    if last > 0 and counts[last - 1] * KEEP_LAST_SHARE > counts[last]:
        return last
    return last + 1
