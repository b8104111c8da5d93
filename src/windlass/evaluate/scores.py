"""Evaluation scores with 95 % intervals, one line of eval.jsonl each, and their tables and charts. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.config.tune import lower_is_better
from windlass.errors import RunError
from windlass.figures import Chart, DataTable, Section, Series
from windlass.figures.html import page
from windlass.files import read_json_lines
from windlass.runs.folder import open_run
from windlass.runs.scores import EvalScore, Interval

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000


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
    random, shares = np.random.default_rng(seed), np.full(count, 1 / count)
    # In parts, so that many items need little memory.
    parts = (random.multinomial(count, shares, size=100) for _ in range(0, RESAMPLES, 100))
    ratios = [(weights @ above) / np.maximum(weights @ below, 1e-300) for weights in parts]
    low, high = np.quantile(np.concatenate(ratios), (0.025, 0.975))
    return float(low), float(high)


ALL = "all"
LANGUAGE_PREFIX = "language "


def number_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def scores_page(name: str, step: int | None, scores: Sequence[EvalScore]) -> str:
    """A self-contained page of one model: a section per task with bars by group and the table."""
    sections = []
    for task in dict.fromkeys(score.task for score in scores):
        inside = [score for score in scores if score.task == task]
        charts = []
        for metric in dict.fromkeys(score.metric for score in inside):
            bars = [score for score in inside if score.metric == metric]
            series = Series(
                name=metric,
                x=tuple(score.group for score in bars),
                y=tuple(score.value for score in bars),
                kind="bar",
                hover=tuple(
                    f"{s.group}: {number_text(s.value)} ({number_text(s.low)} to {number_text(s.high)}), "
                    f"{s.count:,} items"
                    for s in bars
                ),
            )
            title, height = metric.replace("_", " "), 140 + 32 * len(bars)
            charts.append(
                Chart(title=title, series=(series,), y_title=title, horizontal=True, from_zero=True, height=height)
            )
        rows = [
            (s.group, s.metric, number_text(s.value), number_text(s.low), number_text(s.high), f"{s.count:,}")
            for s in inside
        ]
        columns = ("group", "metric", "value", "low", "high", "items")
        table = DataTable(columns, rows, right=(2, 3, 4, 5), caption="low and high: the 95 % interval")
        sections.append(Section(task, (*charts, table), id=task.replace(" ", "-")))
    return page(f"Evaluation of {name}", sections, subtitle="" if step is None else f"checkpoint of step {step:,}")


@dataclass(frozen=True)
class LanguageRow:
    model: str
    task: str
    metric: str
    step: int | None
    cells: dict[str, EvalScore]  # by language, or "all"

    def to_json(self) -> dict[str, Any]:
        cells = {
            name: {key: getattr(score, key) for key in ("value", "low", "high", "count")}
            for name, score in self.cells.items()
        }
        return {"model": self.model, "task": self.task, "metric": self.metric, "step": self.step, "languages": cells}

    def text(self, name: str) -> str:
        """The value of a language and half of its interval's width; empty when there is none."""
        score = self.cells.get(name)
        if score is None or score.value is None:
            return "" if score is None else "unknown"
        numbers = [(score.value, 3)]
        if score.low is not None and score.high is not None:
            numbers.append(((score.high - score.low) / 2, 2))
        return " ± ".join(
            f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}" for value, digits in numbers
        )


def recorded_rows(folders: Sequence[Path], *, every_step: bool = False) -> list[LanguageRow]:
    """Scores that `windlass eval` wrote into these runs: the newest of each, or those of every checkpoint."""
    runs = [open_run(folder) for folder in folders]
    names = [run.path.resolve().name for run in runs]
    rows: list[LanguageRow] = []
    for run, name in zip(runs, names, strict=True):
        lines = list(read_json_lines(run.eval_file))
        if not lines:
            raise RunError(
                "evaluate.nothing-recorded",
                f"{run.path} has no recorded evaluation",
                hint=f"`windlass eval {run.argument}` writes {run.eval_file.name}",
            )
        # Two runs of one name are told apart by their paths.
        model = name if names.count(name) == 1 else str(run.path)
        if not every_step:
            rows += language_rows(model, lines)
            continue
        for step in sorted({line.get("step") for line in lines}, key=lambda step: -1 if step is None else step):
            at_step = [line for line in lines if line.get("step") == step]
            rows += language_rows(model if step is None else f"{model}, step {step:,}", at_step)
    # Models are grouped by task and metric, in the order in which they were named.
    kinds = list(dict.fromkeys((row.task, row.metric) for row in rows))
    return sorted(rows, key=lambda row: kinds.index((row.task, row.metric)))


def language_rows(model: str, lines: Iterable[Mapping[str, Any]]) -> list[LanguageRow]:
    """One row per task and metric, from lines of eval.jsonl; of several checkpoints the last one counts."""
    rows: dict[tuple[str, str], LanguageRow] = {}
    for line in lines:
        group, key, step = str(line.get("group")), (str(line.get("task")), str(line.get("metric"))), line.get("step")
        if group != ALL and not group.startswith(LANGUAGE_PREFIX):
            continue
        if key not in rows or rows[key].step != step:  # scores of different checkpoints never share a row
            rows[key] = LanguageRow(model, *key, step, {})
        rows[key].cells[group.removeprefix(LANGUAGE_PREFIX)] = EvalScore(
            task=key[0],
            group=group,
            metric=key[1],
            value=line.get("value"),
            low=line.get("low"),
            high=line.get("high"),
            count=int(line.get("count") or 0),
        )
    return list(rows.values())


def languages(rows: Iterable[LanguageRow]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row.cells) if name != ALL]


def language_table(rows: Sequence[LanguageRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    names = [ALL, *languages(rows)]
    cells = [(row.task, row.metric.replace("_", " "), row.model, *(row.text(name) for name in names)) for row in rows]
    return ("task", "metric", "model", *names), cells


def language_charts(rows: Sequence[LanguageRow]) -> list[Chart]:
    """One chart per task and metric: languages side by side, a colour for each model."""
    charts = []
    for task, metric in dict.fromkeys((row.task, row.metric) for row in rows):
        inside = [row for row in rows if (row.task, row.metric) == (task, metric)]
        names = (ALL, *languages(inside))
        series = tuple(
            Series(
                name=row.model,
                x=names,
                y=tuple(row.cells[name].value if name in row.cells else None for name in names),
                kind="bar",
                hover=tuple(f"{row.model}, {name}: {row.text(name) or 'not measured'}" for name in names),
            )
            for row in inside
        )
        better, title = "lower" if lower_is_better(metric) else "higher", metric.replace("_", " ")
        charts.append(
            Chart(
                title=task if task == title else f"{task}: {title}",
                series=series,
                y_title=f"{title} ({better} is better)",
                from_zero=True,
            )
        )
    return charts


def language_page(rows: Sequence[LanguageRow]) -> str:
    columns, cells = language_table(rows)
    table = DataTable(columns, cells, right=tuple(range(3, len(columns))), caption="± half of the 95 % interval")
    models = " vs. ".join(dict.fromkeys(row.model for row in rows))
    return page("Scores by language", [Section("", (*language_charts(rows), table))], subtitle=models)
