"""How is a sweep shown in a terminal? Before it runs: points, expectations, cost. Afterwards: one table, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.cli.output import console, print_json, table
from windlass.figures.sweep import cells, counts, no_winner, shown_columns
from windlass.units import print_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from windlass.config.sweep import LoadedSweep
    from windlass.launch.sweep.expect import Expectation, Total
    from windlass.launch.sweep.local import Work
    from windlass.launch.sweep.points import Point


def show_dry(
    loaded: LoadedSweep, points: Sequence[Point], expected: Sequence[Expectation], total: Total, as_json: bool
) -> None:
    """The points, what is expected of each, and what all of them cost."""
    if as_json:
        print_json(_dry_json(loaded, points, expected, total))
        return
    out, title = console(), f"{loaded.sweep.title or loaded.sweep.name}: {len(points)} point{'s' * (len(points) != 1)}"
    if loaded.sweep.command is not None:
        _show_commands(out, title, points)
        return
    columns = ("point", "expected", "GiB", "oom", "tokens/s/device", "MFU", "time", "node-h", "kWh")
    rows = [(p.name, *_expected_cells(e)) for p, e in zip(points, expected, strict=True)]
    out.print(table(title, columns, rows, right=(2, 3, 4, 5, 6, 7, 8)))
    _print_equivalence(out, loaded.sweep.equivalence)
    for line in _total_lines(total, loaded.sweep.skip_oom):
        out.print(line)


def _dry_json(
    loaded: LoadedSweep, points: Sequence[Point], expected: Sequence[Expectation], total: Total
) -> dict[str, Any]:
    rows = [
        {"point": p.name, "values": dict(p.values), "devices": p.devices, "problem": p.problem, "expected": e.as_dict()}
        for p, e in zip(points, expected, strict=True)
    ]  # fmt: skip
    sweep = loaded.sweep
    return {"sweep": sweep.name, "points": rows, "total": total.as_dict(), "equivalence": sweep.equivalence}


def _show_commands(out: Console, title: str, points: Sequence[Point]) -> None:
    out.print(title, style="bold", markup=False)
    widest = max(len(p.name) for p in points)
    for point in points:  # no table: a folded command cannot be copied
        out.print(f"{point.name:{widest}}  {point.shown_command()}", markup=False, soft_wrap=True)
    out.print("what they take is unknown: the planner knows recipes only")


def _expected_cells(e: Expectation) -> tuple[str, ...]:
    if e.verdict in ("illegal", "unknown"):
        return (f"{e.verdict}: {e.reason}", "", "", "", "", "", "", "")
    word = "skip: out of memory" if e.skip else "out of memory" if e.verdict == "oom" else "fits"
    gib = "" if e.memory_bytes is None else f"{e.memory_bytes / 2**30:.1f}"
    chance = "" if e.oom_chance is None else f"{e.oom_chance:.0%}"
    if e.skip:
        return (word, gib, chance, "", "", "", "", "")
    return (
        word, gib, chance, "unknown" if e.tokens_per_second_per_device is None else f"{e.tokens_per_second_per_device:,.0f}", "unknown" if e.mfu is None else f"{e.mfu:.1%}", print_seconds(e.seconds),
        "unknown" if e.node_hours is None else f"{e.node_hours:.2f}", "unknown" if e.kwh is None else f"{e.kwh:.3g}",
    )  # fmt: skip


def _total_lines(total: Total, limit: float) -> list[str]:
    def known(value: float | None) -> str:
        return "unknown" if value is None else f"{value:,.3g}"

    lines = [
        f"{total.run} of {total.points} points would run, {total.skipped} are skipped as out of memory (at least {limit:.0%} sure), {total.illegal} cannot be"
    ]
    if total.node_hours is not None:
        units = (
            f", {total.units:,.0f} {total.unit}s" if total.units is not None and total.unit not in ("", "hour") else ""
        )
        lines.append(
            f"together {total.node_hours:,.1f} node-hours{units}, {known(total.kwh)} kWh; one after another {print_seconds(total.seconds)}"
        )
    lines.append(
        "oom: chance that the point runs out of memory, from how far the estimate was off on 129 published runs."
    )
    return lines


def _print_equivalence(out: Console, found: dict[str, dict[str, str]]) -> None:
    if not found:
        return
    engines = list(dict.fromkeys(e for row in found.values() for e in row))
    rows = [(name, *(row.get(e, "") for e in engines)) for name, row in found.items()]
    out.print(table("Which strategy exists in which engine", ("strategy", *engines), rows))


def print_rows(
    out: Console, work: Work, rows: Sequence[dict[str, Any]], ranked: Sequence[dict[str, Any]], key: str
) -> None:
    """Best first, then what did not end well; and why there is no best."""
    rest = [r for r in rows if r not in ranked]
    columns = shown_columns(work.sweep, rows, key)
    body = [cells(row, columns) for row in (*ranked, *rest)]
    listed = ", ".join(f"{n} {word}" for word, n in counts(rows).items())
    right = [i for i, c in enumerate(columns) if c.right]
    out.print(table(f"{work.sweep.title or work.sweep.name}: {listed}", [c.title for c in columns], body, right=right))
    if work.sweep.command is None and counts(rows).get("ok") and all(r.get("joules_per_token") is None for r in rows):
        out.print("energy: not measured on any point")
    if not ranked and counts(rows).get("ok"):
        out.print(no_winner(rows, key), markup=False)
