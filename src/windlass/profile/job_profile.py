"""The profile of a job: the traces of its ranks, each with execution summary, communication, device use and tables, and
their means, spread and advice."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from windlass.errors import ProfileError
from windlass.profile.captures import rank_of_name
from windlass.profile.event_names import Mode
from windlass.profile.intervals import Spans, gaps, intersect, running_sum, union
from windlass.profile.tables import (
    CollectiveRow,
    KernelGroupRow,
    KernelRow,
    OperatorRow,
    TensorCoreUse,
    build_tree,
    collective_table,
    kernel_group_table,
    kernel_table,
    mean_over_ranks,
    measure_tensor_cores,
    operator_table,
)
from windlass.profile.timeline import (
    CATEGORIES,
    Launches,
    Steps,
    assign_moments,
    find_activity,
    find_launches,
    find_steps,
)
from windlass.profile.trace import DEVICE_KINDS, MISSING, Floats, Ints, Kind, Trace, read_trace
from windlass.runs.history import CLOCK_SECONDS

THRESHOLDS = {
    "data loading": 5.0,  # % of the step
    "communication": 10.0,  # % of the step that is exposed; the overlap matters above the same share in total
    "overlap": 50.0,  # % of the communication
    "utilisation": 0.5,  # share of the time
    "host wait": 10.0,  # % of the step
    "tensor cores": 0.0,  # share of the kernel time
    "memory": 0.9,  # share of the device's memory
    "DataParallel": 0,  # ranks
    "backend": 0,  # ranks
    "straggler": 5.0,  # % longer than the median rank
}
BELOW = ("overlap", "utilisation")  # rules that apply below their threshold, the others above it
SHORT_KERNEL_US = 10.0


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
        launched, host_wait = call >= 0, np.zeros(len(idle))
        launched_at = trace.start[launches.calls[call[launched]]]
        # Work that starts before its launch was stamped by a clock that is ahead: what it waited for is unknown.
        in_order = launched_at <= idle.end[launched]
        launched[launched], launched_at = in_order, launched_at[in_order]
        host_wait[launched] = np.clip(launched_at - idle.start[launched], 0.0, length[launched])
        kernel_wait = np.where(launched, length - host_wait, 0.0)
        other = length - host_wait - kernel_wait
        totals += np.array([length.sum(), host_wait.sum(), kernel_wait.sum(), other.sum()])
    idle_us, host_us, kernel_us, other_us = (float(v) for v in totals / len(steps) / len(devices))
    return IdleTime(idle_us=idle_us, host_wait_us=host_us, kernel_wait_us=kernel_us, other_us=other_us)


def _device_ids(trace: Trace, rows: Ints, mode: Mode) -> Ints:
    """The device of each row. Where an event does not name it, the process id is the device; the plugin had no id."""
    ids = trace.device[rows].astype(np.int64)
    if mode is Mode.TB:
        return ids
    pids = [int(pid) if pid.isdecimal() and len(pid) < 5 and int(pid) < 1024 else MISSING for pid, _ in trace.threads]
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
    kernel_groups: list[KernelGroupRow]
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
        left_out = {"world_size", "backend", "uses_data_parallel"} | (set() if tables else {"operators", "kernels"})
        value = asdict(self if tables else replace(self, operators=[], kernels=[]))
        return {key: value[key] for key in ("rank", "file", *value) if key not in left_out}


def profile_rank(
    trace: Trace, mode: Mode = Mode.FIXED, *, rank: int | None = None, by_shape: bool = False
) -> RankProfile:
    """All values and tables of one trace. `rank` replaces the number in the trace."""
    launches = find_launches(trace, mode)
    steps = find_steps(trace, launches, mode)
    activity = find_activity(trace, launches, mode)
    tree = build_tree(trace, launches, mode)
    devices = measure_devices(trace, steps, mode)

    assigned = assign_moments(union(steps.start, steps.end), activity, mode)
    categories = {name: _mean_per_step(assigned[name], steps) for name in CATEGORIES}
    step_us = float((steps.end - steps.start).mean())
    running = activity.spans["Communication"]
    total_us, computation_us = _mean_per_step(running, steps), _mean_per_step(activity.compute, steps)
    overlap_us = _mean_per_step(intersect(activity.compute, running), steps)
    device_starts = trace.start[trace.rows(*DEVICE_KINDS)]
    launched = np.count_nonzero((device_starts >= steps.first) & (device_starts < steps.last))
    sizes = [(p.get("id"), p.get("totalGlobalMem")) for p in trace.device_properties]
    memory_bytes = {i: size for i, size in sizes if isinstance(i, int) and isinstance(size, (int, float)) and size > 0}
    kernels = kernel_table(trace, mode)
    memory_shares = [peak / memory_bytes[i] for i, peak in trace.peak_bytes.items() if i in memory_bytes]
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
        notes=_notes(trace, launches, steps, mode),
        kernel_groups=kernel_group_table(kernels),
        operators=operator_table(trace, tree, mode, by_shape=by_shape),
        kernels=kernels,
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


def _notes(trace: Trace, launches: Launches, steps: Steps, mode: Mode) -> list[str]:
    """What a reader should know before comparing these numbers with others."""
    plural = "s" if steps.dropped > 1 else ""
    launched = launches.call_of >= 0
    lead_us = trace.start[launches.calls[launches.call_of[launched]]] - trace.start[launches.device_rows[launched]]
    ahead = np.count_nonzero(lead_us > 0)
    notes = {
        "the trace marks no steps (no ProfilerStep#N): the whole window counts as one step": not steps.numbers,
        f"{steps.dropped} step{plural} at the end not counted: the window closed before all kernels were recorded": (
            steps.dropped
        ),
        "no device kernels in this trace: the tables show the host only": not trace.mask(Kind.KERNEL).any(),
        f"{trace.incomplete:,} events without a duration or a time are counted with zero duration": trace.incomplete,
        f"{trace.not_finite:,} events whose time or duration is not finite are left out or counted with zero duration": (
            trace.not_finite
        ),
        f"{trace.negative:,} events with a negative duration are counted with zero duration": trace.negative,
        f"{ahead:,} kernels and copies start before their launch, by up to {lead_us.max(initial=0.0):,.0f} us: the "
        "device's clock is ahead of the host's, so it is unknown what they waited for": ahead,
        "mode tb counts the device's copies of the step marks as separate steps, as the plugin did": (
            mode is Mode.TB and trace.mask(Kind.GPU_STEP).any()
        ),
    }
    return [*trace.notes, *(note for note, applies in notes.items() if applies)]


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """Differences between the ranks. In synchronous training steps last equally long on all ranks, so the slow rank is
    the one that waits least: the one with the longest step outside communication."""

    step_us_min: float
    step_us_max: float
    busy_us_min: float
    busy_us_max: float
    straggler: int
    excess_pct: float  # how much longer the straggler is busy than the median rank


@dataclass(frozen=True)
class Advice:
    rule: str
    value: float
    threshold: float
    text: str  # the value, the threshold and what to try


def advise(ranks: list[RankProfile], spread: RankSpread | None) -> list[Advice]:
    """The rules that apply to the mean over ranks: those whose value is on the bad side of their threshold."""
    total_us, step_us = sum(r.communication.total_us for r in ranks), sum(r.step_us for r in ranks)
    overlap_matters = step_us > 0 and total_us / step_us * 100 > THRESHOLDS["communication"]
    host_waits = [r.idle.host_wait_us / r.step_us * 100 if r.idle and r.step_us > 0 else None for r in ranks]
    calls = sum(k.calls for r in ranks for k in r.kernels)
    kernel_us = sum(k.total_us for r in ranks for k in r.kernels) / calls if calls else 0.0
    fusing = "short: fuse them (compile)" if kernel_us < SHORT_KERNEL_US else "so look at the host side"
    used = mean_of_measured([r.tensor_cores.used_share for r in ranks])
    rules: list[tuple[str, float | None, str]] = [
        (
            "data loading",
            sum(r.categories_pct["DataLoader"] for r in ranks) / len(ranks),
            "{value:.1f} % of the step waits for data (more than {limit:g} %): "
            "give the loader more workers, or read a token store",
        ),
        (
            "communication",
            sum(r.categories_pct["Communication"] for r in ranks) / len(ranks),
            "{value:.1f} % of the step is exposed communication (more than {limit:g} %): "
            "accumulate more micro-batches per step, shard over fewer devices, or keep sharding inside a node",
        ),
        (
            "overlap",
            sum(r.communication.overlap_us for r in ranks) / total_us * 100 if overlap_matters else None,
            "only {value:.0f} % of the communication runs behind computation (less than {limit:g} %): "
            "check prefetching and bucket sizes",
        ),
        (
            "utilisation",
            mean_of_measured([r.gpu_utilization for r in ranks]),
            "the device runs kernels {percent:.1f} % of the time (less than {limit_percent:g} %): "
            "raise the micro-batch, or compile the model",
        ),
        (
            "host wait",
            mean_of_measured(host_waits),
            "the device waits {value:.1f} % of the step for the host to launch work (more than {limit:g} %)"
            + (f"; the mean kernel takes {kernel_us:.1f} us, {fusing}" if kernel_us else ""),
        ),
        (
            "tensor cores",
            mean_of_measured([r.tensor_cores.eligible_share for r in ranks]) if used == 0.0 else None,
            "{percent:.0f} % of the kernel time comes from operators that could use tensor cores, and no kernel does: "
            "train in bf16",
        ),
        (
            "memory",
            max((r.memory_peak_share for r in ranks if r.memory_peak_share is not None), default=None),
            "memory peaks at {percent:.1f} % of the device (more than {limit_percent:g} %): "
            "recompute activations or shard more before growing the batch",
        ),
        (
            "DataParallel",
            sum(len(r.devices) > 1 for r in ranks if r.uses_data_parallel),
            "DataParallel drives several devices from one process: use one process per device",
        ),
        (
            "backend",
            sum(bool(r.devices) and r.backend == "gloo" for r in ranks),
            "{value} rank(s) with a device communicate over gloo: use NCCL (RCCL on AMD), which is faster",
        ),
        (
            "straggler",
            spread.excess_pct if spread else None,
            "rank {straggler} is busy {value:.1f} % longer than the median rank (more than {limit:g} %), "
            "and the others wait for it in their collectives: look at its host, clocks and data",
        ),
    ]
    advice = []
    for rule, value, text in rules:
        limit = THRESHOLDS[rule]
        if value is not None and (value < limit if rule in BELOW else value > limit):
            shown = {"value": value, "percent": value * 100, "limit": limit, "limit_percent": limit * 100}
            text = text.format(**shown, straggler=spread.straggler if spread else None)
            advice.append(Advice(rule, value, limit, text))
    return advice


# Called while reading with the file and the number of its bytes read so far.
ReadProgress = Callable[[Path, int], None]


@dataclass(frozen=True, kw_only=True)
class JobProfile(StepMeans):
    """Means per step over all ranks (`steps` as on most ranks), and the ranks themselves."""

    label: str
    mode: Mode
    tensor_core_share: float | None
    spread: RankSpread | None  # None for a single rank
    advice: list[Advice]
    ranks: list[RankProfile]

    def to_json(self, *, tables: bool = True) -> dict[str, Any]:
        ranks = [r.to_json(tables=tables) for r in self.ranks]
        return {"label": self.label, "mode": self.mode, **asdict(replace(self, ranks=[])), "ranks": ranks}


@dataclass(frozen=True)
class TraceOrigin:
    """What a trace says about the job it comes from; None: unknown."""

    path: Path
    rank: int | None
    world_size: int | None
    step_numbers: list[int]
    window: tuple[float, float] | None  # seconds since 1970


def check_same_job(first: TraceOrigin, second: TraceOrigin) -> str | None:
    """Raise an error if two traces cannot be two ranks in one window of one job; return a note if that is doubtful."""
    names = f"{first.path} and {second.path}"
    hint = "give one trace per rank, all from one window of one job; `windlass compare` compares jobs"
    if first.rank is not None and first.rank == second.rank:
        raise ProfileError("profile.rank-twice", f"{names} are both from rank {first.rank}", hint=hint)
    differences = []
    if first.world_size and second.world_size and first.world_size != second.world_size:
        differences.append(f"jobs of {first.world_size} and {second.world_size} ranks")
    if first.step_numbers and second.step_numbers and not set(first.step_numbers) & set(second.step_numbers):
        steps = [f"{min(o.step_numbers)} to {max(o.step_numbers)}" for o in (first, second)]
        differences.append(f"steps {steps[0]} and steps {steps[1]}")
    apart_seconds = 0.0
    if first.window and second.window:
        apart_seconds = max(first.window[0], second.window[0]) - min(first.window[1], second.window[1])
    if apart_seconds > CLOCK_SECONDS:
        differences.append(f"windows that are {apart_seconds:,.0f} s apart")
    if differences:
        message = f"{names} do not belong to one job and window: {', '.join(differences)}"
        raise ProfileError("profile.traces-of-different-jobs", message, hint=hint)
    if apart_seconds > 1.0:
        return (
            f"{names} were recorded {apart_seconds:,.0f} s apart: unless the clocks differ, they do not belong to "
            "one job"
        )
    return None


def profile_traces(
    paths: Sequence[Path | str],
    mode: Mode | str = Mode.FIXED,
    *,
    label: str | None = None,
    by_shape: bool = False,
    progress: ReadProgress | None = None,
) -> JobProfile:
    """Read the files one after the other; only one is in memory at a time."""
    if not paths:
        raise ProfileError(
            "profile.no-traces-given",
            "no trace files were given",
            hint="give a run folder, or trace files (.json or .json.gz)",
        )
    mode = Mode(mode)
    ranks: list[RankProfile] = []
    origins: list[TraceOrigin] = []
    for index, path in enumerate(Path(p) for p in paths):
        trace = read_trace(path, shapes=by_shape, progress=partial(progress, path) if progress else None)
        rank = next((n for n in (trace.distributed_info("rank", int), rank_of_name(path)) if n is not None), None)
        profile = profile_rank(trace, mode, rank=index if rank is None else rank, by_shape=by_shape)
        numbers = [n for n in profile.step_numbers if n != MISSING]
        origin = TraceOrigin(path, rank, profile.world_size, numbers, trace.window)
        doubts = [note for other in origins if (note := check_same_job(other, origin)) is not None]
        ranks.append(replace(profile, notes=[*profile.notes, *doubts[:1]]))
        origins.append(origin)
        del trace  # before the next one is read
    ranks.sort(key=lambda r: r.rank)
    step_us = _mean([r.step_us for r in ranks])
    categories = {name: _mean([r.categories_us[name] for r in ranks]) for name in CATEGORIES}
    keys = ("total_us", "exposed_us", "overlap_us", "computation_us", "other_us")
    communication = {key: _mean([getattr(r.communication, key) for r in ranks]) for key in keys}
    overlap_pct = communication["overlap_us"] / communication["total_us"] * 100 if communication["total_us"] else None
    spread = None
    if len(ranks) > 1:
        busy, steps = [r.busy_us for r in ranks], [r.step_us for r in ranks]
        middle = median(busy)
        spread = RankSpread(
            step_us_min=min(steps),
            step_us_max=max(steps),
            busy_us_min=min(busy),
            busy_us_max=max(busy),
            straggler=max(ranks, key=lambda r: r.busy_us).rank,
            excess_pct=(max(busy) - middle) / middle * 100 if middle > 0 else 0.0,
        )
    return JobProfile(
        label=label or Path(paths[0]).name,
        mode=mode,
        steps=Counter(r.steps for r in ranks).most_common(1)[0][0],
        step_us=step_us,
        categories_us=categories,
        categories_pct=percent_of_step(categories, step_us),
        running_us={name: _mean([r.running_us[name] for r in ranks]) for name in CATEGORIES[:-1]},
        communication=CommunicationTime(**communication, overlap_pct=overlap_pct),
        collectives=mean_over_ranks([r.collectives for r in ranks]),
        gpu_utilization=mean_of_measured([r.gpu_utilization for r in ranks]),
        sm_efficiency=mean_of_measured([r.sm_efficiency for r in ranks]),
        occupancy_pct=mean_of_measured([r.occupancy_pct for r in ranks]),
        tensor_core_share=mean_of_measured([r.tensor_cores.used_share for r in ranks]),
        spread=spread,
        advice=advise(ranks, spread),
        ranks=ranks,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
