"""The page of a sweep: winner, heat maps, best runs, scaling, speed and energy, prediction errors, and all points.

Everything is made from the sweep's rows (results.json), so that its own page, the report and the dashboard agree.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from windlass.config.sweep import SweepConfig, axes_of
from windlass.figures.charts import Card, Cards, Chart, DataTable, Heat, Item, Note, Section, bars, line, points
from windlass.units import print_bytes, print_joules, print_rate, print_seconds, print_share

Row = dict[str, Any]
SPEED, DEVICE_SPEED, ENERGY = "tokens_per_second", "tokens_per_second_per_device", "joules_per_token"
# Outcome -> label of a heat map's cell without a number.
CELL_LABELS = {
    "oom": "OOM", "skipped": "OOM?", "error": "failed", "timeout": "timeout", "node-failure": "node failed",
    "pre-empted": "pre-empted",
}  # fmt: skip
TITLES = {
    SPEED: "tokens/s", DEVICE_SPEED: "tokens/s per device", "mfu": "MFU", ENERGY: "J per token",
    "kwh_per_step": "kWh per step", "step_seconds": "s per step", "memory_bytes": "peak memory",
}  # fmt: skip


def known(row: Row, key: str) -> bool:
    """The point succeeded and has a finite number under this key."""
    value = row.get(key) if row.get("outcome") == "ok" else None
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def with_number(rows: Iterable[Row], *keys: str) -> list[Row]:
    return [row for row in rows if all(known(row, key) for key in keys)]


def title_of(key: str) -> str:
    return TITLES.get(key, key)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _value_text(value: Any) -> str:
    """A value of an axis as the sweep file writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _short(axis: str) -> str:
    return axis.rsplit(".", 1)[-1].replace("_", "-")


def axis_order(rows: Sequence[Row], axis: str) -> list[Any]:
    """Values of an axis: numbers by size, texts in the order of the sweep."""
    values = list(dict.fromkeys(row[axis] for row in rows if row.get(axis) is not None))
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    return sorted(values) if numeric else values


def heat_axes(rows: Sequence[Row], axes: Sequence[str], wanted: Sequence[str] = ()) -> list[str]:
    """Down and across: the wanted axes first, then those with most values."""
    counts = {axis: len(axis_order(rows, axis)) for axis in axes}
    ranked = sorted((a for a in axes if counts[a] > 1), key=lambda a: -counts[a])
    return list(wanted) if len(wanted) == 2 else list(dict.fromkeys([*wanted, *ranked]))[:2]


def heat_maps(
    rows: Sequence[Row], axes: Sequence[str], key: str, wanted: Sequence[str] = (), goal: str = "max"
) -> list[Item]:
    """One map per value of a third axis with few values (the engine, say); a cell shows the best of its points."""
    pair = heat_axes(rows, axes, wanted)
    if len(pair) < 2:
        return [Note("A heat map needs two axes with more than one value.")]
    in_map = [r for r in rows if r.get(pair[0]) is not None and r.get(pair[1]) is not None]
    third = next((a for a in axes if a not in pair and 1 < len(axis_order(in_map, a)) <= 4), None)
    if third is None:
        return [_heat(in_map, pair, key, goal)]
    maps = [
        _heat(
            [r for r in in_map if r.get(third) == value], pair, key, goal, f", {_short(third)} = {_value_text(value)}"
        )
        for value in axis_order(in_map, third)
    ]
    values = [v for heat in maps for row in heat.values for v in row if v is not None]
    # One scale for all: the same colour is the same speed in both engines.
    return [replace(heat, scale=(min(values), max(values)) if values else None) for heat in maps]


def _heat(rows: Sequence[Row], pair: Sequence[str], key: str, goal: str, title_end: str = "") -> Heat:
    down, across = pair
    ys, xs = axis_order(rows, down), axis_order(rows, across)

    def cell(y: Any, x: Any) -> tuple[float | None, str]:
        inside = [r for r in rows if r[down] == y and r[across] == x]
        if ranked := best_first(inside, key, goal):
            return float(ranked[0][key]), number(float(ranked[0][key]))
        labels = [CELL_LABELS.get(str(r["outcome"]), "") if r.get("outcome") else "not run" for r in inside]
        return None, labels[0] if labels else ""

    grid = [[cell(y, x) for x in xs] for y in ys]
    return Heat(
        title=f"{title_of(key)} by {_short(down)} and {_short(across)}{title_end}",
        x=[_value_text(x) for x in xs],
        y=[_value_text(y) for y in ys],
        values=tuple(tuple(value for value, _ in row) for row in grid),
        labels=tuple(tuple(label for _, label in row) for row in grid),
        x_title=_short(across),
        y_title=_short(down),
        caption="Best point of each cell. OOM: ran out of memory. OOM?: not run, because the planner was sure that it would run "
        "out of memory. An empty cell is not part of the sweep.",
        height=120 + 62 * max(2, len(ys)),
    )


def best_bars(rows: Sequence[Row], axis: str | None) -> list[Item]:
    """Throughput, MFU and energy of the fastest run of each strategy, so that all bars belong to the same runs."""
    if axis is None:
        return []
    engines = axis_order(rows, "engine")
    # Energy per step; per token where steps differ in size, or the larger batch would look wasteful.
    same_size = len({r.get("batch_tokens") for r in with_number(rows, "kwh_per_step")}) <= 1
    charts: list[Item] = []
    for key in (DEVICE_SPEED, "mfu", "kwh_per_step" if same_size else ENERGY):
        measured = with_number(rows, key)
        if not measured:
            charts.append(Note(f"{title_of(key)}: not measured on any point."))
            continue
        scale, unit = _unit(measured, key)
        series = []
        for engine in engines if len(engines) > 1 else [None]:
            own = [r for r in rows if engine is None or r.get("engine") == engine]
            names = axis_order(own, axis)
            values: list[float | None] = []
            hover = []
            for name in names:
                same = with_number((r for r in own if r.get(axis) == name), key)
                # Without speeds, the run with the best value.
                ranked = best_first(same, DEVICE_SPEED) or best_first(same, key, "max" if key == "mfu" else "min")
                values.append(scale * float(ranked[0][key]) if ranked else None)
                hover.append(
                    f"{ranked[0]['point']}: {number(scale * float(ranked[0][key]))} {unit}"
                    if ranked
                    else "no run succeeded"
                )
            series.append(bars(str(engine or title_of(key)), [_value_text(n) for n in names], values, hover=hover))
        title = f"Best run: {unit}"
        charts.append(Chart(title=title, x_title=_short(axis), y_title=unit, series=series, from_zero=True, height=340))
    return charts


def _unit(rows: Sequence[Row], key: str) -> tuple[float, str]:
    """(factor, unit): a step of a small model takes joules, of a large one kilowatt-hours."""
    if key != "kwh_per_step":
        return 1.0, title_of(key)
    largest = max(float(r[key]) for r in rows)
    units = ((1.0, 1.0, "kWh per step"), (1e-3, 1e3, "Wh per step"), (0.0, 3.6e6, "J per step"))
    return next((factor, name) for least, factor, name in units if largest >= least)


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """Points that no other beats in both speed and energy, slowest first."""
    values = {(r[SPEED], r[ENERGY]) for r in with_number(rows, SPEED, ENERGY)}
    front = {one for one in values if not any(v != one and v[0] >= one[0] and v[1] <= one[1] for v in values)}
    return sorted(
        (r for r in with_number(rows, SPEED, ENERGY) if (r[SPEED], r[ENERGY]) in front), key=lambda r: float(r[SPEED])
    )


def pareto(rows: Sequence[Row]) -> Item:
    front = pareto_front(rows)
    if not front:
        return Note("Energy was not measured (no readable sensor), so speed cannot be compared with energy.")
    others = [r for r in with_number(rows, SPEED, ENERGY) if r not in front]
    groups = ((line, "front", front), (points, "best trade-offs", front), (points, "others", others))
    return Chart(
        title="Energy per token vs. speed",
        x_title=title_of(SPEED),
        y_title=title_of(ENERGY),
        series=[
            draw(name, [r[SPEED] for r in group], [r[ENERGY] for r in group], hover=[r["point"] for r in group])
            for draw, name, group in groups
            if group
        ],
        caption="Down and to the right is better: less energy, more speed. No point beats a best trade-off in both.",
    )


def scaling(rows: Sequence[Row], kind: str) -> list[Item]:
    """Tokens/s over devices with the perfect line, and the efficiency; one curve per engine, best point per count."""
    if kind == "none":
        return []
    usable = [r for r in with_number(rows, SPEED) if isinstance(r.get("devices"), int)]
    comparable, description = _comparable(usable, kind)
    curves: dict[str, dict[int, Row]] = {str(r.get("engine") or "measured"): {} for r in comparable}
    for row in sorted(comparable, key=lambda r: (r["devices"], float(r[SPEED]))):  # the fastest of a count comes last
        curves[str(row.get("engine") or "measured")][row["devices"]] = row
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    if not curves:
        return []
    if len(curves) == 1:
        curves = {"measured": next(iter(curves.values()))}
    counts = [n for curve in curves.values() for n in curve]
    ends = [min(counts), max(counts)]
    best_start = max(float(curve[ends[0]][SPEED]) / ends[0] for curve in curves.values() if ends[0] in curve)
    speeds, shares, captions = [], [], []
    for name, curve in curves.items():
        hover = [f"{r['point']}: {number(r[SPEED])} tokens/s" for r in curve.values()]
        speeds.append(line(name, list(curve), [float(r[SPEED]) for r in curve.values()], hover=hover))
        per_device = [float(r[SPEED]) / n for n, r in curve.items()]
        efficiency = [speed / per_device[0] for speed in per_device]
        shares.append(line(name, list(curve), efficiency))
        text = ", ".join(
            f"{n} device{'s' * (n > 1)}: {print_share(e, digits=0)}" for n, e in zip(curve, efficiency, strict=True)
        )
        captions.append(text if len(curves) == 1 else f"{name}: {text}")
    speeds.append(line("perfect scaling", ends, [best_start * n for n in ends], dashed=True))
    shares.append(line("perfect", ends, [1.0, 1.0], dashed=True))
    return [
        Chart(
            title=f"{kind.capitalize()} scaling",
            x_title="devices",
            y_title=title_of(SPEED),
            from_zero=True,
            series=speeds,
            caption=f"Best point at each number of devices; {description}. Perfect: the fastest point on the fewest "
            "devices, multiplied by the number of devices.",
        ),
        Chart(
            title="Parallel efficiency",
            x_title="devices",
            y_title="share of perfect",
            from_zero=True,
            series=shares,
            caption="; ".join(captions),
        ),
    ]


def _comparable(rows: Sequence[Row], kind: str) -> tuple[list[Row], str]:
    """Points of one batch size (strong) or one per device (weak), the size that most device counts have; described."""
    rule = "the same batch for all" if kind == "strong" else "the batch grows with the devices"
    devices: dict[float, set[int]] = {}
    by_size: dict[float, list[Row]] = {}
    for row in (r for r in rows if r.get("batch_tokens") is not None):
        # A point that uses the nearest batch is compared with those that have the wanted one.
        size = (row.get("wanted_batch_tokens") or row["batch_tokens"]) / (1 if kind == "strong" else row["devices"])
        devices.setdefault(size, set()).add(row["devices"])
        by_size.setdefault(size, []).append(row)
    if not by_size:
        return list(rows), rule
    chosen = max(by_size, key=lambda size: (len(devices[size]), size))
    return by_size[chosen], f"{rule}, {chosen:,.0f} tokens{' a device' * (kind == 'weak')}"


def predicted_against_measured(rows: Sequence[Row]) -> list[Item]:
    charts: list[Item] = []
    for key, unit, scale in ((DEVICE_SPEED, "tokens/s per device", 1.0), ("memory_bytes", "GiB", 2**30)):
        both = with_number(rows, f"predicted_{key}", key)
        if len(both) < 2:
            continue
        x, y = [r[f"predicted_{key}"] / scale for r in both], [r[key] / scale for r in both]
        ends = [min(*x, *y), max(*x, *y)]
        error = median(abs(p / m - 1) for p, m in zip(x, y, strict=True) if m)
        drawn = points("points", x, y, hover=[r["point"] for r in both]), line("as predicted", ends, ends, dashed=True)
        charts.append(
            Chart(
                title=f"Predicted vs. measured: {unit}",
                x_title=f"predicted, {unit}",
                y_title=f"measured, {unit}",
                height=380,
                series=drawn,
                caption=f"Median error {print_share(error, digits=0)} over {len(both)} points.",
            )
        )
    return charts


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    # Shown for a point that succeeded without this number.
    missing: str = ""


POINT_COLUMNS = (
    Column("devices", "devices"),
    Column(SPEED, "tokens/s", lambda v: print_rate(v, unit="")),
    Column(DEVICE_SPEED, "tokens/s per device", lambda v: print_rate(v, unit="")),
    Column("mfu", "MFU", print_share, missing="unknown"),
    Column("memory_bytes", "memory", print_bytes),
    Column("predicted_memory_bytes", "predicted memory", print_bytes),
    Column(ENERGY, "J/token, steps only", "{:.3g}".format, missing="not measured"),
    Column("kwh_per_step", "energy per step", lambda v: print_joules(v * 3.6e6), missing="not measured"),
    Column("step_seconds", "step time", print_seconds),
    Column("step_spread", "spread", print_share),
)


def shown_columns(sweep: SweepConfig, rows: Sequence[Row], rank_by: str) -> list[Column]:
    """Point, outcome, every number that some point has, and the key of the ranking."""
    hidden: set[str] = set()
    if all(r.get("devices") == 1 for r in rows):  # tokens/s per device would repeat tokens/s
        hidden |= {"devices", DEVICE_SPEED}
    if len({r.get("batch_tokens") for r in rows}) > 1:  # energy of steps of different size does not compare
        hidden.add("kwh_per_step")
    own = {c.key for c in POINT_COLUMNS}
    further = [Column(k, k, lambda v: number(v) if isinstance(v, (int, float)) else str(v))
               for k in dict.fromkeys([rank_by, *sweep.metrics]) if k not in own]  # fmt: skip
    return [
        Column("point", "point", right=False),
        Column("outcome", "outcome", right=False),
        *(c for c in (*POINT_COLUMNS, *further) if c.key not in hidden and any(r.get(c.key) is not None for r in rows)),
        *([Column("detail", "reason", right=False)] if any(_reason(r) for r in rows) else []),
    ]


def _reason(row: Row) -> str | None:
    """Why a point failed; None where the outcome says it already ("oom" needs no "out of memory")."""
    detail, outcome = row.get("detail"), row.get("outcome")
    if not detail or outcome == "ok" or (outcome == "oom" and "out of memory" in str(detail).lower()):
        return None
    # The complete text is in results.csv.
    return str(detail) if len(str(detail)) <= 70 else str(detail)[:70].rsplit(" ", 1)[0] + " ..."


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """One row of the table. Only a point that succeeded can miss a number."""
    missing = {c.key: c.missing for c in columns} if row.get("outcome") == "ok" else {}
    values = {**row, "detail": _reason(row)}
    texts = {c.key: missing.get(c.key, "") if (v := values.get(c.key)) is None else c.show(v) for c in columns}
    return [texts[c.key] or ("not run" if c.key == "outcome" else "") for c in columns]


def best_first(rows: Sequence[Row], rank_by: str, goal: str = "max") -> list[Row]:
    return sorted(with_number(rows, rank_by), key=lambda r: -r[rank_by] if goal == "max" else r[rank_by])


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Outcome -> number of points; "not run" without one."""
    return dict(Counter(row.get("outcome") or "not run" for row in rows))


def points_table(sweep: SweepConfig, rows: Sequence[Row], ranked: Sequence[Row], rank_by: str) -> DataTable:
    columns = shown_columns(sweep, rows, rank_by)
    return DataTable(
        [c.title for c in columns],
        [cells(row, columns) for row in (*ranked, *(r for r in rows if r not in ranked))],
        right=[i for i, c in enumerate(columns) if c.right],
        strong=[0] if ranked else [],
        unbroken=[0],
        caption="Best first, then the points that did not succeed. "
        "Spread: 90th minus 10th percentile of the step times, divided by their median.",
    )


def equivalence_table(sweep: SweepConfig) -> DataTable:
    """The strategies and their names in each engine; without rows where the sweep names none."""
    engines = list(dict.fromkeys(engine for row in sweep.equivalence.values() for engine in row))
    rows = [(name, *(row.get(engine, "") for engine in engines)) for name, row in sweep.equivalence.items()]
    return DataTable(("strategy", *engines), rows)


def sweep_sections(
    sweep: SweepConfig, rows: Sequence[Row], rank_by: str, grid: Collection[str] | None = None
) -> list[Section]:
    """`grid`: names of the points of the matrix (None: all); other points are not shown in the maps."""
    # The axis `devices` is the column `devices_per_node`; tables of earlier versions do not have that column.
    renamed = {"devices": "devices_per_node"} if any(r.get("devices_per_node") is not None for r in rows) else {}
    axes, wanted = ([renamed.get(axis, axis) for axis in names] for names in (axes_of(sweep), sweep.heat))
    in_grid = [r for r in rows if grid is None or r["point"] in grid]
    ranked = best_first(rows, rank_by, sweep.goal)
    pair = heat_axes(rows, axes, wanted)
    is_training = sweep.command is None
    equivalence = equivalence_table(sweep)
    parts: list[tuple[str, str, Sequence[Item]]] = [
        ("", "winner", _head(sweep, rows, ranked, rank_by)),
        ("Heat map", "heat", heat_maps(in_grid, axes, rank_by, wanted, sweep.goal)),
        ("Best runs", "best", best_bars(in_grid, pair[0] if pair and is_training else None)),
        ("Scaling", "scaling", scaling(rows, sweep.scaling)),
        ("Speed vs. energy", "pareto", [pareto(rows)] if is_training else []),
        ("Predicted vs. measured", "predicted", predicted_against_measured(rows)),
        ("Strategies by engine", "equivalence", [equivalence] if equivalence.rows else []),
        ("All points", "points", [points_table(sweep, rows, ranked, rank_by)]),
    ]
    return [Section(title, tuple(items), id=key) for title, key, items in parts if items]


def _head(sweep: SweepConfig, rows: Sequence[Row], ranked: Sequence[Row], rank_by: str) -> list[Item]:
    outcomes = counts(rows)
    listed = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items())
    succeeded = Card(f"{outcomes.get('ok', 0)} of {len(rows)}", "points succeeded", listed)
    if not ranked:
        return [Cards([succeeded]), Note(no_winner(rows, rank_by), "warning")]
    best, last = ranked[0], ranked[-1]
    mfu, peak_bytes = best.get("mfu"), best.get("memory_bytes")
    ratio = best[rank_by] / last[rank_by] if len(ranked) > 1 and sweep.goal == "max" and last[rank_by] > 0 else None
    cards = (
        Card(number(float(best[rank_by])), f"best {title_of(rank_by)}", best["point"]),
        succeeded,
        Card(print_share(mfu), "MFU of the best point") if mfu is not None and rank_by != "mfu" else None,
        Card(print_bytes(peak_bytes), "peak memory of the best point") if peak_bytes is not None else None,
        Card(f"{ratio:.1f} x", "best compared with last", last["point"]) if ratio is not None else None,
    )
    return [Cards([card for card in cards if card])]


def no_winner(rows: Sequence[Row], rank_by: str) -> str:
    if "ok" not in counts(rows):
        return "No point has succeeded yet."
    names = ", ".join(numbers(rows)) or "none"
    return f"No point that succeeded has a number called {rank_by}, so there is no winner. Numbers to rank by: {names}."


def numbers(rows: Sequence[Row]) -> list[str]:
    """Keys by which the points that succeeded can be ranked."""
    return sorted({key for row in rows for key in row if known(row, key)})
