"""To which of the eight categories does each event belong? Two answers: the plugin's (`tb`) and the right one (`fixed`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from windlass.profile.intervals import Spans, intersect, subtract, union
from windlass.profile.names import (
    TB_COMMUNICATION,
    is_communication_kernel,
    is_communication_operator,
    is_data_loading,
    is_lightning,
)
from windlass.profile.steps import Launches
from windlass.profile.trace import MISSING, Ints, Kind, Mask, Trace

CATEGORIES = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other")
"""In order of rank: a moment belongs to the first category that was running then."""


class Mode(StrEnum):
    TB = "tb"
    """The removed plugin's numbers, its faults included, for comparing with old reports."""
    FIXED = "fixed"
    """Communication by kernel name, every step adding up to 100 %."""


@dataclass(frozen=True)
class Roles:
    """When each category was running, whatever else ran beside it."""

    spans: dict[str, Spans]
    compute: Spans
    """What communication can hide behind: kernels, or operators on a trace without a device."""
    communication_rows: Ints
    """Kernels counted as communication."""


def find_roles(trace: Trace, launches: Launches, mode: Mode) -> Roles:
    return _tb_roles(trace) if mode is Mode.TB else _fixed_roles(trace, launches)


def share_out(steps: Spans, roles: Roles, *, refill: bool) -> dict[str, Spans]:
    """Give every moment of the steps to the first category that was running.

    `refill` repeats the plugin's fault: when nothing of the steps is left, it starts over with all of it.
    """
    left, shares = steps, {}
    for category in CATEGORIES[:-1]:
        running = roles.spans[category]
        if refill and not len(left):
            left = steps
        shares[category] = intersect(left, running)
        left = subtract(left, running)
    shares["Other"] = left
    return shares


def _spans(trace: Trace, mask: Mask) -> Spans:
    return union(trace.start[mask], trace.end[mask])


def _kind(trace: Trace, *kinds: Kind) -> Mask:
    return np.isin(trace.kind, kinds)


def _tb_roles(trace: Trace) -> Roles:
    named = trace.names_where(TB_COMMUNICATION.__contains__)
    annotation = _kind(trace, Kind.ANNOTATION, Kind.GPU_ANNOTATION)
    host = annotation | _kind(trace, Kind.OPERATOR, Kind.PYTHON)
    if trace.of_lightning:
        host &= annotation | ~trace.names_where(is_lightning)
    kernel = trace.kind == Kind.KERNEL
    comm_kernel = kernel & np.isin(trace.external, trace.external[named & host])
    loading = trace.names_where(is_data_loading) & (annotation | (trace.kind == Kind.OPERATOR))
    spans = {
        "Kernel": _spans(trace, kernel & ~comm_kernel),
        "Memcpy": _spans(trace, trace.kind == Kind.MEMCPY),
        "Memset": _spans(trace, trace.kind == Kind.MEMSET),
        "Communication": _spans(trace, comm_kernel | (host & named & ~loading)),
        "Runtime": _spans(trace, trace.kind == Kind.RUNTIME),
        "DataLoader": _spans(trace, loading),
        "CPU Exec": _spans(trace, host & ~named & ~loading),
    }
    compute = spans["Kernel"] if len(spans["Kernel"]) else spans["CPU Exec"]
    return Roles(spans, compute, np.flatnonzero(comm_kernel))


def _fixed_roles(trace: Trace, launches: Launches) -> Roles:
    kernel = trace.kind == Kind.KERNEL
    comm_kernel = kernel & trace.names_where(is_communication_kernel)
    comm_kernel |= _launched_by_collective(trace, launches, comm_kernel)
    host = _kind(trace, Kind.OPERATOR, Kind.PYTHON, Kind.ANNOTATION)
    loading = trace.names_where(is_data_loading) & host
    collective = trace.names_where(is_communication_operator) & host
    # Beside a device's kernels the host ranges matter little; the plugin's names are kept, so that only the kernels' place differs.
    spans = {
        "Kernel": _spans(trace, kernel & ~comm_kernel),
        "Memcpy": _spans(trace, trace.kind == Kind.MEMCPY),
        "Memset": _spans(trace, trace.kind == Kind.MEMSET),
        "Communication": _spans(trace, comm_kernel | (host & trace.names_where(TB_COMMUNICATION.__contains__))),
        "Runtime": _spans(trace, _kind(trace, Kind.RUNTIME, Kind.DRIVER)),
        "DataLoader": _spans(trace, loading),
        "CPU Exec": _spans(trace, host & ~loading),
    }
    compute = spans["Kernel"]
    if not kernel.any():
        # Without a device the operators are the computation, and a collective is exposed where none of them runs.
        compute = _spans(trace, (trace.kind == Kind.OPERATOR) & ~collective & ~loading)
        spans["Communication"] = _spans(trace, collective)
    return Roles(spans, compute, np.flatnonzero(comm_kernel))


def exposed(roles: Roles) -> Roles:
    """The roles as the table wants them: on a trace without a device, communication behind computation counts as computation."""
    if len(roles.spans["Kernel"]) or len(roles.communication_rows) or not len(roles.spans["Communication"]):
        return roles
    bare = subtract(roles.spans["Communication"], roles.compute)
    return Roles({**roles.spans, "Communication": bare}, roles.compute, roles.communication_rows)


def _launched_by_collective(trace: Trace, launches: Launches, named: Mask) -> Mask:
    """A second hint for libraries whose kernels have other names: the External id of a collective.

    Some profilers write the correlation id there, so the launching call must also lie inside the collective's host range.
    """
    found = np.zeros(len(trace.kind), dtype=bool)
    ops = np.flatnonzero(
        (trace.kind == Kind.OPERATOR) & trace.names_where(is_communication_operator) & (trace.external != MISSING)
    )
    rows, calls = launches.device_rows, launches.call_of
    asked = (
        (calls >= 0)
        & (trace.kind[rows] == Kind.KERNEL)
        & ~named[rows]
        & np.isin(trace.external[rows], trace.external[ops])
    )
    if not asked.any():
        return found
    first = {int(e): int(r) for e, r in zip(trace.external[ops][::-1], ops[::-1], strict=True)}
    for row, call in zip(rows[asked], launches.calls[calls[asked]], strict=True):
        op = first[int(trace.external[row])]
        found[row] = trace.start[op] <= trace.start[call] <= trace.end[op]
    return found
