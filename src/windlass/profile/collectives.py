"""Calls, time, exposed time, bytes and bus bandwidth of each kind of collective."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windlass.profile.categories import Activity
from windlass.profile.event_names import is_collective_range, is_communication_operator
from windlass.profile.intervals import Spans, subtract, union
from windlass.profile.steps import Steps
from windlass.profile.trace import MISSING, Ints, Kind, Trace

# In this order: "all_reduce" also contains "reduce", and "reduce_scatter" both.
_KIND_PATTERNS = {
    kind: re.compile(pattern, re.IGNORECASE)
    for kind, pattern in {
        "reduce-scatter": "reduce_?scatter",
        "all-reduce": "all_?reduce|cross_device_reduce",
        "all-gather": "all_?gather",
        "all-to-all": "all_?to_?all",
        "send and receive": "send|recv",
        "broadcast": "broadcast",
        "reduce": "reduce",
        "barrier": "barrier",
    }.items()
}
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One kind of collective on one rank; means per step. None is unknown: older profilers write no sizes or groups."""

    name: str
    calls: float
    total_us: float  # on a device a call also waits for the slowest rank
    exposed_us: float  # the part of total_us in which neither a kernel nor a copy ran
    message_bytes: float | None  # the complete tensor: the gathered one of an all-gather, the summed one of a reduce
    group: int | None  # ranks that take part; None where calls differ
    bus_gb_per_second: float | None  # what each link must carry, over the time: comparable with the hardware's figure
    mean_us: float  # per call


def collective_kind(name: str) -> str:
    """`ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)` and `_reduce_scatter_base` -> `reduce-scatter`."""
    return next((kind for kind, pattern in _KIND_PATTERNS.items() if pattern.search(name)), OTHER)


def bus_share(kind: str, group_size: int) -> float:
    """Bytes over a link for each byte of the message, in the best algorithm (as NCCL's own tests count)."""
    if kind == "all-reduce":
        return 2 * (group_size - 1) / group_size
    return (group_size - 1) / group_size if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


def collective_table(trace: Trace, steps: Steps, activity: Activity) -> list[CollectiveRow]:
    """One row per kind, the longest first."""
    ranges = np.flatnonzero(trace.names_where(is_collective_range) & (trace.external != MISSING))
    range_names = {int(trace.external[row]): trace.name_of(row) for row in ranges.tolist()}
    rows_by_kind: dict[str, list[int]] = {}
    rows = activity.communication_rows
    if not len(rows) and not len(trace.rows(Kind.KERNEL)):
        # Without a device the ranges of the library, or else the operators that start them.
        host = trace.mask(Kind.OPERATOR, Kind.ANNOTATION, Kind.PYTHON)
        rows = np.flatnonzero(host & trace.names_where(is_collective_range))
        if not len(rows):
            named = trace.names_where(lambda n: is_communication_operator(n) and collective_kind(n) != OTHER)
            rows = np.flatnonzero(host & named)
    for row in rows.tolist():
        if not steps.first <= trace.start[row] < steps.last:
            continue
        # By the profiler's arguments, else by the range that started it (an all-to-all consists of sends and
        # receives), else by the event's own name.
        arguments = trace.collectives.get(row)
        names = [arguments.name] if arguments else [range_names.get(int(trace.external[row]), ""), trace.name_of(row)]
        kind = next((kind for name in names if (kind := collective_kind(name)) != OTHER), OTHER)
        rows_by_kind.setdefault(kind, []).append(row)
    hiding = activity.compute
    if len(activity.spans["Kernel"]):
        device_work = [activity.spans[name] for name in ("Kernel", "Memcpy", "Memset")]
        hiding = union(np.concatenate([s.start for s in device_work]), np.concatenate([s.end for s in device_work]))
    table = [
        _collective_row(trace, steps, hiding, kind, np.array(kind_rows)) for kind, kind_rows in rows_by_kind.items()
    ]
    return sorted(table, key=lambda r: -r.total_us)


def _collective_row(trace: Trace, steps: Steps, hiding: Spans, kind: str, rows: Ints) -> CollectiveRow:
    total_us = float((trace.end[rows] - trace.start[rows]).sum())
    exposed = subtract(union(trace.start[rows], trace.end[rows]), hiding)
    arguments = [trace.collectives.get(row) for row in rows.tolist()]
    sizes = [a.message_bytes for a in arguments if a and a.message_bytes is not None]
    groups = {a.group_size if a else None for a in arguments}
    message_bytes = bus_gb_per_second = None
    if len(sizes) == len(rows):
        message_bytes = sum(sizes) / len(steps)
        carried = [bus_share(kind, a.group_size) for a in arguments if a and a.group_size]
        if len(carried) == len(rows) and total_us > 0:
            carried_bytes = sum(size * share for size, share in zip(sizes, carried, strict=True))
            bus_gb_per_second = carried_bytes / total_us / 1e3
    return CollectiveRow(
        name=kind,
        calls=len(rows) / len(steps),
        total_us=total_us / len(steps),
        exposed_us=float(exposed.within(steps.start, steps.end).sum()) / len(steps),
        message_bytes=message_bytes,
        group=groups.pop() if len(groups) == 1 else None,
        bus_gb_per_second=bus_gb_per_second,
        mean_us=(total_us / len(steps)) / (len(rows) / len(steps)),
    )


def mean_over_ranks(tables: Sequence[Sequence[CollectiveRow]]) -> list[CollectiveRow]:
    """A rank without the collective counts as 0 of it; one unknown size makes the mean unknown."""
    means = []
    for name in dict.fromkeys(row.name for table in tables for row in table):
        rows = [row for table in tables for row in table if row.name == name]
        sizes = [r.message_bytes for r in rows if r.message_bytes is not None]
        rates = [r.bus_gb_per_second for r in rows if r.bus_gb_per_second is not None]
        groups = {r.group for r in rows}
        calls, total_us = sum(r.calls for r in rows) / len(tables), sum(r.total_us for r in rows) / len(tables)
        means.append(
            CollectiveRow(
                name=name,
                calls=calls,
                total_us=total_us,
                exposed_us=sum(r.exposed_us for r in rows) / len(tables),
                message_bytes=sum(sizes) / len(tables) if len(sizes) == len(rows) else None,
                group=groups.pop() if len(groups) == 1 else None,
                bus_gb_per_second=sum(rates) / len(rates) if len(rates) == len(rows) else None,
                mean_us=total_us / calls,
            )
        )
    return sorted(means, key=lambda r: -r.total_us)
