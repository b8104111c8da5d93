"""What do runs show together that no sweep asked for? Heat map over the two keys that vary most, scaling over devices, speed against energy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.config.load import flatten
from windlass.figures import Chart, DataTable, Heat, Item, Note, Section, line, points
from windlass.report.collect import RunSummary
from windlass.report.words import energy_card, percent, rate, state
from windlass.units import print_bytes

QUIET = ("name", "notes", "seed", "launch", "trackers", "profile", "save", "energy")
"""Tables that do not change how fast a step is."""


def compared(runs: Sequence[RunSummary], root: Path) -> list[Section]:
    done = [r for r in runs if r.tokens_per_second is not None]
    if len(done) < 2:
        return [Section("", (Note(f"{len(done)} run with a measured speed in {root.name}: a comparison needs two."),))]
    keys = varying(done)
    return [
        Section("Heat map", (_heat(done, keys),), id="heat"),
        Section("Scaling", tuple(_scaling(done)), id="scaling"),
        Section("Speed against energy", (_pareto(done),), id="pareto"),
        Section("All runs", (_table(runs, keys),), id="table"),
    ]


def varying(runs: Sequence[RunSummary]) -> list[str]:
    """Recipe keys with more than one value over the runs, those with most values first."""
    seen: dict[str, set[str]] = {}
    for run in runs:
        for key, value in flatten(run.recipe):
            if key.split(".")[0] not in QUIET:
                seen.setdefault(key, set()).add(str(value))
        seen.setdefault("devices", set()).add(str(run.world_size))
    return sorted((k for k, v in seen.items() if len(v) > 1), key=lambda k: (-len(seen[k]), k))


def value_of(run: RunSummary, key: str) -> str:
    return str(run.world_size) if key == "devices" else str(dict(flatten(run.recipe)).get(key))


def _order(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def _heat(runs: Sequence[RunSummary], keys: Sequence[str]) -> Item:
    if not keys:
        return Note("These runs have one and the same recipe.")
    across, down = keys[0], keys[1] if len(keys) > 1 else None
    xs = sorted({value_of(r, across) for r in runs}, key=_order)
    ys = sorted({value_of(r, down) for r in runs}, key=_order) if down else ["all"]
    best: dict[tuple[str, str], float] = {}
    for run in runs:
        place = (value_of(run, across), value_of(run, down) if down else "all")
        best[place] = max(best.get(place, 0.0), run.tokens_per_second or 0.0)
    values = tuple(tuple(best.get((x, y)) for x in xs) for y in ys)
    labels = tuple(tuple("" if v is None else rate(v).removesuffix(" tokens/s") for v in row) for row in values)
    return Heat(
        title=f"Tokens per second by {across}" + (f" and {down}" if down else ""), x=tuple(xs), y=tuple(ys), values=values, labels=labels,
        x_title=across, y_title=down or "", unit="tokens/s", height=180 + 48 * len(ys), caption="The best run of each cell; an empty cell was not run or has no speed yet.",
    )  # fmt: skip


def _scaling(runs: Sequence[RunSummary]) -> list[Item]:
    groups: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.world_size:
            mine = groups.setdefault(run.model, {})
            mine[run.world_size] = max(mine.get(run.world_size, 0.0), run.tokens_per_second or 0.0)
    series = []
    for model, found in groups.items():
        if len(found) > 1:
            xs = sorted(found)
            series.append(line(model, xs, [found[x] for x in xs]))
            series.append(line("perfect", xs, [found[xs[0]] * x / xs[0] for x in xs], dashed=True, colour=7))
    if not series:
        return [Note("All runs of a model used the same number of devices.")]
    return [
        Chart(
            title="Best speed by devices",
            series=tuple(series),
            x_title="devices",
            y_title="tokens/s",
            from_zero=True,
        )
    ]


def _pareto(runs: Sequence[RunSummary]) -> Item:
    known: list[tuple[RunSummary, float, float]] = [
        (r, r.tokens_per_second, r.energy.joules_per_token)
        for r in runs
        if r.tokens_per_second is not None and r.energy.joules_per_token is not None and r.energy.basis == "measured"
    ]
    if not known:
        return Note("No run has measured energy, so there is no front of speed against energy.")
    front = [
        k for k in known if not any((o[1] >= k[1] and o[2] < k[2]) or (o[1] > k[1] and o[2] <= k[2]) for o in known)
    ]
    rest = [k for k in known if k not in front]
    return Chart(
        title="Joules per token against tokens per second", x_title="tokens/s", y_title="J per token",
        series=tuple(points(name, [k[1] for k in group], [k[2] for k in group], hover=[k[0].name for k in group])
                     for name, group in (("best of their kind", front), ("others", rest)) if group),
        caption="Down and to the right is better.",
    )  # fmt: skip


def _table(runs: Sequence[RunSummary], keys: Sequence[str]) -> DataTable:
    shown = list(keys[:4])
    ranked = sorted(runs, key=lambda r: -(r.tokens_per_second or 0.0))
    rows: list[Sequence[Any]] = [
        (
            r.name,
            state(r),
            *(value_of(r, k) for k in shown),
            rate(r.tokens_per_second),
            percent(r.mfu),
            print_bytes(r.memory_bytes),
            energy_card(r.energy)[0],
        )
        for r in ranked
    ]
    columns = ("run", "state", *shown, "speed", "MFU", "memory", "energy")
    return DataTable(columns, rows, right=tuple(range(2 + len(shown), len(columns))))
