"""The profile of one rank: execution summary, communication, device use and tables of one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from windlass.profile.categories import CATEGORIES, Activity, assign_moments, find_activity, with_exposed_communication
from windlass.profile.collectives import CollectiveRow, collective_table
from windlass.profile.device_use import DeviceUse, IdleTime, measure_devices, measure_idle_time
from windlass.profile.event_names import Mode
from windlass.profile.intervals import Spans, intersect, union
from windlass.profile.operators import (
    KernelRow,
    OperatorRow,
    TensorCoreUse,
    build_tree,
    kernel_table,
    measure_tensor_cores,
    operator_table,
)
from windlass.profile.steps import Steps, find_launches, find_steps
from windlass.profile.trace import DEVICE_KINDS, Kind, Trace


@dataclass(frozen=True, kw_only=True)
class CommunicationTime:
    """Means per step in microseconds."""

    total_us: float  # time in which a collective ran
    exposed_us: float  # the part that neither computation nor a copy hid: the Communication row of the summary
    overlap_us: float  # the part in which computation ran as well
    computation_us: float
    other_us: float  # time of the step with neither computation nor communication
    overlap_pct: float | None  # overlap_us of total_us; None without communication


@dataclass(frozen=True, kw_only=True)
class StepMeans:
    """Means per step in microseconds; None where the trace does not have the value."""

    steps: int
    step_us: float
    categories_us: dict[str, float]
    categories_pct: dict[str, float]
    running_us: dict[str, float]  # the same categories, hidden time included: 0 means that the trace has none of it
    communication: CommunicationTime
    collectives: list[CollectiveRow]
    gpu_utilization: float | None
    sm_efficiency: float | None
    occupancy_pct: float | None


@dataclass(frozen=True, kw_only=True)
class RankProfile(StepMeans):
    """One rank's window: means per step, and tables as sums over the window."""

    rank: int
    file: str
    devices: list[DeviceUse]
    device_name: str | None
    idle: IdleTime | None
    tensor_cores: TensorCoreUse
    launches_per_step: float | None  # kernels, copies and memsets
    step_numbers: list[int]
    steps_dropped: int
    per_step_us: list[float]
    memory_peak_share: float | None  # highest allocated memory over the device's memory
    notes: list[str]
    operators: list[OperatorRow]
    kernels: list[KernelRow]
    world_size: int | None
    backend: str | None
    uses_data_parallel: bool

    @property
    def busy_us(self) -> float:
        """The step without communication: the time that this rank worked, and the others waited for it."""
        return self.step_us - self.communication.total_us

    def to_json(self, *, tables: bool = True) -> dict[str, Any]:
        value = {
            "rank": self.rank,
            "file": self.file,
            **asdict(self if tables else replace(self, operators=[], kernels=[])),
        }
        left_out = {"world_size", "backend", "uses_data_parallel"} | (set() if tables else {"operators", "kernels"})
        return {key: value[key] for key in value if key not in left_out}


def profile_rank(
    trace: Trace, mode: Mode = Mode.FIXED, *, rank: int | None = None, by_shape: bool = False
) -> RankProfile:
    """All values and tables of one trace. `rank` replaces the number in the trace."""
    launches = find_launches(trace, mode)
    steps = find_steps(trace, launches, mode)
    activity = find_activity(trace, launches, mode)
    tree = build_tree(trace, launches, mode)
    devices = measure_devices(trace, steps, mode)

    step_spans = union(steps.start, steps.end)
    counted = activity if mode is Mode.TB else with_exposed_communication(activity)
    assigned = assign_moments(step_spans, counted, mode)
    categories = {name: _mean_per_step(assigned[name], steps) for name in CATEGORIES}
    step_us = float((steps.end - steps.start).mean())
    device_starts = trace.start[trace.rows(*DEVICE_KINDS)]
    launched = np.count_nonzero((device_starts >= steps.first) & (device_starts < steps.last))
    memory_bytes = {p.get("id"): p.get("totalGlobalMem") for p in trace.device_properties}
    memory_shares = [peak / size for device, peak in trace.peak_bytes.items() if (size := memory_bytes.get(device))]
    return RankProfile(
        rank=rank if rank is not None else trace.distributed_info("rank", int) or 0,
        file=str(trace.path),
        steps=len(steps),
        step_us=step_us,
        categories_us=categories,
        categories_pct=percent_of_step(categories, step_us),
        running_us={name: _mean_per_step(activity.spans[name], steps) for name in CATEGORIES[:-1]},
        communication=_communication(activity, steps, step_us, categories["Communication"]),
        collectives=collective_table(trace, steps, activity),
        gpu_utilization=mean_of_measured([d.utilization for d in devices]),
        sm_efficiency=mean_of_measured([d.sm_efficiency for d in devices]),
        occupancy_pct=mean_of_measured([d.occupancy_pct for d in devices]),
        devices=devices,
        device_name=trace.device_name,
        idle=measure_idle_time(trace, launches, steps, mode),
        tensor_cores=measure_tensor_cores(trace, tree, mode),
        launches_per_step=launched / len(steps) if len(device_starts) else None,
        step_numbers=steps.numbers,
        steps_dropped=steps.dropped,
        per_step_us=[float(v) for v in steps.end - steps.start],
        memory_peak_share=max(memory_shares, default=None),
        notes=_notes(trace, steps, mode),
        operators=operator_table(trace, tree, mode, by_shape=by_shape),
        kernels=kernel_table(trace, mode),
        world_size=trace.distributed_info("world_size", int),
        backend=trace.distributed_info("backend", str),
        uses_data_parallel="DataParallel.forward" in trace.names,
    )


def percent_of_step(categories_us: dict[str, float], step_us: float) -> dict[str, float]:
    return {name: value / step_us * 100 if step_us > 0 else 0.0 for name, value in categories_us.items()}


def mean_of_measured(values: Sequence[float | None]) -> float | None:
    """Values that were not measured are left out, never counted as 0; None when there is no other."""
    measured = [v for v in values if v is not None]
    return sum(measured) / len(measured) if measured else None


def _mean_per_step(spans: Spans, steps: Steps) -> float:
    return float(spans.within(steps.start, steps.end).mean())


def _communication(activity: Activity, steps: Steps, step_us: float, exposed_us: float) -> CommunicationTime:
    running = activity.spans["Communication"]
    total_us, computation_us = _mean_per_step(running, steps), _mean_per_step(activity.compute, steps)
    overlap_us = _mean_per_step(intersect(activity.compute, running), steps)
    return CommunicationTime(
        total_us=total_us,
        exposed_us=exposed_us,
        overlap_us=overlap_us,
        computation_us=computation_us,
        other_us=step_us + overlap_us - computation_us - total_us,
        overlap_pct=overlap_us / total_us * 100 if total_us > 0 else None,
    )


def _notes(trace: Trace, steps: Steps, mode: Mode) -> list[str]:
    """What a reader should know before comparing these numbers with others."""
    plural = "s" if steps.dropped > 1 else ""
    notes = {
        "the trace marks no steps (no ProfilerStep#N): the whole window counts as one step": not steps.numbers,
        f"{steps.dropped} step{plural} at the end left out: the window closed before all kernels were recorded": (
            steps.dropped
        ),
        "no device kernels in this trace: the tables show the host only": not trace.mask(Kind.KERNEL).any(),
        f"{trace.incomplete:,} events without a duration or a time count as zero long": trace.incomplete,
        "mode tb counts the device's copies of the step marks as steps of their own, as the plugin did": (
            mode is Mode.TB and trace.mask(Kind.GPU_STEP).any()
        ),
    }
    return [note for note, applies in notes.items() if applies]
