"""The timeline of a trace: launches of kernels, start and end of each step, and the eight categories of its time.

The host marks a step, but its kernels may still run when the mark ends. So a step lasts until the last kernel that was
launched inside it, and the next one begins where that kernel ended.
"""

from dataclasses import dataclass

import numpy as np

from windlass.profile.event_names import (
    TB_COMMUNICATION,
    Mode,
    is_communication_kernel,
    is_communication_operator,
    is_data_loading,
    is_lightning,
)
from windlass.profile.intervals import Spans, intersect, subtract, union
from windlass.profile.trace import DEVICE_KINDS, MISSING, Floats, Ints, Kind, Mask, Trace

# The last step is dropped when it launched fewer than this share of the step before: the window closed over it.
KEEP_LAST_SHARE = 0.8
# In order of priority: a moment belongs to the first category that was running then.
CATEGORIES = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other")


@dataclass(frozen=True)
class Launches:
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


@dataclass(frozen=True)
class Activity:
    """When each category was running, whatever else ran at the same time."""

    spans: dict[str, Spans]
    compute: Spans  # what communication can hide behind: kernels, or operators on a trace without a device
    communication_rows: Ints  # kernels that count as communication


def find_launches(trace: Trace, mode: Mode) -> Launches:
    """Match by correlation id: the nearest earlier call with the id, or the first later one (clocks may differ)."""
    calls = trace.rows(Kind.RUNTIME) if mode is Mode.TB else trace.rows(Kind.RUNTIME, Kind.DRIVER)
    device_rows = trace.rows(*DEVICE_KINDS)
    if not len(calls):
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
    # The plugin also took the device's copy of the marks for steps; that doubles them.
    rows = trace.rows(Kind.STEP, Kind.GPU_STEP) if mode is Mode.TB else trace.rows(Kind.STEP)
    rows = rows if len(rows) else trace.rows(Kind.GPU_STEP)  # a trace of the device alone
    labels = [trace.name_of(row).split("#", 1)[1].strip() for row in rows]
    numbers = [int(n) if n.isdecimal() and len(n) < 19 else MISSING for n in labels]
    start, end = trace.start[rows], trace.end[rows]
    if not len(rows):  # the whole trace is one step
        host = trace.mask(Kind.OPERATOR, Kind.PYTHON)
        if mode is Mode.TB and trace.of_lightning:
            host &= ~trace.names_where(is_lightning)
        counted = host if host.any() else np.ones_like(host)
        start, end = trace.start[counted].min(keepdims=True), trace.end[counted].max(keepdims=True)

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
    first_start = start[0]
    if (step_of == 0).any():
        # Kernels from before the window still occupy the device: the first step begins after them.
        first_start = ends[~inside & (ends < begins[step_of == 0].min())].max(initial=first_start)
    reach = np.maximum.accumulate(np.maximum.reduce([start, end, last_kernel]))
    step_end = np.maximum(reach, first_start)
    step_start = np.maximum(start, np.concatenate(([first_start], step_end[:-1])))
    counts = np.bincount(step_of[inside], minlength=len(start))
    last = int(np.flatnonzero(counts)[-1])
    cut_off = last > 0 and counts[last - 1] * KEEP_LAST_SHARE > counts[last]
    keep = last if cut_off else last + 1
    return Steps(step_start[:keep], step_end[:keep], numbers[:keep], len(start) - keep)


def find_activity(trace: Trace, launches: Launches, mode: Mode) -> Activity:
    kernel = trace.mask(Kind.KERNEL)
    tb_named = trace.names_where(TB_COMMUNICATION.__contains__)
    loading_name = trace.names_where(is_data_loading)
    if mode is Mode.TB:
        annotation = trace.mask(Kind.ANNOTATION, Kind.GPU_ANNOTATION)
        host = annotation | trace.mask(Kind.OPERATOR, Kind.PYTHON)
        if trace.of_lightning:
            host &= annotation | ~trace.names_where(is_lightning)
        communication = kernel & np.isin(trace.external, trace.external[tb_named & host])
        loading = loading_name & (annotation | trace.mask(Kind.OPERATOR))
        communication_host = host & tb_named & ~loading
        runtime, execution = trace.mask(Kind.RUNTIME), host & ~tb_named & ~loading
    else:
        communication = kernel & trace.names_where(is_communication_kernel)
        communication |= _launched_by_collective(trace, launches, communication)
        host = trace.mask(Kind.OPERATOR, Kind.PYTHON, Kind.ANNOTATION)
        loading = loading_name & host
        # Next to the kernels of a device the host ranges matter little; the plugin's names are used, so that the two
        # modes differ only in the kernels.
        communication_host = host & tb_named
        runtime, execution = trace.mask(Kind.RUNTIME, Kind.DRIVER), host & ~loading
    masks = (
        kernel & ~communication, trace.mask(Kind.MEMCPY), trace.mask(Kind.MEMSET), communication | communication_host,
        runtime, loading, execution,
    )  # fmt: skip
    spans = {name: union(trace.start[m], trace.end[m]) for name, m in zip(CATEGORIES[:-1], masks, strict=True)}
    compute = spans["CPU Exec" if mode is Mode.TB and not len(spans["Kernel"]) else "Kernel"]
    if mode is Mode.FIXED and not kernel.any():
        # Without a device the operators are the computation, and a collective is exposed where none of them runs.
        collective = trace.names_where(is_communication_operator) & host
        operators = trace.mask(Kind.OPERATOR) & ~collective & ~loading
        compute = union(trace.start[operators], trace.end[operators])
        spans["Communication"] = union(trace.start[collective], trace.end[collective])
    return Activity(spans, compute, np.flatnonzero(communication))


def _launched_by_collective(trace: Trace, launches: Launches, named: Mask) -> Mask:
    """Kernels of libraries with other names, recognised by the External id of a collective.

    Some profilers write the correlation id there, so the launching call must also lie inside the host range.
    """
    collective = trace.mask(Kind.OPERATOR) & trace.names_where(is_communication_operator)
    rows = np.flatnonzero(collective & (trace.external != MISSING))
    # Of several operators with one id the first counts.
    first = {int(trace.external[row]): int(row) for row in rows[::-1]}
    unnamed = trace.mask(Kind.KERNEL) & ~named & np.isin(trace.external, list(first))
    candidates = np.flatnonzero((launches.call_of >= 0) & unnamed[launches.device_rows])
    kernels = launches.device_rows[candidates]
    launched_at = trace.start[launches.calls[launches.call_of[candidates]]]
    operators = np.array([first[int(trace.external[kernel])] for kernel in kernels], dtype=np.int64)
    launched = np.zeros(len(trace.kind), dtype=bool)
    launched[kernels] = (trace.start[operators] <= launched_at) & (launched_at <= trace.end[operators])
    return launched


def assign_moments(steps: Spans, activity: Activity, mode: Mode) -> dict[str, Spans]:
    """Give every moment of the steps to the first category that was running."""
    spans, remaining, assigned = activity.spans, steps, {}
    if mode is Mode.FIXED and not len(spans["Kernel"]) and not len(activity.communication_rows):
        # On a trace without a device, communication that runs beside computation counts as computation.
        spans = {**spans, "Communication": subtract(spans["Communication"], activity.compute)}
    for category in CATEGORIES[:-1]:
        if mode is Mode.TB and not len(remaining):
            remaining = steps  # a fault of the plugin: when nothing of the steps is left, it starts again with all
        assigned[category] = intersect(remaining, spans[category])
        remaining = subtract(remaining, spans[category])
    return {**assigned, "Other": remaining}
