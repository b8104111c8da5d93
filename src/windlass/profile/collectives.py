"""Which collective took how long, moved how much, and how much of it did nothing hide? One row for each kind of collective."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windlass.profile.intervals import Spans, subtract, union
from windlass.profile.names import is_collective_range, is_communication_operator
from windlass.profile.roles import Roles
from windlass.profile.steps import Steps
from windlass.profile.trace import MISSING, Ints, Kind, Trace

# In this order: "all_reduce" also holds "reduce", and "reduce_scatter" both.
_KINDS = (
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all-reduce", re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)),
    ("all-gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all-to-all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("send and receive", re.compile(r"send_?recv|isend|irecv|send|recv", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
)
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One kind of collective on one rank; means per step. Unknown is None: older profilers write neither sizes nor groups."""

    name: str
    calls: float
    total_us: float
    """Sum of the calls' times; on a device a call also waits there for the slowest rank."""
    exposed_us: float
    """Of that, time in which neither a kernel nor a copy ran beside it."""
    message_bytes: float | None
    """What the collective works on as a whole: the gathered tensor of an all-gather, the summed one of a reduce-scatter."""
    group: int | None
    """Ranks that take part; None where calls differ."""
    bus_gb_per_second: float | None
    """What each link must carry for it, over the time: comparable with the hardware's figure, and between collectives."""

    @property
    def mean_us(self) -> float:
        return self.total_us / self.calls if self.calls else 0.0


def kind_of(name: str) -> str:
    """`ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)` and `_reduce_scatter_base` -> `reduce-scatter`."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHER)


def bus_share(kind: str, group: int) -> float:
    """Bytes over a link for each byte of the message, in the best algorithm (the convention of NCCL's own tests)."""
    if kind == "all-reduce":
        return 2 * (group - 1) / group
    return (group - 1) / group if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


def collective_rows(trace: Trace, steps: Steps, roles: Roles) -> list[CollectiveRow]:
    """The longest first."""
    rows = _rows(trace, roles)
    rows = rows[(trace.start[rows] >= steps.first) & (trace.start[rows] < steps.last)]
    kinds: dict[str, list[int]] = {}
    marked = _marked(trace)
    for row in rows.tolist():
        kinds.setdefault(_kind(trace, row, marked), []).append(row)
    hiding = _hiding(roles)
    made = [_row(trace, steps, hiding, kind, np.array(found)) for kind, found in kinds.items()]
    return sorted(made, key=lambda r: -r.total_us)


def _kind(trace: Trace, row: int, marked: dict[int, str]) -> str:
    """By what the profiler says, else by the range that started it (an all-to-all is made of sends and receives), else by its own name."""
    said = trace.collectives.get(row)
    if said:
        return kind_of(said.name)
    return marked.get(int(trace.external[row])) or kind_of(trace.name_of(row))


def _marked(trace: Trace) -> dict[int, str]:
    """External id of a library's range -> the kind it names."""
    rows = np.flatnonzero(trace.names_where(is_collective_range) & (trace.external != MISSING))
    found = {int(trace.external[row]): kind_of(trace.name_of(int(row))) for row in rows}
    return {number: kind for number, kind in found.items() if kind != OTHER}


def _rows(trace: Trace, roles: Roles) -> Ints:
    """The device's kernels; on a trace without a device the library's ranges, else the operators that start them."""
    if len(roles.communication_rows) or trace.has(Kind.KERNEL):
        return roles.communication_rows
    host = np.isin(trace.kind, (Kind.OPERATOR, Kind.ANNOTATION, Kind.PYTHON))
    ranges = np.flatnonzero(host & trace.names_where(is_collective_range))
    if len(ranges):
        return ranges
    named = trace.names_where(lambda n: is_communication_operator(n) and kind_of(n) != OTHER)
    return np.flatnonzero(host & named)


def _hiding(roles: Roles) -> Spans:
    if not len(roles.spans["Kernel"]):
        return roles.compute
    parts = [roles.spans[name] for name in ("Kernel", "Memcpy", "Memset")]
    return union(np.concatenate([p.start for p in parts]), np.concatenate([p.end for p in parts]))


def _row(trace: Trace, steps: Steps, hiding: Spans, kind: str, rows: Ints) -> CollectiveRow:
    times = trace.end[rows] - trace.start[rows]
    said = [trace.collectives.get(int(r)) for r in rows]
    sizes = [s.message_bytes if s else None for s in said]
    groups = {s.group if s else None for s in said}
    bare = subtract(union(trace.start[rows], trace.end[rows]), hiding)
    known = [size for size in sizes if size is not None]
    return CollectiveRow(
        name=kind, calls=len(rows) / len(steps), total_us=float(times.sum()) / len(steps),
        exposed_us=float(bare.within(steps.start, steps.end).sum()) / len(steps),
        message_bytes=sum(known) / len(steps) if len(known) == len(rows) else None, group=groups.pop() if len(groups) == 1 else None,
        bus_gb_per_second=_bus(kind, [(s.message_bytes, s.group) if s else (None, None) for s in said], float(times.sum())),
    )  # fmt: skip


def _bus(kind: str, calls: Sequence[tuple[float | None, int | None]], microseconds: float) -> float | None:
    carried = 0.0
    for size, group in calls:
        if size is None or not group:
            return None
        carried += size * bus_share(kind, group)
    return carried / microseconds / 1e3 if microseconds > 0 else None


def over_ranks(ranks: Sequence[Sequence[CollectiveRow]]) -> list[CollectiveRow]:
    """Means over the ranks; a rank without the collective counts as 0 of it, an unknown size makes the mean unknown."""
    names = list(dict.fromkeys(row.name for rows in ranks for row in rows))
    made = [_mean(name, [row for rows in ranks for row in rows if row.name == name], len(ranks)) for name in names]
    return sorted(made, key=lambda r: -r.total_us)


def _mean(name: str, rows: Sequence[CollectiveRow], ranks: int) -> CollectiveRow:
    sizes, rates = [r.message_bytes for r in rows], [r.bus_gb_per_second for r in rows]
    groups = {r.group for r in rows}
    return CollectiveRow(
        name=name, calls=sum(r.calls for r in rows) / ranks, total_us=sum(r.total_us for r in rows) / ranks,
        exposed_us=sum(r.exposed_us for r in rows) / ranks, message_bytes=_all_known(sizes, ranks), group=groups.pop() if len(groups) == 1 else None,
        bus_gb_per_second=_all_known(rates, len(rows)),
    )  # fmt: skip


def _all_known(values: Sequence[float | None], count: int) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / count if known and len(known) == len(values) else None
