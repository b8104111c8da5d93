"""How do models compare language by language? One row per model, task and metric, one column per language, from eval.jsonl. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.errors import RunError
from windlass.evaluate.record import Score
from windlass.figures import Chart, DataTable, Section, Series, page
from windlass.files import read_json_lines
from windlass.runs.folder import open_run

LOWER_IS_BETTER = ("bits_per_byte", "perplexity", "overlap_with_training")
ALL = "all"
PREFIX = "language "


@dataclass(frozen=True)
class Row:
    """One metric of one task, of one model."""

    model: str
    task: str
    metric: str
    step: int | None
    cells: dict[str, Score]
    """Language, or "all" -> its number."""

    def plain(self) -> dict[str, Any]:
        return {
            "model": self.model, "task": self.task, "metric": self.metric, "step": self.step,
            "languages": {name: {k: getattr(s, k) for k in ("value", "low", "high", "count")} for name, s in self.cells.items()},
        }  # fmt: skip


def recorded(folders: Sequence[Any], *, every: bool = False) -> list[Row]:
    """What `windlass eval` wrote into these runs: of each number the newest, or with `every` that of each checkpoint."""
    rows: list[Row] = []
    opened = [open_run(folder) for folder in folders]
    names = [run.path.resolve().name for run in opened]
    for run, name in zip(opened, names, strict=True):
        lines = list(read_json_lines(run.eval_file))
        if not lines:
            raise RunError(
                "evaluate.evaluation-recorded",
                f"{run.path} has no evaluation recorded",
                hint=f"`windlass eval {run.path}` writes {run.eval_file.name}",
            )
        # Two runs of one name are told apart by where they are.
        rows += rows_of(name if names.count(name) == 1 else str(run.path), lines, every=every)
    return sorted(rows, key=lambda row: _place(rows, row))


def rows_of(model: str, lines: Iterable[Mapping[str, Any]], *, every: bool = False) -> list[Row]:
    if every:
        steps: dict[int | None, list[Mapping[str, Any]]] = {}
        for line in lines:
            steps.setdefault(line.get("step"), []).append(line)
        known = sorted(steps, key=lambda step: -1 if step is None else step)
        return [row for step in known for row in rows_of(_at(model, step), steps[step])]
    found: dict[tuple[str, str], Row] = {}
    for line in lines:
        group = str(line.get("group"))
        if group != ALL and not group.startswith(PREFIX):
            continue
        key = (str(line.get("task")), str(line.get("metric")))
        row = found.setdefault(key, Row(model, *key, line.get("step"), {}))
        if row.step != line.get("step"):  # numbers of different checkpoints never share a row
            row = found[key] = Row(model, *key, line.get("step"), {})
        row.cells[group.removeprefix(PREFIX)] = Score(
            task=key[0], group=group, metric=key[1], value=line.get("value"), low=line.get("low"), high=line.get("high"),
            count=int(line.get("count") or 0),
        )  # fmt: skip
    return list(found.values())


def _at(model: str, step: int | None) -> str:
    return model if step is None else f"{model}, step {step:,}"


def of_scores(model: str, step: int | None, scores: Iterable[Score]) -> list[Row]:
    return rows_of(model, [score.line(step=step) for score in scores])


def _place(rows: Sequence[Row], row: Row) -> tuple[int, int]:
    """Models stand beside each other in each task and metric, in the order they were named."""
    kinds, models = list(dict.fromkeys((r.task, r.metric) for r in rows)), list(dict.fromkeys(r.model for r in rows))
    return kinds.index((row.task, row.metric)), models.index(row.model)


def languages(rows: Iterable[Row]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row.cells) if name != ALL]


def table_of(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells: value and half of the interval's width."""
    names = [ALL, *languages(rows)]
    return ("task", "metric", "model", *names), [
        (row.task, _words(row.metric), row.model, *(_cell(row.cells.get(name)) for name in names)) for row in rows
    ]


def _cell(score: Score | None) -> str:
    if score is None:
        return ""
    if score.value is None:
        return "unknown"
    value = _short(score.value, 3)
    known = score.low is not None and score.high is not None
    return f"{value} ± {_short((score.high - score.low) / 2, 2)}" if known else value


def _short(value: float, digits: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def charts_of(rows: Sequence[Row]) -> list[Chart]:
    """One per task and metric: languages side by side, a colour for each model."""
    return [
        _chart(task, metric, [row for row in rows if (row.task, row.metric) == (task, metric)])
        for task, metric in dict.fromkeys((row.task, row.metric) for row in rows)
    ]


def _chart(task: str, metric: str, rows: Sequence[Row]) -> Chart:
    names = [ALL, *languages(rows)]
    series = [
        Series(
            name=row.model,
            x=tuple(names),
            y=tuple(row.cells[name].value if name in row.cells else None for name in names),
            kind="bar",
            hover=tuple(f"{row.model}, {name}: {_cell(row.cells.get(name)) or 'not measured'}" for name in names),
        )
        for row in rows
    ]
    better = "lower is better" if metric in LOWER_IS_BETTER else "higher is better"
    return Chart(
        title=f"{task}: {_words(metric)}", series=tuple(series), y_title=f"{_words(metric)} ({better})", from_zero=True
    )


def page_of(rows: Sequence[Row]) -> str:
    columns, cells = table_of(rows)
    table = DataTable(columns, cells, right=tuple(range(3, len(columns))), caption="± half of the 95 % interval")
    names = dict.fromkeys(row.model for row in rows)
    return page("By language", [Section("", (*charts_of(rows), table))], subtitle=" beside ".join(names))


def _words(metric: str) -> str:
    return metric.replace("_", " ")
