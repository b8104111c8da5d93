"""The eight categories of a step's time: when each was running, and which moments of a step belong to it."""

from dataclasses import dataclass, replace

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
from windlass.profile.steps import Launches
from windlass.profile.trace import MISSING, Ints, Kind, Mask, Trace

CATEGORIES = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other")
"""In order of priority: a moment belongs to the first category that was running then."""


@dataclass(frozen=True)
class Activity:
    """When each category was running, whatever else ran at the same time."""

    spans: dict[str, Spans]
    compute: Spans  # what communication can hide behind: kernels, or operators on a trace without a device
    communication_rows: Ints  # kernels that count as communication


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
    compute = spans["Kernel"]
    if mode is Mode.TB:
        compute = compute if len(compute) else spans["CPU Exec"]
    elif not kernel.any():
        # Without a device the operators are the computation, and a collective is exposed where none of them runs.
        collective = trace.names_where(is_communication_operator) & host
        operators = trace.mask(Kind.OPERATOR) & ~collective & ~loading
        compute = union(trace.start[operators], trace.end[operators])
        spans["Communication"] = union(trace.start[collective], trace.end[collective])
    return Activity(spans, compute, np.flatnonzero(communication))


def assign_moments(steps: Spans, activity: Activity, mode: Mode) -> dict[str, Spans]:
    """Give every moment of the steps to the first category that was running."""
    remaining, assigned = steps, {}
    for category in CATEGORIES[:-1]:
        running = activity.spans[category]
        if mode is Mode.TB and not len(remaining):
            remaining = steps  # a fault of the plugin: when nothing of the steps is left, it starts again with all
        assigned[category] = intersect(remaining, running)
        remaining = subtract(remaining, running)
    return {**assigned, "Other": remaining}


def with_exposed_communication(activity: Activity) -> Activity:
    """On a trace without a device, communication that runs beside computation counts as computation."""
    communication = activity.spans["Communication"]
    if len(activity.spans["Kernel"]) or len(activity.communication_rows) or not len(communication):
        return activity
    return replace(activity, spans={**activity.spans, "Communication": subtract(communication, activity.compute)})


def _launched_by_collective(trace: Trace, launches: Launches, named: Mask) -> Mask:
    """Kernels of libraries with other names, recognised by the External id of a collective.

    Some profilers write the correlation id there, so the launching call must also lie inside the host range.
    """
    launched = np.zeros(len(trace.kind), dtype=bool)
    collective = trace.mask(Kind.OPERATOR) & trace.names_where(is_communication_operator)
    operators = np.flatnonzero(collective & (trace.external != MISSING))
    # Of several operators with one id the first counts.
    first = {int(trace.external[row]): int(row) for row in operators[::-1]}
    candidates = (launches.call_of >= 0) & trace.mask(Kind.KERNEL)[launches.device_rows] & ~named[launches.device_rows]
    candidates &= np.isin(trace.external[launches.device_rows], list(first))
    calls = launches.calls[launches.call_of[candidates]]
    for row, call in zip(launches.device_rows[candidates], calls, strict=True):
        operator = first[int(trace.external[row])]
        launched[row] = trace.start[operator] <= trace.start[call] <= trace.end[operator]
    return launched
