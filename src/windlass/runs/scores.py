"""Scores of a run with 95 % intervals: the lines of eval.jsonl."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.files import append_line, json_line, parse_json, read_json_lines
from windlass.runs.folder import Run

Interval = tuple[float | None, float | None]


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
        return {**{key: value for key, value in vars(self).items() if key != "detail"}, **more, "detail": self.detail}


def append_scores(run: Run, scores: Iterable[EvalScore], *, step: int | None, tokens: int | None, **more: Any) -> None:
    """Record the scores, unless they are the newest of their tasks already: a command that was killed after this is
    repeated, and must not record them twice."""
    lines = [parse_json(json_line(score.line(step=step, tokens=tokens, **more)).encode()) for score in scores]
    tasks = {line["task"] for line in lines}
    recorded = [line for line in read_json_lines(run.eval_file) if line.get("task") in tasks]
    newest = [{key: value for key, value in line.items() if key != "time"} for line in recorded[-len(lines) :]]
    if lines and lines != newest:
        now = time.time()
        append_line(run.eval_file, *({**line, "time": now} for line in lines))


def share_score(task: str, group: str, metric: str, hits: int, count: int, detail: Mapping[str, Any]) -> EvalScore:
    """Share of items that are right; None when there are no items."""
    low, high = wilson_interval(hits, count)
    value = hits / count if count else None
    return EvalScore(task=task, group=group, metric=metric, value=value, low=low, high=high, count=count, detail=detail)


def wilson_interval(hits: int, count: int) -> Interval:
    """Interval of a share, good for few items and near 0 and 1."""
    if count == 0:
        return None, None
    z, share = 1.959964, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    # Exactly 0 and 1 at the ends, where rounding leaves a trace.
    return (max(0.0, middle - half) if hits else 0.0), (min(1.0, middle + half) if hits < count else 1.0)
