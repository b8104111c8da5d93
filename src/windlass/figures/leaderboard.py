"""The leaderboard of a sweep: one row per model and data set, and a page that ranks the models. No torch."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from windlass.config.sweep import LeaderboardConfig
from windlass.config.tune import lower_is_better
from windlass.figures.charts import Chart, DataTable, Item, Note, Section, bars
from windlass.units import print_joules, print_seconds

Row = Mapping[str, Any]
COLUMNS = ("metric", "score", "spread", "seeds", "point", "seconds", "energy_joules", "texts_per_second")


def leaderboard(config: LeaderboardConfig, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The point of each model and data set that was best on the validation examples, never by the score that is shown.
    Numbers that a point does not have are None."""
    points: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        points.setdefault((str(row.get(config.rows)), str(row.get(config.columns))), [])
        if row.get("outcome") == "ok" and row.get(config.score) is not None:
            points[str(row[config.rows]), str(row[config.columns])].append(row)
    entries = []
    for (model, data_set), group in points.items():
        sign = -1 if group and lower_is_better(str(group[0].get("metric"))) else 1
        chosen = max(group, key=lambda row: sign * float(row.get(config.choose) or 0), default={})
        entry = {config.rows: model, config.columns: data_set, **{key: chosen.get(key) for key in COLUMNS}}
        entries.append(entry | {"score": chosen.get(config.score), "points": len(group)})
    return entries


def ranking(config: LeaderboardConfig, entries: Sequence[Row]) -> list[tuple[str, float | None]]:
    """Models by their mean over all data sets; None, and last, where a score is missing."""
    scores: dict[str, list[float | None]] = {}
    for entry in entries:
        scores.setdefault(entry[config.rows], []).append(entry["score"])
    means = [(name, fmean(v for v in s if v is not None) if None not in s else None) for name, s in scores.items()]
    return sorted(means, key=lambda pair: -pair[1] if pair[1] is not None else float("inf"))


def leaderboard_sections(config: LeaderboardConfig, entries: Sequence[Row]) -> list[Section]:
    ranked = ranking(config, entries)
    cells = {(entry[config.rows], entry[config.columns]): entry for entry in entries}
    data_sets = list(dict.fromkeys(entry[config.columns] for entry in entries))
    table = [
        [str(place), name, *(score_text(cells.get((name, d), {})) for d in data_sets), text(mean, "{:.4f}")]
        for place, (name, mean) in enumerate(ranked, 1)
    ]
    metrics = {entry[config.columns]: entry["metric"] for entry in entries if entry["metric"] is not None}
    header = ["", config.rows, *(f"{d} ({metrics[d]})" if d in metrics else d for d in data_sets), "mean"]
    models = [name for name, _ in ranked]
    series = [bars(name, data_sets, [cells.get((name, d), {}).get("score") for d in data_sets]) for name in models]
    chart = Chart(title="Score", x_title=config.columns, y_title="score", series=series, from_zero=True)
    caption = (
        "Mean and standard deviation over seeds. If there are several points, the one that was best on "
        "validation examples is shown."
    )
    items: list[Item] = [DataTable(header, table, right=range(2, len(header)), strong=[0], caption=caption), chart]
    details = entry_table(config, entries)
    missing = sum(entry["score"] is None for entry in entries)
    if missing:
        items.insert(0, Note(f"{missing} of {len(entries)} rows have no score yet.", "warning"))
    return [Section("Leaderboard", tuple(items), id="leaderboard"), Section("Time and energy", (details,), id="cost")]


def entry_table(config: LeaderboardConfig, entries: Sequence[Row]) -> DataTable:
    """One line per model and data set."""
    lines = [
        [
            entry[config.rows],
            entry[config.columns],
            entry["metric"] or "",
            score_text(entry),
            text(entry["seeds"], "{}"),
            text(entry["texts_per_second"], "{:,.0f}"),
            text(entry["seconds"], print_seconds),
            text(entry["energy_joules"], print_joules),
            entry["point"] or "",
        ]
        for entry in entries
    ]
    header = [config.rows, config.columns, "metric", "score", "seeds", "texts/s", "time", "energy", "point"]
    return DataTable(header, lines, right=[3, 4, 5, 6, 7])


def score_text(entry: Row) -> str:
    score, spread = entry.get("score"), entry.get("spread")
    return "not run" if score is None else f"{score:.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def text(value: Any, show: Any) -> str:
    if value is None:
        return "not measured"
    return str(show.format(value) if isinstance(show, str) else show(value))
