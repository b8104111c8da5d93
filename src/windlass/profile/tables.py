"""Tables of operators, kernels and collectives: calls, host and device time, exposed time, bus bandwidth."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from windlass.profile.event_names import (
    TB_COMMUNICATION,
    TENSOR_CORE_OPERATORS,
    Mode,
    is_collective_range,
    is_communication_kernel,
    is_communication_operator,
    is_data_loading,
    is_wrapper,
    kernel_group,
    tensor_core_test,
)
from windlass.profile.intervals import subtract, union
from windlass.profile.timeline import Activity, Launches, Steps
from windlass.profile.trace import MISSING, CollectiveArguments, Floats, Ints, Kind, Mask, Trace


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """All calls of one operator (and, if requested, one input shape) in the window; microseconds."""

    name: str
    calls: float  # a whole number, or a mean per step
    host_us: float
    self_host_us: float  # without child operators and runtime calls
    device_us: float  # kernels, copies and memsets that the operator and its children launched
    self_device_us: float
    tensor_core_eligible: bool
    tensor_core_pct: float | None  # share of self_device_us on tensor cores; None when it launched nothing
    shape: str | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    name: str
    group: str  # one of KERNEL_GROUPS
    calls: float  # a whole number, or a mean per step
    total_us: float
    mean_us: float
    min_us: float
    max_us: float
    share_pct: float  # of the time of all kernels, overlapping ones counted each
    communication: bool
    tensor_cores: bool
    triton: bool
    blocks_per_sm: float | None
    occupancy_pct: float | None


@dataclass(frozen=True, kw_only=True)
class KernelGroupRow:
    """All kernels of one group in the window."""

    name: str
    calls: float  # a whole number, or a mean per step
    total_us: float
    share_pct: float  # of the time of all kernels, overlapping ones counted each
    tensor_core_pct: float | None  # share of total_us on tensor or matrix cores; None when it took no time


@dataclass(frozen=True)
class TensorCoreUse:
    """Shares of kernel time; None without kernels."""

    used_share: float | None  # by kernel name, of all kernel time
    operator_share: float | None  # of the time that operators launched: the plugin's "Kernel Time using Tensor Cores"
    eligible_share: float | None  # of the time that operators launched: by operators that could use tensor cores


@dataclass(frozen=True)
class OperatorTree:
    """Operators and ranges of all host threads, nested by time; each node comes after its parent. Microseconds."""

    rows: Ints  # trace row of each node
    parent: Ints  # node index of the parent, or MISSING at the top
    host: Floats
    self_host: Floats
    device: Floats
    self_device: Floats
    self_kernel: Floats
    self_tensor: Floats  # own kernel time on tensor cores
    eligible: Mask  # the node or one below it can use tensor cores
    lowest_eligible: Mask  # eligible, and no node below it is
    listed: Mask  # nodes of the operator table: operators, without wrappers that only hold others


def build_tree(trace: Trace, launches: Launches, mode: Mode) -> OperatorTree:
    thread = trace.thread.astype(np.int64)
    if mode is Mode.TB:  # the plugin told threads apart by tid alone
        tids = [tid.strip() for _, tid in trace.threads]
        thread = np.array([tids.index(tid) for tid in tids], dtype=np.int64)[trace.thread]
    rows, parent = _nest(trace, thread, mode)
    owner = _call_owners(trace, launches, rows, parent, thread, mode)
    rows, parent, owner = _merge_repeats(trace, rows, parent, owner, mode)
    count = len(rows)

    host = trace.end[rows] - trace.start[rows]
    inner, owned = parent >= 0, owner >= 0
    call_us = trace.end[launches.calls] - trace.start[launches.calls]
    children_us = np.bincount(parent[inner], weights=host[inner], minlength=count)
    self_host = host - children_us - np.bincount(owner[owned], weights=call_us[owned], minlength=count)

    node_of = np.append(owner, MISSING)[launches.call_of]  # the last entry serves MISSING (-1)
    device_rows, node = launches.device_rows[node_of >= 0], node_of[node_of >= 0]
    work = trace.end[device_rows] - trace.start[device_rows]
    kernel = trace.kind[device_rows] == Kind.KERNEL
    tensor = trace.names_where(tensor_core_test(mode))[device_rows] & kernel
    self_device, self_kernel, self_tensor = (
        np.bincount(node, weights=work * part, minlength=count).astype(np.float64) for part in (1.0, kernel, tensor)
    )

    is_operator = trace.kind[rows] == Kind.OPERATOR
    by_name = trace.names_where(TENSOR_CORE_OPERATORS.__contains__)[rows]
    eligible, operators = (by_name | (is_operator & (self_tensor > 0))).tolist(), is_operator.tolist()
    device, eligible_below = self_device.tolist(), [False] * count
    parents = parent.tolist()
    for i in range(count - 1, -1, -1):  # children before their parents
        above = parents[i]
        if above >= 0:
            device[above] += device[i]
            eligible[above] |= eligible[i] and operators[above]
            eligible_below[above] |= eligible[i] or eligible_below[i]
    return OperatorTree(
        rows=rows,
        parent=parent,
        host=host,
        self_host=self_host,
        device=np.array(device, dtype=np.float64),
        self_device=self_device,
        self_kernel=self_kernel,
        self_tensor=self_tensor,
        eligible=np.array(eligible, dtype=bool),
        lowest_eligible=np.array(eligible, dtype=bool) & ~np.array(eligible_below, dtype=bool),
        listed=is_operator & ~trace.names_where(is_wrapper)[rows],
    )


def _nest(trace: Trace, thread: Ints, mode: Mode) -> tuple[Ints, Ints]:
    """Rows of the nodes and their parents, thread by thread. A span that leaves its parent cannot be placed and is
    dropped."""
    nodes = trace.mask(Kind.OPERATOR, Kind.PYTHON, Kind.STEP, Kind.MODULE)
    if mode is Mode.FIXED:
        nodes |= trace.mask(Kind.ANNOTATION)
    else:
        if trace.of_lightning:
            nodes &= ~(trace.names_where(lambda n: n.startswith("[pl][profile]")) & trace.mask(Kind.OPERATOR))
        named = trace.names_where(
            lambda n: n in TB_COMMUNICATION or is_data_loading(n) or n.startswith("Optimizer.step")
        )
        nodes |= trace.mask(Kind.GPU_STEP) | (trace.mask(Kind.ANNOTATION, Kind.GPU_ANNOTATION) & named)
    rows = np.flatnonzero(nodes)
    _, first_row, inverse = np.unique(thread[rows], return_index=True, return_inverse=True)
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows], first_row[inverse]))]  # threads as they first appear
    kept: list[int] = []
    parents: list[int] = []
    open_nodes: list[tuple[float, int]] = []  # end and node index
    current = None
    columns = (column[rows].tolist() for column in (trace.start, trace.end, thread))
    for i, (start, end, key) in enumerate(zip(*columns, strict=True)):
        if key != current:
            current, open_nodes = key, []
        while open_nodes and start >= open_nodes[-1][0]:
            open_nodes.pop()
        if not open_nodes or end <= open_nodes[-1][0]:
            parents.append(open_nodes[-1][1] if open_nodes else MISSING)
            open_nodes.append((end, len(kept)))
            kept.append(i)
    return rows[np.array(kept, dtype=np.int64)], np.array(parents, dtype=np.int64)


def _call_owners(trace: Trace, launches: Launches, rows: Ints, parent: Ints, thread: Ints, mode: Mode) -> Ints:
    """The node of each runtime call: the innermost one of the same thread that was open when the call began. Mode `tb`
    takes the first one with the call's External id, as the plugin did, though some versions wrote wrong ids."""
    if mode is Mode.TB:
        ids = np.where(trace.kind[rows] == Kind.MODULE, MISSING, trace.external[rows]).tolist()
        first = {ids[i]: i for i in range(len(ids) - 1, -1, -1)}
        return np.array([first.get(key, MISSING) for key in trace.external[launches.calls].tolist()], dtype=np.int64)
    owner = np.full(len(launches.calls), MISSING)
    for key in np.unique(thread[rows]):
        nodes = np.flatnonzero(thread[rows] == key)
        calls = np.flatnonzero(thread[launches.calls] == key)
        last_begun = np.searchsorted(trace.start[rows[nodes]], trace.start[launches.calls[calls]], side="right") - 1
        owner[calls] = np.where(last_begun >= 0, nodes[last_begun], MISSING)
    ended = np.flatnonzero(owner >= 0)
    while len(ended):  # from the node that began last up to the first one that is still open
        ended = ended[trace.end[rows[owner[ended]]] < trace.start[launches.calls[ended]]]
        owner[ended] = parent[owner[ended]]
        ended = ended[owner[ended] >= 0]
    return owner


def _merge_repeats(trace: Trace, rows: Ints, parent: Ints, owner: Ints, mode: Mode) -> tuple[Ints, Ints, Ints]:
    """An operator whose only child is the same operator is one call. The plugin forgets the outer runtime calls."""
    children = np.bincount(parent[parent >= 0], minlength=len(rows))
    operator = trace.kind[rows] == Kind.OPERATOR
    above = np.maximum(parent, 0)
    repeat = (parent >= 0) & operator & operator[above] & (children[above] == 1)
    repeat &= trace.name[rows] == trace.name[rows[above]]
    target = np.arange(len(rows))
    for i in np.flatnonzero(repeat):  # parents come before children, so chains resolve in one pass
        target[i] = target[parent[i]]
    new_index = np.append((np.cumsum(~repeat) - 1)[target], MISSING)  # the last entry serves MISSING (-1)
    if mode is Mode.TB and repeat.any():
        owner = np.where(np.isin(owner, parent[repeat]), MISSING, owner)
    return rows[~repeat], new_index[parent[~repeat]], new_index[owner]


def operator_table(trace: Trace, tree: OperatorTree, mode: Mode, *, by_shape: bool = False) -> list[OperatorRow]:
    """Sorted by device time if there is a device, else by host time; both without children."""
    nodes = np.flatnonzero(tree.listed)
    by_shape = by_shape and bool(trace.shapes)
    key = trace.name[tree.rows[nodes]].astype(np.int64)
    if by_shape:
        key = key * (len(trace.shapes) + 1) + trace.shape[tree.rows[nodes]]
    unique, first, group = np.unique(key, return_index=True, return_inverse=True)
    # Inside a call of the same operator the time is already counted; the plugin counted it twice.
    outermost = np.ones(len(nodes))
    if mode is Mode.FIXED:
        names, parents = trace.name[tree.rows].tolist(), tree.parent.tolist()
        for i, node in enumerate(nodes.tolist()):
            above = parents[node]
            while above >= 0 and names[above] != names[node]:
                above = parents[above]
            outermost[i] = above < 0

    weights = {
        "calls": None,
        "host_us": tree.host[nodes] * outermost,
        "self_host_us": tree.self_host[nodes],
        "device_us": tree.device[nodes] * outermost,
        "self_device_us": tree.self_device[nodes],
        "tensor_us": tree.self_tensor[nodes],
    }
    sums: dict[str, list[Any]] = {
        key: np.bincount(group, weights=weight, minlength=len(unique)).tolist() for key, weight in weights.items()
    }
    tensor_us = sums.pop("tensor_us")
    table = [
        OperatorRow(
            name=trace.name_of(row),
            **{key: values[i] for key, values in sums.items()},
            tensor_core_eligible=bool(tree.eligible[nodes[first[i]]]),
            tensor_core_pct=tensor_us[i] / sums["self_device_us"][i] * 100 if sums["self_device_us"][i] > 0 else None,
            shape=trace.shapes[trace.shape[row]] if by_shape else None,
        )
        for i, row in enumerate(tree.rows[nodes[first]].tolist())
    ]
    return sorted(table, key=lambda r: (-r.self_device_us, -r.self_host_us, r.name))


def measure_tensor_cores(trace: Trace, tree: OperatorTree, mode: Mode) -> TensorCoreUse:
    kernels = trace.rows(Kind.KERNEL)
    if not len(kernels):
        return TensorCoreUse(None, None, None)
    work = trace.end[kernels] - trace.start[kernels]
    if mode is Mode.FIXED:  # communication is not computation
        work = work * ~trace.names_where(is_communication_kernel)[kernels]
    used = work * trace.names_where(tensor_core_test(mode))[kernels]
    by_operators = float(tree.self_kernel[tree.listed].sum())
    tensor, eligible = tree.self_tensor[tree.listed].sum(), tree.self_kernel[tree.lowest_eligible].sum()
    return TensorCoreUse(
        used_share=float(used.sum() / work.sum()) if work.sum() > 0 else None,
        operator_share=float(tensor) / by_operators if by_operators > 0 else None,
        eligible_share=float(eligible) / by_operators if by_operators > 0 else None,
    )


def kernel_table(trace: Trace, mode: Mode) -> list[KernelRow]:
    """One row per kernel name, the longest first."""
    rows = trace.rows(Kind.KERNEL)
    work = trace.end[rows] - trace.start[rows]
    names, group = np.unique(trace.name[rows], return_inverse=True)
    count = len(names)

    def sum_by_name(weights: Floats) -> Floats:
        return np.bincount(group, weights=weights, minlength=count).astype(np.float64)

    def weighted_mean(value: Floats) -> list[float | None]:
        total, weight = sum_by_name(np.nan_to_num(value * work)), sum_by_name(work * ~np.isnan(value))
        return [float(t / w) if w > 0 else None for t, w in zip(total, weight, strict=True)]

    calls, total = np.bincount(group, minlength=count), sum_by_name(work)
    shortest, longest = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(shortest, group, work)
    np.maximum.at(longest, group, work)
    blocks, occupancy = weighted_mean(trace.blocks[rows]), weighted_mean(trace.occupancy[rows])
    all_kernels = float(total.sum())
    uses_tensor_cores = tensor_core_test(mode)
    table = [
        KernelRow(
            name=name,
            group=kernel_group(name),
            calls=int(calls[i]),
            total_us=float(total[i]),
            mean_us=float(total[i] / calls[i]),
            min_us=float(shortest[i]),
            max_us=float(longest[i]),
            share_pct=float(total[i] / all_kernels * 100) if all_kernels > 0 else 0.0,
            communication=is_communication_kernel(name),
            tensor_cores=uses_tensor_cores(name),
            triton="triton" in name,
            blocks_per_sm=blocks[i],
            occupancy_pct=occupancy[i],
        )
        for i, name in enumerate(trace.names[n] for n in names)
    ]
    return sorted(table, key=lambda k: (-k.total_us, k.name))


def kernel_group_table(kernels: Sequence[KernelRow]) -> list[KernelGroupRow]:
    """The groups that occur, the longest first."""
    members: dict[str, list[KernelRow]] = {}
    for kernel in kernels:
        members.setdefault(kernel.group, []).append(kernel)
    table = []
    for name, rows in members.items():
        total_us = sum(k.total_us for k in rows)
        on_tensor_cores_us = sum(k.total_us for k in rows if k.tensor_cores)
        table.append(
            KernelGroupRow(
                name=name,
                calls=sum(k.calls for k in rows),
                total_us=total_us,
                share_pct=sum(k.share_pct for k in rows),
                tensor_core_pct=on_tensor_cores_us / total_us * 100 if total_us > 0 else None,
            )
        )
    return sorted(table, key=lambda row: (-row.total_us, row.name))


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
NO_ARGUMENTS = CollectiveArguments(name="", message_bytes=None, group_size=None)


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
    rows = activity.communication_rows
    if not len(rows) and not len(trace.rows(Kind.KERNEL)):
        # Without a device the ranges of the library, or else the operators that start them.
        host = trace.mask(Kind.OPERATOR, Kind.ANNOTATION, Kind.PYTHON)
        rows = np.flatnonzero(host & trace.names_where(is_collective_range))
        if not len(rows):
            named = trace.names_where(lambda n: is_communication_operator(n) and collective_kind(n) != OTHER)
            rows = np.flatnonzero(host & named)
    rows_by_kind: dict[str, list[int]] = {}
    for row in rows[(trace.start[rows] >= steps.first) & (trace.start[rows] < steps.last)].tolist():
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
    table = []
    for kind, of_kind in rows_by_kind.items():
        start, end = trace.start[of_kind], trace.end[of_kind]
        total_us = float((end - start).sum())
        exposed = subtract(union(start, end), hiding)
        calls = [trace.collectives.get(row) or NO_ARGUMENTS for row in of_kind]
        sizes = [call.message_bytes for call in calls if call.message_bytes is not None]
        carried = [size * bus_share(kind, c.group_size) for c, size in zip(calls, sizes, strict=False) if c.group_size]
        sized, groups = len(sizes) == len(calls), {call.group_size for call in calls}
        table.append(
            CollectiveRow(
                name=kind,
                calls=len(calls) / len(steps),
                total_us=total_us / len(steps),
                exposed_us=float(exposed.within(steps.start, steps.end).sum()) / len(steps),
                message_bytes=sum(sizes) / len(steps) if sized else None,
                group=groups.pop() if len(groups) == 1 else None,
                bus_gb_per_second=sum(carried) / total_us / 1e3
                if sized and len(carried) == len(calls) and total_us > 0
                else None,
                mean_us=(total_us / len(steps)) / (len(calls) / len(steps)),
            )
        )
    return sorted(table, key=lambda r: -r.total_us)


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
