"""Where did a step's time go on one rank? The execution summary, communication, device use and tables of one trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from windlass.profile.collectives import CollectiveRow, collective_rows
from windlass.profile.device import DeviceUse, Idle, device_use, idle_time
from windlass.profile.intervals import Spans, intersect, union
from windlass.profile.operators import (
    KernelRow,
    OperatorRow,
    TensorCores,
    build_tree,
    kernel_table,
    operator_table,
    tensor_cores,
)
from windlass.profile.roles import CATEGORIES, Mode, Roles, exposed, find_roles, share_out
from windlass.profile.steps import Steps, find_launches, find_steps
from windlass.profile.trace import Kind, Trace


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Mean per step, microseconds."""

    total_us: float
    """Time in which a collective ran."""
    exposed_us: float
    """Of that, time in which neither computation nor a copy hid it: the Communication row of the table."""
    overlap_us: float
    """Of that, time in which computation ran as well."""
    computation_us: float
    other_us: float
    """Of the step, time with neither computation nor communication."""

    @property
    def overlap_pct(self) -> float | None:
        return self.overlap_us / self.total_us * 100 if self.total_us > 0 else None


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank's window; all times are means per step in microseconds, tables are sums over the window."""

    file: str
    rank: int
    mode: Mode
    steps: int
    step_numbers: list[int]
    steps_dropped: int
    step_us: float
    per_step_us: list[float]
    categories_us: dict[str, float]
    running_us: dict[str, float]
    """The same categories, hidden time included: 0 here means that the trace has none of it."""
    communication: Communication
    gpu_utilization: float | None
    sm_efficiency: float | None
    occupancy_pct: float | None
    devices: list[DeviceUse]
    device_name: str | None
    idle: Idle | None
    tensor_cores: TensorCores
    launches_per_step: float | None
    """Kernels, copies and memsets that a step runs."""
    memory_peak_share: float | None
    """Highest allocated memory over the device's memory."""
    world_size: int | None
    backend: str | None
    data_parallel: bool
    distributed: bool
    operators: list[OperatorRow]
    kernels: list[KernelRow]
    notes: list[str]
    collectives: list[CollectiveRow]

    @property
    def categories_pct(self) -> dict[str, float]:
        return {
            name: value / self.step_us * 100 if self.step_us > 0 else 0.0 for name, value in self.categories_us.items()
        }

    @property
    def busy_us(self) -> float:
        """The step without communication: what this rank did itself, and what the others waited for."""
        return self.step_us - self.communication.total_us

    def to_json(self, *, tables: bool = True) -> dict[str, Any]:
        """The contract's keys first; everything else beside them."""
        value = {
            "rank": self.rank,
            "file": self.file,
            "steps": self.steps,
            "step_us": self.step_us,
            "categories_us": self.categories_us,
            "categories_pct": self.categories_pct,
            "running_us": self.running_us,
            "communication": communication_json(self.communication),
            "collectives": [collective_json(c) for c in self.collectives],
            "gpu_utilization": self.gpu_utilization,
            "sm_efficiency": self.sm_efficiency,
            "occupancy_pct": self.occupancy_pct,
            "devices": [asdict(d) for d in self.devices],
            "device_name": self.device_name,
            "idle": asdict(self.idle) if self.idle else None,
            "tensor_cores": asdict(self.tensor_cores),
            "launches_per_step": self.launches_per_step,
            "step_numbers": self.step_numbers,
            "steps_dropped": self.steps_dropped,
            "per_step_us": self.per_step_us,
            "memory_peak_share": self.memory_peak_share,
            "notes": self.notes,
        }
        if tables:
            value["operators"] = [asdict(o) for o in self.operators]
            value["kernels"] = [asdict(k) for k in self.kernels]
        return value


def communication_json(value: Communication) -> dict[str, float | None]:
    return {**asdict(value), "overlap_pct": value.overlap_pct}


def collective_json(row: CollectiveRow) -> dict[str, Any]:
    return {**asdict(row), "mean_us": row.mean_us}


def summarise(trace: Trace, mode: Mode = Mode.FIXED, *, rank: int | None = None, by_shape: bool = False) -> RankProfile:
    """Everything windlass says about one trace."""
    tb = mode is Mode.TB
    launches = find_launches(trace, tb=tb)
    steps = find_steps(trace, launches, tb=tb)
    roles = find_roles(trace, launches, mode)
    tree = build_tree(trace, launches, mode)
    use = device_use(trace, steps, mode)
    categories = _categories(steps, roles, tb=tb)
    return RankProfile(
        file=str(trace.path),
        rank=rank if rank is not None else trace.rank or 0,
        mode=mode,
        steps=len(steps),
        step_numbers=steps.numbers,
        steps_dropped=steps.dropped,
        step_us=float((steps.end - steps.start).mean()),
        per_step_us=[float(v) for v in steps.end - steps.start],
        categories_us=categories,
        running_us={name: _mean(roles.spans[name], steps) for name in CATEGORIES[:-1]},
        communication=_communication(steps, roles, categories["Communication"]),
        gpu_utilization=_average([d.utilization for d in use]),
        sm_efficiency=_average([d.sm_efficiency for d in use]),
        occupancy_pct=_average([d.occupancy_pct for d in use]),
        devices=use,
        device_name=trace.device_name,
        idle=idle_time(trace, launches, steps, mode),
        tensor_cores=tensor_cores(trace, launches, tree, mode),
        launches_per_step=_launches_per_step(trace, steps),
        memory_peak_share=_memory_peak(trace),
        world_size=trace.world_size,
        backend=trace.backend,
        data_parallel=bool(trace.names_where(lambda n: n == "DataParallel.forward").any()),
        distributed=bool(trace.names_where(lambda n: n == "DistributedDataParallel.forward").any()),
        operators=operator_table(trace, launches, tree, mode, by_shape=by_shape),
        kernels=kernel_table(trace, mode),
        notes=_notes(trace, steps, mode),
        collectives=collective_rows(trace, steps, roles),
    )


def _mean(spans: Spans, steps: Steps) -> float:
    return float(spans.within(steps.start, steps.end).mean())


def _categories(steps: Steps, roles: Roles, *, tb: bool) -> dict[str, float]:
    whole = union(steps.start, steps.end)
    shares = share_out(whole, roles if tb else exposed(roles), refill=tb)
    return {name: _mean(shares[name], steps) for name in CATEGORIES}


def _communication(steps: Steps, roles: Roles, exposed_us: float) -> Communication:
    running = roles.spans["Communication"]
    total, computation = _mean(running, steps), _mean(roles.compute, steps)
    overlap = _mean(intersect(roles.compute, running), steps)
    step = float((steps.end - steps.start).mean())
    return Communication(
        total_us=total,
        exposed_us=exposed_us,
        overlap_us=overlap,
        computation_us=computation,
        other_us=step + overlap - computation - total,
    )


def _average(values: list[float] | list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _launches_per_step(trace: Trace, steps: Steps) -> float | None:
    rows = trace.rows(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
    if not len(rows):
        return None
    inside = (trace.start[rows] >= steps.first) & (trace.start[rows] < steps.last)
    return float(np.count_nonzero(inside)) / len(steps)


def _memory_peak(trace: Trace) -> float | None:
    sizes = {p.get("id"): p.get("totalGlobalMem") for p in trace.device_properties}
    shares = [peak / size for device, peak in trace.peak_bytes.items() if (size := sizes.get(device))]
    return max(shares) if shares else None


def _notes(trace: Trace, steps: Steps, mode: Mode) -> list[str]:
    """What a reader should know before comparing these numbers with others."""
    notes = []
    if not steps.numbers:
        notes.append("the trace marks no steps (no ProfilerStep#N): the whole window counts as one step")
    if steps.dropped:
        plural = "s" if steps.dropped > 1 else ""
        notes.append(
            f"{steps.dropped} step{plural} at the end left out: the window closed before all kernels were recorded"
        )
    if not trace.has(Kind.KERNEL):
        notes.append("no device kernels in this trace: the tables show the host only")
    if trace.incomplete:
        notes.append(f"{trace.incomplete:,} events without a duration or a time count as zero long")
    if mode is Mode.TB and trace.has(Kind.GPU_STEP):
        notes.append("mode tb counts the device's copies of the step marks as steps of their own, as the plugin did")
    return notes
