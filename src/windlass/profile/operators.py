"""Tables of operators and kernels: calls, host and device time, with and without nested operators."""

from dataclasses import dataclass

import numpy as np

from windlass.profile.event_names import (
    TB_COMMUNICATION,
    TENSOR_CORE_OPERATORS,
    Mode,
    is_communication_kernel,
    is_data_loading,
    is_wrapper,
    tensor_core_test,
)
from windlass.profile.steps import Launches
from windlass.profile.trace import MISSING, Floats, Ints, Kind, Mask, Trace


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
    """All calls of one kernel in the window; microseconds."""

    name: str
    calls: int
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


@dataclass(frozen=True)
class TensorCoreUse:
    """Shares of kernel time; None without kernels."""

    used_share: float | None  # by kernel name, of all kernel time
    operator_share: float | None  # of the time that operators launched: the plugin's "Kernel Time using Tensor Cores"
    eligible_share: float | None  # of the time that operators launched: by operators that could use tensor cores


@dataclass(frozen=True)
class OperatorTree:
    """Operators and ranges of all host threads, nested by time; each node stands after its parent. Microseconds."""

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
        ids: dict[str, int] = {}
        by_tid = [ids.setdefault(tid.strip(), len(ids)) for _, tid in trace.threads]
        thread = np.array(by_tid, dtype=np.int64)[trace.thread]
    rows, parent = _nest(trace, _node_rows(trace, mode), thread)
    if mode is Mode.TB:
        owner = _owners_by_id(trace, launches, rows)
    else:
        owner = _owners_by_time(trace, launches, rows, parent, thread)
    rows, parent, owner = _merge_repeats(trace, rows, parent, owner, mode)
    count = len(rows)

    host = trace.end[rows] - trace.start[rows]
    inner, owned = parent >= 0, owner >= 0
    call_us = trace.end[launches.calls] - trace.start[launches.calls]
    self_host = host - np.bincount(parent[inner], weights=host[inner], minlength=count)
    self_host = self_host - np.bincount(owner[owned], weights=call_us[owned], minlength=count)

    launched = launches.call_of >= 0
    device_rows, node = launches.device_rows[launched], owner[launches.call_of[launched]]
    device_rows, node = device_rows[node >= 0], node[node >= 0]
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


def _node_rows(trace: Trace, mode: Mode) -> Ints:
    nodes = trace.mask(Kind.OPERATOR, Kind.PYTHON, Kind.STEP, Kind.MODULE)
    if mode is Mode.FIXED:
        return np.flatnonzero(nodes | trace.mask(Kind.ANNOTATION))
    if trace.of_lightning:
        nodes &= ~(trace.names_where(lambda n: n.startswith("[pl][profile]")) & trace.mask(Kind.OPERATOR))
    named = trace.names_where(lambda n: n in TB_COMMUNICATION or is_data_loading(n) or n.startswith("Optimizer.step"))
    annotations = trace.mask(Kind.ANNOTATION, Kind.GPU_ANNOTATION) & named
    return np.flatnonzero(nodes | trace.mask(Kind.GPU_STEP) | annotations)


def _nest(trace: Trace, rows: Ints, thread: Ints) -> tuple[Ints, Ints]:
    """Nodes with their parents, thread by thread. A span that leaves its parent cannot be placed and is dropped."""
    _, first_row, inverse = np.unique(thread[rows], return_index=True, return_inverse=True)
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows], first_row[inverse]))]  # threads as they first appear
    starts, ends, threads = trace.start[rows].tolist(), trace.end[rows].tolist(), thread[rows].tolist()
    kept: list[int] = []
    parents: list[int] = []
    open_nodes: list[tuple[float, int]] = []  # end and node index
    current = None
    for i, start in enumerate(starts):
        if threads[i] != current:
            current, open_nodes = threads[i], []
        while open_nodes and start >= open_nodes[-1][0]:
            open_nodes.pop()
        if open_nodes and ends[i] > open_nodes[-1][0]:
            continue
        parents.append(open_nodes[-1][1] if open_nodes else MISSING)
        open_nodes.append((ends[i], len(kept)))
        kept.append(i)
    return rows[np.array(kept, dtype=np.int64)], np.array(parents, dtype=np.int64)


def _owners_by_id(trace: Trace, launches: Launches, rows: Ints) -> Ints:
    """The node of each runtime call as the plugin found it: the first one with the call's External id."""
    ids = np.where(trace.kind[rows] == Kind.MODULE, MISSING, trace.external[rows])
    unique, first = np.unique(ids, return_index=True)
    wanted = trace.external[launches.calls]
    if not len(unique):
        return np.full(len(wanted), MISSING)
    place = np.minimum(np.searchsorted(unique, wanted), len(unique) - 1)
    return np.where(unique[place] == wanted, first[place], MISSING)


def _owners_by_time(trace: Trace, launches: Launches, rows: Ints, parent: Ints, thread: Ints) -> Ints:
    """The innermost node of the same thread that was open when the call began. Some versions wrote wrong ids."""
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
    for i in np.flatnonzero(repeat):  # parents stand before children, so chains resolve in one pass
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

    def total(weights: Floats) -> list[float]:
        sums: list[float] = np.bincount(group, weights=weights, minlength=len(unique)).tolist()
        return sums

    calls = np.bincount(group, minlength=len(unique)).tolist()
    host, self_host = total(tree.host[nodes] * outermost), total(tree.self_host[nodes])
    device, self_device = total(tree.device[nodes] * outermost), total(tree.self_device[nodes])
    tensor = total(tree.self_tensor[nodes])
    table = [
        OperatorRow(
            name=trace.name_of(row),
            calls=calls[i],
            host_us=host[i],
            self_host_us=self_host[i],
            device_us=device[i],
            self_device_us=self_device[i],
            tensor_core_eligible=bool(tree.eligible[nodes[first[i]]]),
            tensor_core_pct=tensor[i] / self_device[i] * 100 if self_device[i] > 0 else None,
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
    if mode is Mode.FIXED:  # communication does not compute
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

    def weighted_mean(value: Floats) -> list[float | None]:
        present = ~np.isnan(value)
        weight = np.bincount(group[present], weights=work[present], minlength=count)
        total = np.bincount(group[present], weights=(value * work)[present], minlength=count)
        return [float(t / w) if w > 0 else None for t, w in zip(total, weight, strict=True)]

    calls, total = np.bincount(group, minlength=count), np.bincount(group, weights=work, minlength=count)
    shortest, longest = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(shortest, group, work)
    np.maximum.at(longest, group, work)
    blocks, occupancy = weighted_mean(trace.blocks[rows]), weighted_mean(trace.occupancy[rows])
    all_kernels = float(total.sum())
    uses_tensor_cores = tensor_core_test(mode)
    table = [
        KernelRow(
            name=name,
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
