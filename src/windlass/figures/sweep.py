"""What does a sweep look like? Heat map with its failures, best-run bars, speed against energy, scaling with efficiency, prediction against measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass.config.sweep import SweepConfig
from windlass.figures.model import Chart, Heat, Item, Note, bars, line, points

Row = dict[str, Any]
MARKS = {"oom": "OOM", "skipped": "OOM?", "error": "failed", "timeout": "timeout", "node-failure": "node failed", "pre-empted": "pre-empted"}  # fmt: skip
"""What a cell without a number says."""
NAMES = {
    "tokens_per_second": "tokens/s", "tokens_per_second_per_device": "tokens/s per device", "mfu": "MFU", "joules_per_token": "J per token",
    "kwh_per_step": "kWh per step", "step_seconds": "s per step", "memory_bytes": "peak memory",
}  # fmt: skip


def known(row: Row, key: str) -> bool:
    value = row.get(key)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return row.get("outcome") == "ok" and number


def word_of(value: Any) -> str:
    """A value of an axis as the sweep file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def title_of(key: str) -> str:
    return NAMES.get(key, key)


def number(value: float) -> str:
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def axis_order(rows: Sequence[Row], axis: str) -> list[Any]:
    """Values of an axis: numbers by size, words in the order of the sweep."""
    found = list(dict.fromkeys(row[axis] for row in rows if row.get(axis) is not None))
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in found)
    return sorted(found) if numeric else found


def heat_axes(sweep: SweepConfig, rows: Sequence[Row], axes: Sequence[str]) -> list[str]:
    """Down and across: as the sweep says, else the two axes with most values."""
    if len(sweep.heat) == 2:
        return list(sweep.heat)
    counts = {axis: len(axis_order(rows, axis)) for axis in axes}
    ranked = sorted((a for a in axes if counts[a] > 1), key=lambda a: -counts[a])
    return (list(dict.fromkeys([*sweep.heat, *ranked])))[:2]


def heat_maps(sweep: SweepConfig, rows: Sequence[Row], axes: Sequence[str], key: str) -> list[Item]:
    """One map per value of a third axis with few values (the engine, say); a cell shows the best of the points it holds."""
    pair = heat_axes(sweep, rows, axes)
    if len(pair) < 2:
        return [Note("A heat map needs two axes with more than one value.")]
    in_map = [r for r in rows if r.get(pair[0]) is not None and r.get(pair[1]) is not None]
    third = [a for a in axes if a not in pair and 1 < len(axis_order(in_map, a)) <= 4]
    if not third:
        return [_heat(sweep, in_map, pair, key, "")]
    first = third[0]
    maps = [
        _heat(sweep, [r for r in in_map if r.get(first) == value], pair, key, f", {_short(first)} = {word_of(value)}")
        for value in axis_order(in_map, first)
    ]
    seen = [v for heat in maps for row in heat.values for v in row if v is not None]
    # One scale for all: the same colour is the same speed in both engines.
    return [replace(heat, scale=(min(seen), max(seen)) if seen else None) for heat in maps]


def _heat(sweep: SweepConfig, rows: Sequence[Row], pair: Sequence[str], key: str, extra: str) -> Heat:
    down, across = pair
    ys, xs = axis_order(rows, down), axis_order(rows, across)
    values, labels = [], []
    for y in ys:
        cells = [_cell([r for r in rows if r[down] == y and r[across] == x], key, sweep.goal) for x in xs]
        values.append(tuple(v for v, _ in cells))
        labels.append(tuple(text for _, text in cells))
    return Heat(
        title=f"{title_of(key)} by {_short(down)} and {_short(across)}{extra}", x=tuple(f"{_short(across)} {word_of(x)}" for x in xs), y=tuple(word_of(y) for y in ys),
        values=tuple(values), labels=tuple(labels), x_title=_short(across), y_title=_short(down),
        caption="The best point of each cell. OOM: it ran out of memory; OOM?: not run, because the planner was sure that it would; an empty cell was not asked for.",
        height=120 + 62 * max(2, len(ys)),
    )  # fmt: skip


def _short(axis: str) -> str:
    return axis.rsplit(".", 1)[-1].replace("_", "-")


def _cell(rows: Sequence[Row], key: str, goal: str) -> tuple[float | None, str]:
    good = [float(r[key]) for r in rows if known(r, key)]
    if good:
        best = max(good) if goal == "max" else min(good)
        return best, number(best)
    words = [MARKS.get(str(r["outcome"]), "") if r.get("outcome") else "not run" for r in rows]
    return None, words[0] if words else ""


def best_bars(rows: Sequence[Row], axis: str | None) -> list[Item]:
    """The best run of each strategy: throughput, MFU and energy, as in the GPT-NL slides."""
    if axis is None:
        return []
    by_engine = len({r.get("engine") for r in rows if r.get("engine")}) > 1
    groups = axis_order(rows, "engine") if by_engine else [None]
    charts: list[Item] = []
    # Per step as on the slides; per token where steps are of different size, or the larger batch would look wasteful.
    sizes = {r.get("batch_tokens") for r in rows if known(r, "kwh_per_step")}
    energy = "kwh_per_step" if len(sizes) <= 1 else "joules_per_token"
    for key, better in (("tokens_per_second_per_device", max), ("mfu", max), (energy, min)):
        if not any(known(r, key) for r in rows):
            charts.append(Note(f"{title_of(key)}: not measured on any point."))
            continue
        series = []
        scale, unit = _unit(rows, key)
        for engine in groups:
            mine = [r for r in rows if engine is None or r.get("engine") == engine]
            names = axis_order(mine, axis)
            best = [_best_of([r for r in mine if r.get(axis) == n], key, better) for n in names]
            series.append(bars(str(engine or title_of(key)), [word_of(n) for n in names], [None if b is None else scale * float(b[key]) for b in best], hover=[_hover(b, key) for b in best]))  # fmt: skip
        charts.append(
            Chart(title=f"Best run: {unit}", x_title=_short(axis), y_title=unit, series=tuple(series), from_zero=True, height=340)
        )  # fmt: skip
    return charts


def _unit(rows: Sequence[Row], key: str) -> tuple[float, str]:
    """A step of a small model takes joules, of a large one kilowatt-hours."""
    if key != "kwh_per_step":
        return 1.0, title_of(key)
    most = max(float(r[key]) for r in rows if known(r, key))
    return next(
        (scale, f"{name} per step")
        for least, scale, name in ((1.0, 1.0, "kWh"), (1e-3, 1e3, "Wh"), (0.0, 3.6e6, "J"))
        if most >= least
    )


def _best_of(rows: Sequence[Row], key: str, better: Any) -> Row | None:
    """The run that is fastest; what it reached is shown in every chart, so that the bars speak of the same runs."""
    good = [r for r in rows if known(r, "tokens_per_second_per_device") and known(r, key)]
    if good:
        return max(good, key=lambda r: float(r["tokens_per_second_per_device"]))
    good = [r for r in rows if known(r, key)]
    return better(good, key=lambda r: float(r[key])) if good else None


def _hover(row: Row | None, key: str) -> str:
    if row is None:
        return "none ended well"
    scale, unit = _unit([row], key)
    return f"{row['point']}: {number(scale * float(row[key]))} {unit}"


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """Points that no other beats in both speed and energy."""
    good = [r for r in rows if known(r, "tokens_per_second") and known(r, "joules_per_token")]
    return [r for r in good if not any(_beats(o, r) for o in good)]


def _beats(one: Row, other: Row) -> bool:
    faster = float(one["tokens_per_second"]) - float(other["tokens_per_second"])
    cheaper = float(other["joules_per_token"]) - float(one["joules_per_token"])
    return faster >= 0 and cheaper >= 0 and (faster > 0 or cheaper > 0)


def pareto(rows: Sequence[Row]) -> Item:
    front = pareto_front(rows)
    if not front:
        return Note(
            "Energy was not measured on this machine (no readable sensor), so there is no front of speed against energy."
        )
    good = [r for r in rows if known(r, "tokens_per_second") and known(r, "joules_per_token") and r not in front]
    front = sorted(front, key=lambda r: float(r["tokens_per_second"]))
    series = [line("front", [r["tokens_per_second"] for r in front], [r["joules_per_token"] for r in front], hover=[r["point"] for r in front])]  # fmt: skip
    for name, group in (("no other is better in both", front), ("others", good)):
        if group:
            series.append(points(name, [r["tokens_per_second"] for r in group], [r["joules_per_token"] for r in group], hover=[r["point"] for r in group]))  # fmt: skip
    return Chart(
        title="Energy per token against speed", x_title="tokens/s", y_title="J per token", series=tuple(series), caption="Down and to the right is better."
    )  # fmt: skip


def scaling(rows: Sequence[Row], kind: str) -> list[Item]:
    """Tokens/s over devices with the perfect line, and the efficiency; a curve per engine, by the best point at each count."""
    if kind == "none":
        return []
    usable = [r for r in rows if known(r, "tokens_per_second") and isinstance(r.get("devices"), int)]
    alike, about = _comparable(usable, kind)
    engines = list(dict.fromkeys(r.get("engine") for r in alike))
    curves = {str(e or "measured"): _best_by_count([r for r in alike if r.get("engine") == e]) for e in engines}
    curves = {"measured" if len(curves) == 1 else e: best for e, best in curves.items() if len(best) > 1}
    if not curves:
        return []
    speed = tuple(line(name, list(best), _speeds(best), hover=[f"{r['point']}: {number(r['tokens_per_second'])} tokens/s" for r in best.values()]) for name, best in curves.items())  # fmt: skip
    share = tuple(line(name, list(best), efficiency(best)) for name, best in curves.items())
    word = "Strong" if kind == "strong" else "Weak"
    return [
        Chart(title=f"{word} scaling", x_title="devices", y_title="tokens/s", from_zero=True, series=(*speed, _perfect(curves)),
              caption=f"The best point at each number of devices; {about}. Perfect: the fastest of the fewest devices, times the devices."),
        Chart(title="Parallel efficiency", x_title="devices", y_title="share of perfect", from_zero=True,
              series=(*share, line("perfect", _ends(curves), [1.0, 1.0], dashed=True)), caption=_efficiency_words(curves)),
    ]  # fmt: skip


def _comparable(rows: Sequence[Row], kind: str) -> tuple[list[Row], str]:
    """Points of one batch (strong) or of one batch per device (weak): the one that most numbers of devices have, and its words."""

    def of(row: Row) -> float | None:
        batch = row.get("batch_tokens")
        return batch if batch is None or kind == "strong" else batch / row["devices"]

    def counts(size: float | None) -> int:
        return len({r["devices"] for r in rows if of(r) == size})

    sizes = sorted({size for r in rows if (size := of(r)) is not None})
    plain = "the same batch for all" if kind == "strong" else "the batch grows with the devices"
    if not sizes:
        return list(rows), plain
    size = max(sizes, key=lambda v: (counts(v), v))
    return [r for r in rows if of(r) == size], f"{plain}, {size:,.0f} tokens" + (" a device" if kind == "weak" else "")


def _best_by_count(rows: Sequence[Row]) -> dict[int, Row]:
    best: dict[int, Row] = {}
    for row in rows:
        if _better(row, best.get(row["devices"])):
            best[row["devices"]] = row
    return dict(sorted(best.items()))


def _speeds(best: dict[int, Row]) -> list[float]:
    return [float(row["tokens_per_second"]) for row in best.values()]


def efficiency(best: dict[int, Row]) -> list[float]:
    """Share of the speed per device that the fewest devices have."""
    per_device = [s / n for n, s in zip(best, _speeds(best), strict=True)]
    return [p / per_device[0] for p in per_device]


def _ends(curves: dict[str, dict[int, Row]]) -> list[int]:
    counts = [n for best in curves.values() for n in best]
    return [min(counts), max(counts)]


def _perfect(curves: dict[str, dict[int, Row]]) -> Any:
    ends = _ends(curves)
    each = max(_speeds(best)[0] / n for best in curves.values() if (n := next(iter(best))) == ends[0])
    return line("perfect scaling", ends, [each * n for n in ends], dashed=True)


def _efficiency_words(curves: dict[str, dict[int, Row]]) -> str:
    def words(best: dict[int, Row]) -> str:
        return ", ".join(f"{n} device{'s' * (n > 1)}: {e:.0%}" for n, e in zip(best, efficiency(best), strict=True))

    return "; ".join(words(best) if len(curves) == 1 else f"{name}: {words(best)}" for name, best in curves.items())


def _better(row: Row, other: Row | None) -> bool:
    return other is None or float(row["tokens_per_second"]) > float(other["tokens_per_second"])


def predicted_against_measured(rows: Sequence[Row]) -> list[Item]:
    """On the diagonal the planner was right."""
    charts: list[Item] = []
    for predicted, seen, unit, scale in (
        ("predicted_tokens_per_second_per_device", "tokens_per_second_per_device", "tokens/s per device", 1.0),
        ("predicted_memory_bytes", "memory_bytes", "GiB", 2**30),
    ):
        good = [r for r in rows if known(r, predicted) and known(r, seen)]
        if len(good) < 2:
            continue
        x, y = [r[predicted] / scale for r in good], [r[seen] / scale for r in good]
        ends = [min(*x, *y), max(*x, *y)]
        charts.append(
            Chart(
                title=f"Predicted against measured: {unit}", x_title=f"predicted, {unit}", y_title=f"measured, {unit}", height=380,
                series=(points("points", x, y, hover=[r["point"] for r in good]), line("as predicted", ends, ends, dashed=True)),
                caption=f"Median error {_median_error(x, y):.0%} over {len(good)} points.",
            )
        )  # fmt: skip
    return charts


def _median_error(predicted: Sequence[float], seen: Sequence[float]) -> float:
    from statistics import median

    return median(abs(p / s - 1) for p, s in zip(predicted, seen, strict=True) if s)
