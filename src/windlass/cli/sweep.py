"""`windlass sweep SWEEP.toml`: a matrix of runs or of any command; out of memory and failure are results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from windlass.launch.sweep.expect import Expectation, Total
    from windlass.launch.sweep.local import Work
    from windlass.launch.sweep.points import Point


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file (TOML), or a dvc.yaml with a matrix stage.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the points and what is expected; run nothing.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Expect for this machine instead of the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Sweep folder; runs/<name> when left out.")] = None,
    only: Annotated[str | None, typer.Option(help="Repeat points by outcome: oom,fail,timeout,...")] = None,
    point: Annotated[list[str] | None, typer.Option("--point", help="Only this point (repeatable).")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run also what is expected to run out of memory.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Write table and page from what is there; run nothing.")] = False,
    pick: Annotated[Path | None, typer.Option(help="Write the winning recipe to this file.")] = None,
    rank_by: Annotated[str | None, typer.Option(help="Column to rank by, instead of the sweep file's.")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit as packed SLURM jobs (an array) instead of running here.")] = False,
    inside: Annotated[Path | None, typer.Option("--inside", hidden=True)] = None,
    to_dvc: Annotated[Path | None, typer.Option(help="Write an equivalent DVC matrix stage to this dvc.yaml.")] = None,
    stage: Annotated[str | None, typer.Option(help="With a dvc.yaml: which stage.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Run a matrix of recipes or of any command; classify, rank, draw, pick the winner. Restartable."""
    from windlass.launch.sweep.expect import expect_all
    from windlass.launch.sweep.points import make_points

    loaded = _load(file, stage)
    points = make_points(loaded)
    if to_dvc is not None:
        _write_dvc(loaded, points, to_dvc)
        return
    expected, total = expect_all(loaded.sweep, points, cluster)
    if dry_run:
        _show_dry(loaded, points, expected, total, as_json)
        return
    from windlass.launch.sweep.folder import open_sweep_folder
    from windlass.launch.sweep.local import Work

    folder = open_sweep_folder(run or Path("runs") / loaded.sweep.name, loaded, points)
    work = Work(loaded=loaded, folder=folder, points=points, expected=expected)
    if pick is not None:
        from windlass.launch.sweep.pick import check_pick

        check_pick(work, pick)
    if slurm:
        _submit(work, cluster, stage, only, point, everything, as_json)
        return
    if report:
        _settle(work)
    else:
        _run(work, only, point, everything, inside, quiet=as_json)
    if inside is None:
        _finish(work, rank_by, pick, as_json)


def _load(file: Path, stage: str | None) -> Any:
    from windlass.config.sweep import load_sweep

    if file.suffix in (".yaml", ".yml"):
        from windlass.launch.sweep.dvc import read_dvc

        return read_dvc(file, stage)
    return load_sweep(file)


def _write_dvc(loaded: Any, points: Sequence[Point], path: Path) -> None:
    from windlass.cli.output import console
    from windlass.launch.sweep.dvc import write_dvc

    write_dvc(loaded, points, path)
    console().print(f"wrote {path}: one matrix stage, {len(points)} points; `dvc repro` runs them")


def _show_dry(
    loaded: Any, points: Sequence[Point], expected: Sequence[Expectation], total: Total, as_json: bool
) -> None:
    from windlass.cli.output import console, print_json, table

    if as_json:
        rows = [
            {"point": p.name, "values": dict(p.values), "devices": p.devices, "problem": p.problem, "expected": e.as_dict()}
            for p, e in zip(points, expected, strict=True)
        ]  # fmt: skip
        print_json(
            {
                "sweep": loaded.sweep.name,
                "points": rows,
                "total": total.as_dict(),
                "equivalence": loaded.sweep.equivalence,
            }
        )
        return
    out = console()
    if loaded.sweep.command is not None:
        out.print(f"{loaded.sweep.title or loaded.sweep.name}: {len(points)} points", style="bold", markup=False)
        widest = max(len(p.name) for p in points)
        for point in points:  # no table: a folded command cannot be copied
            out.print(f"{point.name:{widest}}  {point.shown_command()}", markup=False, soft_wrap=True)
        out.print("what they take is unknown: the planner knows recipes only")
        return
    columns = ("point", "expected", "GiB", "oom", "tokens/s/device", "MFU", "time", "node-h", "kWh")
    rows2 = [(p.name, *_expected_cells(e)) for p, e in zip(points, expected, strict=True)]
    title = loaded.sweep.title or loaded.sweep.name
    out.print(table(f"{title}: {len(points)} points", columns, rows2, right=(2, 3, 4, 5, 6, 7, 8)))
    _print_equivalence(out, loaded.sweep.equivalence)
    for line in _total_lines(total, loaded.sweep.skip_oom):
        out.print(line)


def _expected_cells(e: Expectation) -> tuple[str, ...]:
    from windlass.units import print_seconds

    if e.verdict in ("illegal", "unknown"):
        return (f"{e.verdict}: {e.reason}", "", "", "", "", "", "", "")
    word = "skip: out of memory" if e.skip else "out of memory" if e.verdict == "oom" else "fits"
    gib = "" if e.memory_bytes is None else f"{e.memory_bytes / 2**30:.1f}"
    chance = "" if e.oom_chance is None else f"{e.oom_chance:.0%}"
    if e.skip:
        return (word, gib, chance, "", "", "", "", "")
    return (
        word, gib, chance, f"{e.tokens_per_second_per_device or 0:,.0f}", "unknown" if e.mfu is None else f"{e.mfu:.1%}", print_seconds(e.seconds),
        "unknown" if e.node_hours is None else f"{e.node_hours:.2f}", "unknown" if e.kwh is None else f"{e.kwh:.3g}",
    )  # fmt: skip


def _total_lines(total: Total, limit: float) -> list[str]:
    from windlass.units import print_seconds

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


def _print_equivalence(out: Any, found: dict[str, dict[str, str]]) -> None:
    from windlass.cli.output import table

    if not found:
        return
    engines = list(dict.fromkeys(e for row in found.values() for e in row))
    rows = [(name, *(row.get(e, "") for e in engines)) for name, row in found.items()]
    out.print(table("Which strategy exists in which engine", ("strategy", *engines), rows))


def _run(
    work: Work, only: str | None, names: list[str] | None, everything: bool, inside: Path | None, *, quiet: bool
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from windlass.cli.output import console
    from windlass.launch.sweep.local import choose, run_points
    from windlass.launch.sweep.outcome import read_only

    step: tuple[str, ...] = ()
    if inside is not None:
        from windlass.launch.sweep.pack import pack_here

        here = pack_here(work, inside)
        chosen, step = here.points, here.step
    else:
        chosen = choose(work, read_only(only) if only else None, names, everything=everything)
    done = len(work.folder.outcomes())
    if not chosen:
        if not quiet:
            console().print(
                f"nothing to run: {done} of {len(work.points)} points have an outcome (--only oom,fail repeats some)"
            )
        return
    # Packs of one sweep run side by side: each holds a lock of its own.
    lock = None if inside is None else inside.with_name(f"{chosen[0].name}.lock")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_errors(), transient=True) as bar:
        task = bar.add_task("sweep", total=len(chosen))

        def say(point: Point, word: str) -> None:
            if word == "runs":
                bar.update(task, description=point.name)
                return
            bar.advance(task)
            if not quiet:
                bar.console.print(f"{point.name}: {word}", markup=False, highlight=False, soft_wrap=True)

        try:
            run_points(work, chosen, say, everything=everything, step=step, lock=lock)
        except KeyboardInterrupt:
            bar.console.print(
                f"stopped: {len(work.folder.outcomes())} of {len(work.points)} points have an outcome; the same command goes on with the rest",
                markup=False,
                soft_wrap=True,
            )
            raise typer.Exit(130) from None


def _errors() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _settle(work: Work) -> None:
    """Ask the scheduler about points whose jobs ended without a word of their own."""
    from windlass.launch.slurm import Slurm, available
    from windlass.launch.sweep.pack import settle

    if (work.folder.path / "jobs.jsonl").is_file() and available():
        settle(work, Slurm())


def _submit(
    work: Work, cluster: str | None, stage: str | None, only: str | None, names: list[str] | None, everything: bool, as_json: bool
) -> None:  # fmt: skip
    from windlass.cli.output import console, print_json
    from windlass.launch.sweep.local import choose
    from windlass.launch.sweep.outcome import read_only
    from windlass.launch.sweep.pack import submit_packs

    chosen = choose(work, read_only(only) if only else None, names, everything=everything)
    found = submit_packs(work, chosen, cluster=cluster, everything=everything, stage=stage)
    if as_json:
        print_json(found)
        return
    for pack in found["packs"]:
        console().print(
            f"job {pack['job']}: {len(pack['points'])} points, {pack['nodes']} nodes, at most {pack['seconds'] / 60:.0f} min"
        )
    console().print(f"when they are done: windlass sweep {work.loaded.path} --run {work.folder.path} --report")


def _ranked_by(work: Work, rows: Sequence[dict[str, Any]], key: str | None) -> Work:
    """The same work, ranked by the column that was asked for, if there is such a column."""
    if key is None:
        return work
    from dataclasses import replace

    from windlass.config.sweep import with_goal
    from windlass.errors import ConfigError

    good = [row for row in rows if row.get("outcome") == "ok"]
    numbers = sorted({k for row in good for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)})  # fmt: skip
    if good and key not in numbers:
        raise ConfigError(f"--rank-by {key}: no point has such a number", hint=f"columns with numbers: {', '.join(numbers)}")  # fmt: skip
    return replace(work, loaded=replace(work.loaded, sweep=with_goal(work.sweep, key)))


def _finish(work: Work, rank_by: str | None, pick: Path | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.figures.sweep_page import best_first, counts
    from windlass.launch.sweep.page import write_page
    from windlass.launch.sweep.pick import write_pick
    from windlass.launch.sweep.results import collect_rows, write_tables

    rows = collect_rows(work)
    work, key = _ranked_by(work, rows, rank_by), rank_by or work.sweep.rank_by
    paths = write_tables(work, rows)
    page = write_page(work, rows, key)
    ranked = best_first(rows, key, work.sweep.goal)
    if pick is not None:
        write_pick(work, ranked, key, pick)
    if as_json:
        print_json({"sweep": work.sweep.name, "folder": work.folder.path, "rank_by": key, "best": ranked[0]["point"] if ranked else None,
                    "counts": counts(rows), "rows": rows, "page": page, "tables": paths, "pick": pick})  # fmt: skip
        return
    _print_rows(console(), work, rows, ranked, key)
    console().print(f"page: {page}   table: {paths[0]}")
    if pick is not None:
        console().print(f"the winner, {ranked[0]['point']}, is written to {pick}")


def _print_rows(
    out: Any, work: Work, rows: Sequence[dict[str, Any]], ranked: Sequence[dict[str, Any]], key: str
) -> None:
    from windlass.cli.output import table
    from windlass.figures.sweep_page import cells, counts, shown_columns

    rest = [r for r in rows if r not in ranked]
    columns = shown_columns(work.sweep, rows, key)
    body = [cells(row, columns) for row in (*ranked, *rest)]
    listed = ", ".join(f"{n} {word}" for word, n in counts(rows).items())
    right = [i for i, c in enumerate(columns) if c.right]
    out.print(table(f"{work.sweep.title or work.sweep.name}: {listed}", [c.title for c in columns], body, right=right))
