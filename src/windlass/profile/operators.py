"""Which operators and kernels took the time? Nested operators as a tree; calls, host and device time, with and without children."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windlass.profile.names import (
    TB_COMMUNICATION,
    TENSOR_CORE_OPERATORS,
    is_communication_kernel,
    is_data_loading,
    is_lightning,
    is_triton,
    tb_uses_tensor_cores,
    uses_tensor_cores,
)
from windlass.profile.roles import Mode
from windlass.profile.steps import Launches
from windlass.profile.trace import MISSING, Floats, Ints, Kind, Mask, Trace

_EXCLUDED = frozenset(("DataParallel.forward", "DistributedDataParallel.forward"))


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """All calls of one operator (and, when asked, one input shape) in the window; microseconds."""

    name: str
    calls: int
    host_us: float
    self_host_us: float
    """Without child operators and without runtime calls."""
    device_us: float
    """Kernels, copies and memsets that the operator and its children launched."""
    self_device_us: float
    tensor_core_eligible: bool
    tensor_core_pct: float | None
    """Share of its own device time in kernels that use tensor cores; None when it launched nothing."""
    shape: str | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    name: str
    calls: int
    total_us: float
    mean_us: float
    min_us: float
    max_us: float
    share_pct: float
    """Of the time of all kernels, overlapping ones counted each."""
    communication: bool
    tensor_cores: bool
    triton: bool
    blocks_per_sm: float | None
    occupancy_pct: float | None


@dataclass(frozen=True)
class Tree:
    """Host nodes of all threads: a forest, with each node's parent standing before it."""

    rows: Ints
    parent: Ints
    """Index into `rows` of the parent, or MISSING at the top."""
    own_calls: Ints
    """For each runtime call of `Launches`: the node that made it, or MISSING."""


@dataclass(frozen=True)
class TensorCores:
    used_share: float | None
    """Of all kernel time, by kernel name; None without kernels."""
    operator_share: float | None
    """Of the kernel time that operators launched: the plugin's "Kernel Time using Tensor Cores"."""
    eligible_share: float | None
    """Of that time, what operators launched that could use tensor cores."""


def build_tree(trace: Trace, launches: Launches, mode: Mode) -> Tree:
    rows = _node_rows(trace, mode)
    thread = _thread_keys(trace, mode)
    order = np.lexsort((-trace.end[rows], trace.start[rows], _first_seen(thread[rows])))
    rows = rows[order]
    parent, kept = _nest(trace.start[rows], trace.end[rows], thread[rows])
    rows, parent = _drop(rows, parent, kept)
    calls = _calls_by_id(trace, launches, rows) if mode is Mode.TB else _calls_by_time(trace, launches, rows, thread)
    return _merge_repeats(trace, Tree(rows, parent, calls), mode)


def _node_rows(trace: Trace, mode: Mode) -> Ints:
    always = np.isin(trace.kind, (Kind.OPERATOR, Kind.PYTHON, Kind.STEP, Kind.MODULE))
    if mode is Mode.TB:
        named = trace.names_where(
            lambda n: n in TB_COMMUNICATION or is_data_loading(n) or n.startswith("Optimizer.step")
        )
        if trace.of_lightning:
            always &= ~(trace.names_where(lambda n: n.startswith("[pl][profile]")) & (trace.kind == Kind.OPERATOR))
        extra = (trace.kind == Kind.GPU_STEP) | (np.isin(trace.kind, (Kind.ANNOTATION, Kind.GPU_ANNOTATION)) & named)
    else:
        extra = trace.kind == Kind.ANNOTATION
    return np.flatnonzero(always | extra)


def _thread_keys(trace: Trace, mode: Mode) -> Ints:
    """The plugin told threads apart by tid alone."""
    if mode is Mode.FIXED:
        return trace.thread.astype(np.int64)
    seen: dict[str, int] = {}
    keys = np.array([seen.setdefault(tid.strip(), len(seen)) for _, tid in trace.threads], dtype=np.int64)
    return keys[trace.thread]


def _first_seen(keys: Ints) -> Ints:
    """Renumber by first appearance."""
    unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(unique), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(unique))
    return rank[inverse]


def _nest(start: Floats, end: Floats, thread: Ints) -> tuple[Ints, list[bool]]:
    """Parent of each node by containment. A span that leaves its parent is left out, as the plugin did: it cannot be placed."""
    starts, ends, threads = start.tolist(), end.tolist(), thread.tolist()
    parent = np.full(len(starts), MISSING)
    kept = [True] * len(starts)
    stack: list[int] = []
    current = None
    for i in range(len(starts)):
        if threads[i] != current:
            current, stack = threads[i], []
        while stack and starts[i] >= ends[stack[-1]]:
            stack.pop()
        if stack:
            if ends[i] > ends[stack[-1]]:
                kept[i] = False
                continue
            parent[i] = stack[-1]
        stack.append(i)
    return parent, kept


def _drop(rows: Ints, parent: Ints, kept: list[bool]) -> tuple[Ints, Ints]:
    keep = np.array(kept, dtype=bool)
    place = np.cumsum(keep) - 1
    parent = np.where(parent >= 0, place[np.maximum(parent, 0)], MISSING)
    return rows[keep], parent[keep]


def _calls_by_id(trace: Trace, launches: Launches, rows: Ints) -> Ints:
    """The plugin's way: a call belongs to the first operator with its External id."""
    ids = np.where(trace.kind[rows] == Kind.MODULE, MISSING, trace.external[rows])
    unique, first = np.unique(ids, return_index=True)
    wanted = trace.external[launches.calls]
    place = np.minimum(np.searchsorted(unique, wanted), max(len(unique) - 1, 0))
    if not len(unique):
        return np.full(len(wanted), MISSING)
    return np.where(unique[place] == wanted, first[place], MISSING)


def _calls_by_time(trace: Trace, launches: Launches, rows: Ints, thread: Ints) -> Ints:
    """The innermost node of the same thread that was open when the call was made: needs no ids, which some versions got wrong."""
    calls = launches.calls
    owner = np.full(len(calls), MISSING)
    by_thread: dict[int, list[int]] = {}
    for i, key in enumerate(thread[rows].tolist()):
        by_thread.setdefault(key, []).append(i)
    call_thread = thread[calls]
    for key in np.unique(call_thread).tolist():
        nodes = by_thread.get(key)
        if nodes:
            mine = np.flatnonzero(call_thread == key)
            owner[mine] = _innermost(
                trace.start[rows[nodes]], trace.end[rows[nodes]], np.array(nodes), trace.start[calls[mine]]
            )
    return owner


def _innermost(start: Floats, end: Floats, node: Ints, at: Floats) -> Ints:
    """Nodes stand in order of start; `at` is sorted. A sweep with a stack of open nodes."""
    starts, ends, nodes = start.tolist(), end.tolist(), node.tolist()
    found: list[int] = []
    stack: list[int] = []
    i = 0
    for time in at.tolist():
        while i < len(starts) and starts[i] <= time:
            while stack and ends[stack[-1]] <= starts[i]:
                stack.pop()
            stack.append(i)
            i += 1
        while stack and ends[stack[-1]] < time:
            stack.pop()
        found.append(nodes[stack[-1]] if stack else MISSING)
    return np.array(found, dtype=np.int64)


def _merge_repeats(trace: Trace, tree: Tree, mode: Mode) -> Tree:
    """An operator whose only child is the same operator is one call. The plugin forgets the outer one's own runtime calls."""
    rows, parent, calls = tree.rows, tree.parent.copy(), tree.own_calls.copy()
    children = np.bincount(parent[parent >= 0], minlength=len(rows))
    operator = trace.kind[rows] == Kind.OPERATOR
    safe = np.maximum(parent, 0)
    repeat = (
        (parent >= 0) & operator & operator[safe] & (trace.name[rows] == trace.name[rows[safe]]) & (children[safe] == 1)
    )
    if not repeat.any():
        return tree
    target = np.arange(len(rows))
    for i in np.flatnonzero(repeat):  # parents stand before children, so chains resolve in one pass
        target[i] = target[parent[i]]
    known = calls >= 0
    if mode is Mode.TB:
        outer = np.zeros(len(rows), dtype=bool)
        outer[parent[repeat]] = True
        calls[known] = np.where(outer[calls[known]], MISSING, calls[known])
        known = calls >= 0
    calls[known] = target[calls[known]]
    parent = np.where(parent >= 0, target[np.maximum(parent, 0)], MISSING)
    keep = ~repeat
    place = np.cumsum(keep) - 1
    calls = np.where(calls >= 0, place[np.maximum(calls, 0)], MISSING)
    return Tree(rows[keep], np.where(parent >= 0, place[np.maximum(parent, 0)], MISSING)[keep], calls)


@dataclass(frozen=True)
class Costs:
    """Per node of the tree, microseconds."""

    host: Floats
    self_host: Floats
    device: Floats
    self_device: Floats
    self_tensor: Floats
    """Own device time in kernels that use tensor cores."""
    self_kernel: Floats
    eligible: Mask


def node_costs(trace: Trace, launches: Launches, tree: Tree, mode: Mode) -> Costs:
    count = len(tree.rows)
    length = trace.end[tree.rows] - trace.start[tree.rows]
    inner = tree.parent >= 0
    self_host = length - np.bincount(tree.parent[inner], weights=length[inner], minlength=count)
    owned = tree.own_calls >= 0
    call_length = trace.end[launches.calls] - trace.start[launches.calls]
    self_host = self_host - np.bincount(tree.own_calls[owned], weights=call_length[owned], minlength=count)
    node = np.where(
        launches.call_of >= 0,
        tree.own_calls[np.maximum(launches.call_of, 0)] if len(tree.own_calls) else MISSING,
        MISSING,
    )
    mine = node >= 0
    rows, node = launches.device_rows[mine], node[mine]
    work = trace.end[rows] - trace.start[rows]
    kernel = trace.kind[rows] == Kind.KERNEL
    tensor = trace.names_where(tb_uses_tensor_cores if mode is Mode.TB else uses_tensor_cores)[rows]
    sums: list[Floats] = [
        np.bincount(node, weights=work * part, minlength=count).astype(np.float64)
        for part in (1.0, tensor & kernel, kernel)
    ]
    return Costs(
        length, self_host, _up(sums[0], tree.parent), sums[0], sums[1], sums[2], _eligible(trace, tree, sums[1])
    )


def _up(values: Floats, parent: Ints) -> Floats:
    """Each node's value plus those of all below it; parents stand before their children."""
    total = values.tolist()
    parents = parent.tolist()
    for i in range(len(total) - 1, -1, -1):
        if parents[i] >= 0:
            total[parents[i]] += total[i]
    return np.array(total, dtype=np.float64)


def _eligible(trace: Trace, tree: Tree, tensor: Floats) -> Mask:
    """Can it use tensor cores? By its name, by what it launched, or by a child."""
    operator = trace.kind[tree.rows] == Kind.OPERATOR
    found = (trace.names_where(TENSOR_CORE_OPERATORS.__contains__)[tree.rows] | (operator & (tensor > 0))).tolist()
    parents, ops = tree.parent.tolist(), operator.tolist()
    for i in range(len(found) - 1, -1, -1):
        if found[i] and parents[i] >= 0 and ops[parents[i]]:
            found[parents[i]] = True
    return np.array(found, dtype=bool)


def is_operator(trace: Trace, tree: Tree) -> Mask:
    """Nodes that the table lists: operators, without wrappers that only hold others."""
    listed = trace.names_where(
        lambda n: not (n in _EXCLUDED or n.startswith("Optimizer.") or is_data_loading(n) or is_lightning(n))
    )
    return np.asarray((trace.kind[tree.rows] == Kind.OPERATOR) & listed[tree.rows])


def operator_table(
    trace: Trace, launches: Launches, tree: Tree, mode: Mode, *, by_shape: bool = False
) -> list[OperatorRow]:
    """Sorted by device time where there is a device, else by host time; both without children."""
    costs = node_costs(trace, launches, tree, mode)
    nodes = np.flatnonzero(is_operator(trace, tree))
    if not len(nodes):
        return []
    key = trace.name[tree.rows[nodes]].astype(np.int64)
    if by_shape and len(trace.shape):
        key = key * (len(trace.shapes) + 1) + trace.shape[tree.rows[nodes]]
    unique, first, group = np.unique(key, return_index=True, return_inverse=True)
    # Inside a call of the same operator the time is already counted; the plugin counted it twice.
    outermost = np.ones(len(nodes)) if mode is Mode.TB else _outermost(trace, tree, nodes)
    columns = [
        np.bincount(group, weights=weight, minlength=len(unique))
        for weight in (
            costs.host[nodes] * outermost, costs.self_host[nodes], costs.device[nodes] * outermost, costs.self_device[nodes], costs.self_tensor[nodes],
        )
    ]  # fmt: skip
    calls = np.bincount(group, minlength=len(unique))
    rows = [
        OperatorRow(
            name=trace.name_of(int(tree.rows[nodes[first[i]]])),
            calls=int(calls[i]),
            host_us=float(columns[0][i]),
            self_host_us=float(columns[1][i]),
            device_us=float(columns[2][i]),
            self_device_us=float(columns[3][i]),
            tensor_core_eligible=bool(costs.eligible[nodes[first[i]]]),
            tensor_core_pct=float(columns[4][i] / columns[3][i] * 100) if columns[3][i] > 0 else None,
            shape=trace.shapes[trace.shape[tree.rows[nodes[first[i]]]]] if by_shape and len(trace.shape) else None,
        )
        for i in range(len(unique))
    ]
    return sorted(rows, key=lambda r: (-r.self_device_us, -r.self_host_us, r.name))


def _outermost(trace: Trace, tree: Tree, nodes: Ints) -> Floats:
    """1 for a call that no call of the same operator encloses, else 0."""
    names, parents = trace.name[tree.rows].tolist(), tree.parent.tolist()
    marks = np.ones(len(nodes))
    for at, node in enumerate(nodes.tolist()):
        above = parents[node]
        while above >= 0:
            if names[above] == names[node]:
                marks[at] = 0.0
                break
            above = parents[above]
    return marks


def tensor_cores(trace: Trace, launches: Launches, tree: Tree, mode: Mode) -> TensorCores:
    kernels = trace.rows(Kind.KERNEL)
    if not len(kernels):
        return TensorCores(None, None, None)
    work = trace.end[kernels] - trace.start[kernels]
    uses = trace.names_where(tb_uses_tensor_cores if mode is Mode.TB else uses_tensor_cores)[kernels]
    if mode is Mode.FIXED:  # communication does not compute
        compute = ~trace.names_where(is_communication_kernel)[kernels]
        work = work * compute
    costs = node_costs(trace, launches, tree, mode)
    listed = is_operator(trace, tree)
    by_operators = float(costs.self_kernel[listed].sum())
    bottom = _lowest_eligible(tree, costs.eligible)
    return TensorCores(
        used_share=float((work * uses).sum() / work.sum()) if work.sum() > 0 else None,
        operator_share=float(costs.self_tensor[listed].sum()) / by_operators if by_operators > 0 else None,
        eligible_share=float(costs.self_kernel[bottom].sum()) / by_operators if by_operators > 0 else None,
    )


def _lowest_eligible(tree: Tree, eligible: Mask) -> Mask:
    """Eligible nodes with no eligible node below them."""
    below = np.zeros(len(tree.rows), dtype=bool).tolist()
    parents, marks = tree.parent.tolist(), eligible.tolist()
    for i in range(len(parents) - 1, -1, -1):
        if parents[i] >= 0 and (marks[i] or below[i]):
            below[parents[i]] = True
    return np.asarray(eligible & ~np.array(below, dtype=bool))


def kernel_table(trace: Trace, mode: Mode) -> list[KernelRow]:
    """By kernel name, the longest first."""
    rows = trace.rows(Kind.KERNEL)
    if not len(rows):
        return []
    work = trace.end[rows] - trace.start[rows]
    unique, group = np.unique(trace.name[rows], return_inverse=True)
    total = np.bincount(group, weights=work)
    calls = np.bincount(group)
    low, high = np.full(len(unique), np.inf), np.zeros(len(unique))
    np.minimum.at(low, group, work)
    np.maximum.at(high, group, work)
    blocks = _weighted(trace.blocks[rows], work, group, len(unique))
    occupancy = _weighted(trace.occupancy[rows], work, group, len(unique))
    whole = float(total.sum())
    tensor = tb_uses_tensor_cores if mode is Mode.TB else uses_tensor_cores
    made = [
        KernelRow(
            name=(name := trace.names[unique[i]]),
            calls=int(calls[i]),
            total_us=float(total[i]),
            mean_us=float(total[i] / calls[i]),
            min_us=float(low[i]),
            max_us=float(high[i]),
            share_pct=float(total[i] / whole * 100) if whole > 0 else 0.0,
            communication=is_communication_kernel(name),
            tensor_cores=tensor(name),
            triton=is_triton(name),
            blocks_per_sm=blocks[i],
            occupancy_pct=occupancy[i],
        )
        for i in range(len(unique))
    ]
    return sorted(made, key=lambda k: (-k.total_us, k.name))


def _weighted(value: Floats, work: Floats, group: Ints, count: int) -> list[float | None]:
    known = ~np.isnan(value)
    weight = np.bincount(group[known], weights=work[known], minlength=count)
    total = np.bincount(group[known], weights=(value * work)[known], minlength=count)
    return [float(t / w) if w > 0 else None for t, w in zip(total, weight, strict=True)]
