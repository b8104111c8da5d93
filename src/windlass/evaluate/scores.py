"""Evaluation scores with 95 % intervals, one line of eval.jsonl each. No torch."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.files import append_line
from windlass.runs.folder import Run

Floats = npt.NDArray[np.float64]
Interval = tuple[float | None, float | None]
RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class EvalScore:
    """One number of one group. The report shows these fields in this order."""

    task: str
    group: str  # "all", "source code", "language nl"
    metric: str
    value: float | None
    low: float | None = None  # 95 % interval; None where it cannot be known (one document)
    high: float | None = None
    count: int  # independent items: documents, questions, sentences
    detail: Mapping[str, Any] = field(default_factory=dict)

    def line(self, **more: Any) -> dict[str, Any]:
        """The line of eval.jsonl; `more` says which checkpoint it belongs to."""
        fields = {key: value for key, value in vars(self).items() if key != "detail"}
        return {**fields, **more, "detail": self.detail}


def append_scores(run: Run, scores: Iterable[EvalScore], *, step: int | None, tokens: int | None, **more: Any) -> None:
    """Add scores to the run's eval.jsonl, with the checkpoint they belong to."""
    now = time.time()
    for score in scores:
        append_line(run.eval_file, score.line(step=step, tokens=tokens, time=now, **more))


def share_score(task: str, group: str, metric: str, hits: int, count: int, detail: Mapping[str, Any]) -> EvalScore:
    """Share of items that are right; None when there are no items."""
    low, high = wilson_interval(hits, count)
    value = hits / count if count else None
    return EvalScore(task=task, group=group, metric=metric, value=value, low=low, high=high, count=count, detail=detail)


def ratio_score(
    task: str, group: str, metric: str, above: Floats, below: Floats, detail: Mapping[str, Any]
) -> EvalScore:
    """Ratio of two sums over items; None when the second is 0."""
    low, high = ratio_interval(above, below)
    value = float(above.sum() / below.sum()) if below.sum() else None
    count = len(above)
    return EvalScore(task=task, group=group, metric=metric, value=value, low=low, high=high, count=count, detail=detail)


def ratio_interval(above: Floats, below: Floats, seed: int = 0) -> Interval:
    """Interval of sum(above) / sum(below), resampling items: the tokens of one document do not vary independently."""
    count = len(above)
    if count < 2:
        return None, None
    random, ratios = np.random.default_rng(seed), []
    for _ in range(0, RESAMPLES, 100):  # in parts, so that many items need little memory
        weights = random.multinomial(count, np.full(count, 1 / count), size=100)
        ratios.append((weights @ above) / np.maximum(weights @ below, 1e-300))
    low, high = np.quantile(np.concatenate(ratios), (0.025, 0.975))
    return float(low), float(high)


def wilson_interval(hits: int, count: int) -> Interval:
    """Interval of a share, good for few items and near 0 and 1."""
    if count == 0:
        return None, None
    z, share = 1.959964, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    # Exactly 0 and 1 at the ends, where rounding leaves a trace.
    return (max(0.0, middle - half) if hits else 0.0), (min(1.0, middle + half) if hits < count else 1.0)
