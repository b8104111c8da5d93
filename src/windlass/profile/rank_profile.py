"""The profile of one rank: execution summary, communication, device use and tables of one trace."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from windlass.profile.categories import CATEGORIES, assign_moments, find_activity, with_exposed_communication
from windlass.profile.collectives import CollectiveRow, collective_table
from windlass.profile.event_names import Mode
from windlass.profile.intervals import Spans, gaps, intersect, running_sum, union
from windlass.profile.operators import (
    KernelRow,
    OperatorRow,
    TensorCoreUse,
    build_tree,
    kernel_table,
    measure_tensor_cores,
    operator_table,
)
from windlass.profile.steps import Launches, Steps, find_launches, find_steps
from windlass.profile.trace import DEVICE_KINDS, MISSING, Floats, Ints, Kind, Trace


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """One device over all steps; None where the trace does not have the value."""

    device: int
    utilization: float  # share of the steps in which at least one kernel ran, communication included, copies not
    sm_efficiency: float | None  # blocks per SM of the running kernels, at most 1, averaged over the steps
    occupancy_pct: float | None  # estimated achieved occupancy, weighted by kernel time


@dataclass(frozen=True, kw_only=True)
class IdleTime:
    """Mean per step: time in which the device ran nothing, by what the next work on it was waiting for."""

    idle_us: float
    host_wait_us: float  # the next kernel was not launched yet: the host is too slow
    kernel_wait_us: float  # the next kernel was launched but did not start
    other_us: float  # no launch is known for the next kernel, or no kernel follows


def measure_devices(trace: Trace, steps: Steps, mode: Mode) -> list[DeviceUse]:
    low, high = steps.first, steps.last
    if high <= low:
        return []

    def length_in_steps(start: Floats, end: Floats) -> Floats:
        return np.asarray(np.maximum(np.minimum(end, high) - np.maximum(start, low), 0.0))

    kernels = trace.rows(Kind.KERNEL)
    ids = _device_ids(trace, kernels, mode)
    devices = []
    for device in np.unique(ids[ids != MISSING]):
        rows = kernels[ids == device]
        busy = union(trace.start[rows], trace.end[rows]).within(np.array([low]), np.array([high]))[0]

        with_blocks = rows[trace.blocks[rows] > 0.0]
        start, end, blocks = running_sum(trace.start[with_blocks], trace.end[with_blocks], trace.blocks[with_blocks])
        level_length = length_in_steps(start, end)
        filled = float((np.minimum(blocks, 1.0) * level_length).sum())

        with_occupancy = rows[trace.occupancy[rows] >= 0.0]
        kernel_length = length_in_steps(trace.start[with_occupancy], trace.end[with_occupancy])
        occupied = float((trace.occupancy[with_occupancy] * kernel_length).sum())
        devices.append(
            DeviceUse(
                device=int(device),
                utilization=float(busy) / (high - low),
                sm_efficiency=filled / (high - low) if (level_length > 0).any() else None,
                occupancy_pct=occupied / float(kernel_length.sum()) if kernel_length.sum() > 0 else None,
            )
        )
    return devices


def measure_idle_time(trace: Trace, launches: Launches, steps: Steps, mode: Mode) -> IdleTime | None:
    """Each gap on a device's timeline is split at the launch of the work that ends it. None without a device."""
    if not len(launches.device_rows):
        return None
    ids = _device_ids(trace, launches.device_rows, mode)
    devices = np.unique(ids[ids != MISSING]) if (ids != MISSING).any() else np.array([MISSING])
    totals = np.zeros(4)
    for device in devices:
        rows, calls = launches.device_rows[ids == device], launches.call_of[ids == device]
        idle = gaps(union(trace.start[rows], trace.end[rows]), steps.first, steps.last)
        length = idle.end - idle.start
        following = np.searchsorted(trace.start[rows], idle.end, side="left")
        call = np.where(following < len(rows), calls[np.minimum(following, len(rows) - 1)], MISSING)
        host_wait, kernel_wait = np.zeros(len(idle)), np.zeros(len(idle))
        launched = call >= 0
        launched_at = trace.start[launches.calls[call[launched]]]
        host_wait[launched] = np.clip(launched_at - idle.start[launched], 0.0, length[launched])
        kernel_wait[launched] = length[launched] - host_wait[launched]
        other = length - host_wait - kernel_wait
        totals += np.array([length.sum(), host_wait.sum(), kernel_wait.sum(), other.sum()])
    idle_us, host_us, kernel_us, other_us = (float(v) for v in totals / len(steps) / len(devices))
    return IdleTime(idle_us=idle_us, host_wait_us=host_us, kernel_wait_us=kernel_us, other_us=other_us)


def _device_ids(trace: Trace, rows: Ints, mode: Mode) -> Ints:
    """The device of each row. Where an event does not name it, the process id is the device; the plugin had no id."""
    ids = trace.device[rows].astype(np.int64)
    if mode is Mode.TB:
        return ids
    pids = [int(pid) if pid.isdigit() and int(pid) < 1024 else MISSING for pid, _ in trace.threads]
    return np.where(ids == MISSING, np.array(pids, dtype=np.int64)[trace.thread[rows]], ids)


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
    running = activity.spans["Communication"]
    total_us, computation_us = _mean_per_step(running, steps), _mean_per_step(activity.compute, steps)
    overlap_us = _mean_per_step(intersect(activity.compute, running), steps)
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
        communication=CommunicationTime(
            total_us=total_us,
            exposed_us=categories["Communication"],
            overlap_us=overlap_us,
            computation_us=computation_us,
            other_us=step_us + overlap_us - computation_us - total_us,
            overlap_pct=overlap_us / total_us * 100 if total_us > 0 else None,
        ),
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
