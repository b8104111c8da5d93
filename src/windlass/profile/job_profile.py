"""The profile of a job: the traces of several ranks as one set, with means, spread and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from windlass.errors import ProfileError
from windlass.profile.advice import Advice, RankSpread, advise
from windlass.profile.categories import CATEGORIES
from windlass.profile.collectives import mean_over_ranks
from windlass.profile.event_names import Mode
from windlass.profile.find_traces import rank_of_name
from windlass.profile.rank_profile import (
    CommunicationTime,
    RankProfile,
    StepMeans,
    mean_of_measured,
    percent_of_step,
    profile_rank,
)
from windlass.profile.trace import read_trace

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
        hint = "give a run folder, or trace files (.json or .json.gz)"
        raise ProfileError("profile.no-traces-given", "no trace files were given", hint=hint)
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
    spread = _spread(ranks)
    return JobProfile(
        label=label or Path(paths[0]).name,
        mode=mode,
        steps=Counter(r.steps for r in ranks).most_common(1)[0][0],
        step_us=step_us,
        categories_us=categories,
        categories_pct=percent_of_step(categories, step_us),
        running_us={name: _mean([r.running_us[name] for r in ranks]) for name in CATEGORIES[:-1]},
        communication=_mean_communication([r.communication for r in ranks]),
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


def _mean_communication(parts: Sequence[CommunicationTime]) -> CommunicationTime:
    keys = ("total_us", "exposed_us", "overlap_us", "computation_us", "other_us")
    means = {key: _mean([getattr(part, key) for part in parts]) for key in keys}
    overlap_pct = means["overlap_us"] / means["total_us"] * 100 if means["total_us"] > 0 else None
    return CommunicationTime(**means, overlap_pct=overlap_pct)


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
