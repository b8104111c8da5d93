"""Where did the step's time go on the whole job? Several ranks' traces as one set: means, spread and the straggler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from windlass.errors import ProfileError
from windlass.profile.advice import Advice, advise
from windlass.profile.collectives import CollectiveRow, over_ranks
from windlass.profile.find import rank_of_name
from windlass.profile.read import read_trace
from windlass.profile.roles import CATEGORIES, Mode
from windlass.profile.summary import Communication, RankProfile, collective_json, communication_json, summarise

Report = Callable[[Path, int], None]
"""Called while reading: which file, and how many of its bytes."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the ranks lie apart. In synchronous training steps last equally long everywhere, so the slow rank is the one that
    waits least: the one with the longest step outside communication."""

    step_us_min: float
    step_us_max: float
    busy_us_min: float
    busy_us_max: float
    straggler: int
    excess_pct: float
    """How much longer the straggler is busy than the median rank."""


@dataclass(frozen=True, kw_only=True)
class JobProfile:
    """Means per step over all ranks, and the ranks themselves."""

    label: str
    mode: Mode
    ranks: list[RankProfile]
    spread: Spread | None
    advice: list[Advice]

    @property
    def steps(self) -> int:
        return Counter(r.steps for r in self.ranks).most_common(1)[0][0]

    @property
    def step_us(self) -> float:
        return _mean([r.step_us for r in self.ranks])

    @property
    def categories_us(self) -> dict[str, float]:
        return {name: _mean([r.categories_us[name] for r in self.ranks]) for name in CATEGORIES}

    @property
    def categories_pct(self) -> dict[str, float]:
        return {
            name: value / self.step_us * 100 if self.step_us > 0 else 0.0 for name, value in self.categories_us.items()
        }

    @property
    def running_us(self) -> dict[str, float]:
        return {name: _mean([r.running_us[name] for r in self.ranks]) for name in CATEGORIES[:-1]}

    @property
    def communication(self) -> Communication:
        parts = [asdict(r.communication) for r in self.ranks]
        return Communication(**{key: _mean([p[key] for p in parts]) for key in parts[0]})

    @property
    def collectives(self) -> list[CollectiveRow]:
        return over_ranks([r.collectives for r in self.ranks])

    @property
    def gpu_utilization(self) -> float | None:
        return mean_known([r.gpu_utilization for r in self.ranks])

    @property
    def sm_efficiency(self) -> float | None:
        return mean_known([r.sm_efficiency for r in self.ranks])

    @property
    def occupancy_pct(self) -> float | None:
        return mean_known([r.occupancy_pct for r in self.ranks])

    @property
    def tensor_core_share(self) -> float | None:
        return mean_known([r.tensor_cores.used_share for r in self.ranks])

    def to_json(self, *, tables: bool = True) -> dict[str, Any]:
        return {
            "label": self.label,
            "mode": self.mode.value,
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
            "tensor_core_share": self.tensor_core_share,
            "spread": asdict(self.spread) if self.spread else None,
            "advice": [asdict(a) for a in self.advice],
            "ranks": [r.to_json(tables=tables) for r in self.ranks],
        }


def profile_traces(
    paths: Sequence[Path | str],
    mode: Mode | str = Mode.FIXED,
    *,
    label: str | None = None,
    by_shape: bool = False,
    report: Report | None = None,
) -> JobProfile:
    """Read the files one after the other; only one is in memory at a time."""
    if not paths:
        raise ProfileError(
            "profile.trace-files-given",
            "no trace files were given",
            hint="give a run folder, or trace files (.json or .json.gz)",
        )
    ranks = []
    for index, path in enumerate(Path(p) for p in paths):
        trace = read_trace(path, shapes=by_shape, progress=_told(report, path))
        named = rank_of_name(path)
        rank = trace.rank if trace.rank is not None else named if named is not None else index
        ranks.append(summarise(trace, Mode(mode), rank=rank, by_shape=by_shape))
    ranks.sort(key=lambda r: r.rank)
    spread = find_spread(ranks)
    return JobProfile(
        label=label or Path(paths[0]).name, mode=Mode(mode), ranks=ranks, spread=spread, advice=advise(ranks, spread)
    )


def _told(report: Report | None, path: Path) -> Callable[[int], None] | None:
    return None if report is None else lambda done: report(path, done)


def find_spread(ranks: list[RankProfile]) -> Spread | None:
    if len(ranks) < 2:
        return None
    busy = [r.busy_us for r in ranks]
    steps = [r.step_us for r in ranks]
    slow = max(ranks, key=lambda r: r.busy_us)
    middle = median(busy)
    return Spread(
        step_us_min=min(steps),
        step_us_max=max(steps),
        busy_us_min=min(busy),
        busy_us_max=max(busy),
        straggler=slow.rank,
        excess_pct=(slow.busy_us - middle) / middle * 100 if middle > 0 else 0.0,
    )


def mean_known(values: Sequence[float | None]) -> float | None:
    """None when nobody knows; unknown ranks are left out, never counted as 0."""
    known = [v for v in values if v is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
