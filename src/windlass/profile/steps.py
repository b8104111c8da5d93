"""Start and end of each step, and the runtime call that launched each kernel.

The host marks a step, but its kernels may still run when the mark ends. So a step lasts until the last kernel that was
launched inside it, and the next one begins where that kernel ended.
"""

from dataclasses import dataclass

import numpy as np

from windlass.profile.event_names import Mode, is_lightning
from windlass.profile.trace import DEVICE_KINDS, MISSING, Floats, Ints, Kind, Trace

# The last step is dropped when it launched fewer than this share of the step before: the window closed over it.
KEEP_LAST_SHARE = 0.8


@dataclass(frozen=True)
class Launches:
    """Which runtime call launched each device event."""

    calls: Ints  # rows of the runtime calls, in order of time
    device_rows: Ints  # rows of kernels, copies and memsets, in order of time
    call_of: Ints  # for each device row: an index into `calls`, or MISSING


@dataclass(frozen=True)
class Steps:
    start: Floats
    end: Floats
    numbers: list[int]  # as the profiler counts; empty when the trace marks no steps and counts as one
    dropped: int = 0  # steps at the end that the window cut off

    def __len__(self) -> int:
        return len(self.start)

    @property
    def first(self) -> float:
        return float(self.start[0])

    @property
    def last(self) -> float:
        return float(self.end[-1])


def find_launches(trace: Trace, mode: Mode) -> Launches:
    """Match by correlation id: the nearest earlier call with the id, or the first later one (clocks may differ)."""
    calls = trace.rows(Kind.RUNTIME) if mode is Mode.TB else trace.rows(Kind.RUNTIME, Kind.DRIVER)
    device_rows = trace.rows(*DEVICE_KINDS)
    if not len(calls) or not len(device_rows):
        return Launches(calls, device_rows, np.full(len(device_rows), MISSING))
    by_id = np.lexsort((calls, trace.correlation[calls]))
    ids, sorted_calls = trace.correlation[calls][by_id], calls[by_id]
    wanted = trace.correlation[device_rows]
    low, high = np.searchsorted(ids, wanted, "left"), np.searchsorted(ids, wanted, "right")
    # Nearly always one call has the id. Of several, the last one before the device event counts, else the first.
    pick = low.copy()
    for i in np.flatnonzero(high - low > 1):
        pick[i] += max(np.searchsorted(sorted_calls[low[i] : high[i]], device_rows[i]) - 1, 0)
    matched = (high > low) if mode is Mode.TB else (high > low) & (wanted != MISSING)
    return Launches(calls, device_rows, np.where(matched, by_id[np.minimum(pick, len(by_id) - 1)], MISSING))


def find_steps(trace: Trace, launches: Launches, mode: Mode) -> Steps:
    """The host's marks, extended to the end of their kernels, without a last step that the window cut off."""
    start, end, numbers = _marked_steps(trace, mode)
    step_of = np.full(len(launches.device_rows), MISSING)  # the step whose host span holds the launching call
    if len(calls := launches.calls):
        step = np.searchsorted(np.maximum.accumulate(end), trace.start[calls], side="right")
        safe = np.minimum(step, len(start) - 1)
        fits = (step < len(start)) & (trace.start[calls] >= start[safe]) & (trace.end[calls] <= end[safe])
        step_of = np.where(launches.call_of >= 0, np.where(fits, safe, MISSING)[launches.call_of], MISSING)
    inside = step_of >= 0
    if not inside.any():
        return Steps(start, end, numbers)
    begins, ends = trace.start[launches.device_rows], trace.end[launches.device_rows]
    last_kernel = np.full(len(start), -np.inf)
    np.maximum.at(last_kernel, step_of[inside], ends[inside])
    previous = float(start[0])
    if (step_of == 0).any():
        # Kernels from before the window still occupy the device: the first step begins after them.
        earlier = ends[~inside & (ends < begins[step_of == 0].min())]
        previous = max(previous, float(earlier.max())) if len(earlier) else previous
    step_start, step_end = np.empty(len(start)), np.empty(len(start))
    for i in range(len(start)):
        step_start[i] = max(previous, start[i])
        step_end[i] = previous = max(end[i], last_kernel[i], step_start[i])
    counts = np.bincount(step_of[inside], minlength=len(start))
    last = int(np.flatnonzero(counts)[-1])
    cut_off = last > 0 and counts[last - 1] * KEEP_LAST_SHARE > counts[last]
    keep = last if cut_off else last + 1
    return Steps(step_start[:keep], step_end[:keep], numbers[:keep], len(start) - keep)


def _marked_steps(trace: Trace, mode: Mode) -> tuple[Floats, Floats, list[int]]:
    """Start, end and number of each step as marked; the whole trace as one step without a number if none is marked."""
    # The plugin also took the device's copy of the marks for steps; that doubles them.
    rows = trace.rows(Kind.STEP, Kind.GPU_STEP) if mode is Mode.TB else trace.rows(Kind.STEP)
    if not len(rows):  # a trace of the device alone
        rows = trace.rows(Kind.GPU_STEP)
    if len(rows):
        labels = [trace.name_of(row).split("#", 1)[1].strip() for row in rows]
        return trace.start[rows], trace.end[rows], [int(n) if n.isdigit() else MISSING for n in labels]
    host = trace.rows(Kind.OPERATOR, Kind.PYTHON)
    if mode is Mode.TB and trace.of_lightning:
        host = host[~trace.names_where(is_lightning)[host]]
    if not len(host):
        host = np.arange(len(trace.kind))
    return trace.start[host].min(keepdims=True), trace.end[host].max(keepdims=True), []
