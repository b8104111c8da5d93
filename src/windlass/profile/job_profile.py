"""The profile of a job: the traces of several ranks as one set, with means, spread and advice."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from windlass.errors import ProfileError
from windlass.profile.captures import rank_of_name
from windlass.profile.categories import CATEGORIES
from windlass.profile.collectives import mean_over_ranks
from windlass.profile.event_names import Mode
from windlass.profile.rank_profile import (
    CommunicationTime,
    RankProfile,
    StepMeans,
    mean_of_measured,
    percent_of_step,
    profile_rank,
)
from windlass.profile.trace import read_trace

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
            "{value} rank(s) with a device talk over gloo: NCCL (RCCL on AMD) is the fast backend",
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


ReadProgress = Callable[[Path, int], None]
"""Called while reading with the file and the number of its bytes read so far."""


@dataclass(frozen=True, kw_only=True)
class JobProfile(StepMeans):
    """Means per step over all ranks (`steps` as on most ranks), and the ranks themselves."""

    label: str
    mode: Mode
    tensor_core_share: float | None
    spread: RankSpread | None
    advice: list[Advice]
    ranks: list[RankProfile]

    def to_json(self, *, tables: bool = True) -> dict[str, Any]:
        """`tables`: with the operators and kernels of each rank."""
        means = asdict(replace(self, ranks=[]))
        return {
            "label": self.label,
            "mode": self.mode,
            **means,
            "ranks": [r.to_json(tables=tables) for r in self.ranks],
        }


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
    for index, path in enumerate(Path(p) for p in paths):
        trace = read_trace(path, shapes=by_shape, progress=partial(progress, path) if progress else None)
        numbers = (trace.distributed_info("rank", int), rank_of_name(path), index)
        rank = next(n for n in numbers if n is not None)
        ranks.append(profile_rank(trace, mode, rank=rank, by_shape=by_shape))
        del trace  # before the next one is read
    ranks.sort(key=lambda r: r.rank)
    step_us = _mean([r.step_us for r in ranks])
    categories = {name: _mean([r.categories_us[name] for r in ranks]) for name in CATEGORIES}
    keys = ("total_us", "exposed_us", "overlap_us", "computation_us", "other_us")
    communication = {key: _mean([getattr(r.communication, key) for r in ranks]) for key in keys}
    overlap_pct = communication["overlap_us"] / communication["total_us"] * 100 if communication["total_us"] else None
    spread = _spread(ranks)
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


def _spread(ranks: list[RankProfile]) -> RankSpread | None:
    """None for a single rank."""
    if len(ranks) < 2:
        return None
    busy, steps = [r.busy_us for r in ranks], [r.step_us for r in ranks]
    straggler, middle = max(ranks, key=lambda r: r.busy_us), median(busy)
    return RankSpread(
        step_us_min=min(steps),
        step_us_max=max(steps),
        busy_us_min=min(busy),
        busy_us_max=max(busy),
        straggler=straggler.rank,
        excess_pct=(straggler.busy_us - middle) / middle * 100 if middle > 0 else 0.0,
    )
