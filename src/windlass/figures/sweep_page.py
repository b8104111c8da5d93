"""What does a sweep say to a reader? Winner, charts, and one table of all its points, from its rows alone: for its own page and for every other view."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.config.sweep import SweepConfig, axes_of
from windlass.figures import sweep as charts
from windlass.figures.model import Card, Cards, Item, Note, Section, Table
from windlass.units import print_bytes, print_joules, print_seconds

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    missing: str = ""
    """What a point that ended well shows where others have a number."""


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _brief(text: Any, most: int = 70) -> str:
    """The first words of a reason; the whole of it stands in results.csv."""
    words = str(text)
    return words if len(words) <= most else words[:most].rsplit(" ", 1)[0] + " ..."


COLUMNS = (
    Column("devices", "devices"),
    Column("tokens_per_second", "tokens/s", lambda v: f"{v:,.0f}"),
    Column("tokens_per_second_per_device", "per device", lambda v: f"{v:,.0f}"),
    Column("mfu", "MFU", _percent, missing="unknown"),
    Column("memory_bytes", "memory", print_bytes),
    Column("predicted_memory_bytes", "predicted", print_bytes),
    Column("joules_per_token", "J/token", lambda v: f"{v:.3g}", missing="not measured"),
    Column("kwh_per_step", "per step", lambda v: print_joules(v * 3.6e6), missing="not measured"),
    Column("step_seconds", "step", print_seconds),
    Column("step_spread", "spread", _percent),
)


def shown_columns(sweep: SweepConfig, rows: Sequence[Row], rank_by: str) -> list[Column]:
    """Point, outcome, the numbers that anybody has, and the ranking's own key."""
    found = [Column("point", "point", right=False), Column("outcome", "outcome", right=False)]
    # On one device everywhere, tokens/s per device says nothing new.
    alone = {"devices", "tokens_per_second_per_device"} if all(r.get("devices") == 1 for r in rows) else set()
    if (
        len({r.get("batch_tokens") for r in rows}) > 1
    ):  # steps of different size: their energy says nothing side by side
        alone = alone | {"kwh_per_step"}
    found += [c for c in COLUMNS if c.key not in alone and any(r.get(c.key) is not None for r in rows)]
    extra = [rank_by, *sweep.metrics]
    have = {c.key for c in found} | alone
    found += [
        Column(key, key, lambda v: charts.number(v) if isinstance(v, (int, float)) else str(v))
        for key in dict.fromkeys(extra)
        if key not in have and any(r.get(key) is not None for r in rows)
    ]
    why = any(_reason(r) for r in rows)
    return [*found, *([Column("detail", "why", _brief, right=False)] if why else [])]


def _reason(row: Row) -> str | None:
    """A good outcome needs none, and "oom" is not explained by the words "out of memory"."""
    detail, outcome = row.get("detail"), row.get("outcome")
    said = outcome == "ok" or (outcome == "oom" and "out of memory" in str(detail).lower())
    return None if said or not detail else str(detail)


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """One row of the table; a point that did not end well has no numbers to miss."""
    texts = []
    for column in columns:
        value = _reason(row) if column.key == "detail" else row.get(column.key)
        absent = column.missing if row.get("outcome") == "ok" else ""
        texts.append(absent if value is None else column.show(value))
    return [t or ("not run" if c.key == "outcome" else "") for t, c in zip(texts, columns, strict=True)]


def best_first(rows: Sequence[Row], rank_by: str, goal: str = "max") -> list[Row]:
    """The points that ended well, best first."""
    known = [r for r in rows if charts.known(r, rank_by)]
    return sorted(known, key=lambda r: -r[rank_by] if goal == "max" else r[rank_by])


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Outcome -> points; what has none yet is "not run"."""
    found: dict[str, int] = {}
    for row in rows:
        word = row.get("outcome") or "not run"
        found[word] = found.get(word, 0) + 1
    return found


def sweep_sections(
    sweep: SweepConfig, rows: Sequence[Row], rank_by: str, grid: Collection[str] | None = None
) -> list[Section]:
    """`grid`: the points of the matrix; those beside it (None: there are none) stay out of the maps."""
    sweep, axes = _axes_as_columns(sweep, rows)
    asked = [r for r in rows if grid is None or r["point"] in grid]
    ranked = best_first(rows, rank_by, sweep.goal)
    pair = charts.heat_axes(sweep, rows, axes)
    parts: list[tuple[str, str, Sequence[Item]]] = [
        ("", "winner", _head(sweep, rows, ranked, rank_by)),
        ("Heat map", "heat", charts.heat_maps(sweep, asked, axes, rank_by)),
        ("Best runs", "best", charts.best_bars(asked, pair[0] if pair and sweep.command is None else None)),
        ("Scaling", "scaling", charts.scaling(rows, sweep.scaling)),
        ("Speed against energy", "pareto", [charts.pareto(rows)] if sweep.command is None else []),
        ("Was the planner right?", "predicted", charts.predicted_against_measured(rows)),
        ("Which strategy exists in which engine", "equivalence", _equivalence(sweep.equivalence)),
        ("All points", "points", [_table(sweep, rows, ranked, rank_by)]),
    ]
    return [Section(title, tuple(items), id=key) for title, key, items in parts if items]


def _axes_as_columns(sweep: SweepConfig, rows: Sequence[Row]) -> tuple[SweepConfig, list[str]]:
    """The axis `devices` has the column `devices_per_node`, beside that of all devices; tables of earlier versions do not have it."""

    def column(axis: str) -> str:
        return (
            "devices_per_node"
            if axis == "devices" and any(r.get("devices_per_node") is not None for r in rows)
            else axis
        )

    heat = [column(axis) for axis in sweep.heat]
    return sweep.model_copy(update={"heat": heat}), [column(axis) for axis in axes_of(sweep)]


def _head(sweep: SweepConfig, rows: Sequence[Row], ranked: Sequence[Row], rank_by: str) -> list[Item]:
    found = counts(rows)
    listed = ", ".join(f"{n} {word}" for word, n in found.items())
    cards = [Card(f"{found.get('ok', 0)} of {len(rows)}", "points ended well", listed)]
    if ranked:
        best = ranked[0]
        cards.insert(
            0, Card(charts.number(float(best[rank_by])), f"{charts.title_of(rank_by)}, the best", best["point"])
        )
        if best.get("mfu") is not None and rank_by != "mfu":
            cards.append(Card(_percent(best["mfu"]), "its MFU"))
        if best.get("memory_bytes") is not None:
            cards.append(Card(print_bytes(best["memory_bytes"]), "its peak memory"))
        if len(ranked) > 1 and sweep.goal == "max" and ranked[-1][rank_by] > 0:
            cards.append(Card(f"{best[rank_by] / ranked[-1][rank_by]:.1f} x", "from the last to the best", ranked[-1]["point"]))  # fmt: skip
    return [Cards(cards)] if ranked else [Cards(cards), Note(no_winner(rows, rank_by), "warning")]


def no_winner(rows: Sequence[Row], rank_by: str) -> str:
    """Nothing ended well, or what did has no such number: then, which numbers there are."""
    if "ok" not in counts(rows):
        return "No point has ended well yet."
    there = ", ".join(numbers(rows)) or "none"
    return (
        f"No point that ended well has a number called {rank_by}, so there is no winner. Numbers to rank by: {there}."
    )


def numbers(rows: Sequence[Row]) -> list[str]:
    """Columns by which points that ended well can be ranked."""
    return sorted({key for row in rows for key in row if charts.known(row, key)})


def _equivalence(found: dict[str, dict[str, str]]) -> list[Item]:
    if not found:
        return []
    engines = list(dict.fromkeys(e for row in found.values() for e in row))
    return [Table(("strategy", *engines), [(name, *(row.get(e, "") for e in engines)) for name, row in found.items()])]


def _table(sweep: SweepConfig, rows: Sequence[Row], ranked: Sequence[Row], rank_by: str) -> Table:
    columns = shown_columns(sweep, rows, rank_by)
    order = [*ranked, *(r for r in rows if r not in ranked)]
    return Table(
        [c.title for c in columns],
        [cells(row, columns) for row in order],
        right=[i for i, c in enumerate(columns) if c.right],
        strong=[0] if ranked else [],
        whole=[0],
        caption="Best first, then what did not end well. Spread: 90th minus 10th percentile of the step times, over their median.",
    )
