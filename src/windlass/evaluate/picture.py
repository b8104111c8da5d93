"""What does an evaluation look like? Bars by group for each metric, beside the table with its intervals. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.evaluate.record import Score
from windlass.figures import Chart, DataTable, Section, Series, page


def page_of(name: str, step: int | None, scores: Sequence[Score]) -> str:
    """A self-contained page: one section per task."""
    tasks = dict.fromkeys(score.task for score in scores)
    sections = [section_of(task, [score for score in scores if score.task == task]) for task in tasks]
    return page(f"Evaluation of {name}", sections, subtitle="" if step is None else f"checkpoint of step {step:,}")


def section_of(task: str, scores: Sequence[Score]) -> Section:
    charts = [
        chart_of(metric, [s for s in scores if s.metric == metric])
        for metric in dict.fromkeys(s.metric for s in scores)
    ]
    rows = [(s.group, s.metric, _number(s.value), _number(s.low), _number(s.high), f"{s.count:,}") for s in scores]
    table = DataTable(
        ("group", "metric", "value", "low", "high", "items"),
        rows,
        right=(2, 3, 4, 5),
        caption="low and high: the 95 % interval",
    )
    return Section(task, (*charts, table), id=task.replace(" ", "-"))


def chart_of(metric: str, scores: Sequence[Score]) -> Chart:
    hover = tuple(
        f"{s.group}: {_number(s.value)} ({_number(s.low)} to {_number(s.high)}), {s.count:,} items" for s in scores
    )
    bar = Series(
        name=metric, x=tuple(s.group for s in scores), y=tuple(s.value for s in scores), kind="bar", hover=hover
    )
    words = metric.replace("_", " ")
    return Chart(
        title=words, series=(bar,), y_title=words, horizontal=True, from_zero=True, height=140 + 32 * len(scores)
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
