"""Sweeps in a terminal: points, predictions and cost before they run; one table, best first, afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.cli.output import show, table, text_of
from windlass.figures.sweep import counts, equivalence_table, no_winner, points_table
from windlass.units import print_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from windlass.config.sweep import LoadedSweep
    from windlass.launch.sweep.expect import Expectation, SweepTotal
    from windlass.launch.sweep.folder import SweepRun
    from windlass.launch.sweep.points import SweepPoint


def show_dry(
    loaded: LoadedSweep,
    points: Sequence[SweepPoint],
    expected: Sequence[Expectation],
    total: SweepTotal,
    as_json: bool,
) -> None:
    """The points, the predictions for each, and what all of them cost."""
    sweep, pairs = loaded.sweep, list(zip(points, expected, strict=True))
    title = f"{sweep.title or sweep.name}: {len(points)} point{'s' * (len(points) != 1)}"
    rows = [
        {"point": p.name, "values": dict(p.values), "devices": p.devices, "problem": p.problem, "expected": e}
        for p, e in pairs
    ]
    document = {"sweep": sweep.name, "points": rows, "total": total, "equivalence": sweep.equivalence}
    if sweep.command is not None:
        width = max(len(p.name) for p in points)
        # Not a table: a folded command cannot be copied.
        commands = [f"{point.name:{width}}  {point.shown_command()}" for point in points]
        show(as_json, document, title, *commands, "cost unknown: the planner predicts recipes only")
        return
    columns = ("point", "prediction", "GiB", "oom", "tokens/s/device", "MFU", "time", "node-h", "kWh")
    names, sums = equivalence_table(sweep), None
    if total.node_hours is not None:
        charged = total.units is not None and total.unit not in ("", "hour")
        units = f", {total.units:,.0f} {total.unit}s" if charged else ""
        kwh = "unknown" if total.kwh is None else f"{total.kwh:,.3g}"
        sums = f"total {total.node_hours:,.1f} node-hours{units}, {kwh} kWh; one after another "
        sums += print_seconds(total.seconds)
    skipped = f"{total.skipped} are skipped as out of memory (at least {sweep.skip_oom:.0%} sure)"
    engines_title = "Names of the strategies in each engine"
    show(
        as_json,
        document,
        table(title, columns, [(p.name, *_predicted_cells(e)) for p, e in pairs], right=(2, 3, 4, 5, 6, 7, 8)),
        table(engines_title, names.columns, names.rows) if names.rows else None,
        f"{total.run} of {total.points} points would run, {skipped}, {total.illegal} are invalid",
        sums,
        "oom: chance that the point runs out of memory, from the errors of the estimate on 129 published runs.",
    )


def _predicted_cells(e: Expectation) -> tuple[str, ...]:
    if e.verdict in ("illegal", "unknown"):
        verdict = "invalid" if e.verdict == "illegal" else e.verdict
        return (f"{verdict}: {e.reason}", *[""] * 7)
    text = "skip: out of memory" if e.skip else "out of memory" if e.verdict == "oom" else "fits"
    gib = "" if e.memory_bytes is None else f"{e.memory_bytes / 2**30:.1f}"
    chance = "" if e.oom_chance is None else f"{e.oom_chance:.0%}"
    if e.skip:
        return (text, gib, chance, *[""] * 5)
    return (
        text,
        gib,
        chance,
        text_of(e.tokens_per_second_per_device, ",.0f"),
        text_of(e.mfu, ".1%"),
        print_seconds(e.seconds),
        text_of(e.node_hours, ".2f"),
        text_of(e.kwh, ".3g"),
    )


def print_rows(
    out: Console, sweep_run: SweepRun, rows: Sequence[dict[str, Any]], ranked: Sequence[dict[str, Any]], key: str
) -> None:
    """Best first, then what did not succeed; and why there is no winner."""
    sweep, total = sweep_run.sweep, counts(rows)
    content = points_table(sweep, rows, ranked, key)
    listed = ", ".join(f"{count} {outcome}" for outcome, count in total.items())
    out.print(table(f"{sweep.title or sweep.name}: {listed}", content.columns, content.rows, right=content.right))
    if sweep.command is None and total.get("ok") and all(row.get("joules_per_token") is None for row in rows):
        out.print("energy: not measured on any point")
    if not ranked and total.get("ok"):
        out.print(no_winner(rows, key), markup=False)
