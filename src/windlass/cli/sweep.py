"""`windlass sweep SWEEP.toml`: a matrix of runs or of any command; out of memory and failure are results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        from windlass.cli.sweep_text import show_dry

        show_dry(loaded, points, expected, total, as_json)
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


def _run(
    work: Work, only: str | None, names: list[str] | None, everything: bool, inside: Path | None, *, quiet: bool
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from windlass.cli.output import console
    from windlass.launch.sweep.local import run_points

    chosen, step = _chosen(work, only, names, everything, inside)
    if not chosen:
        done = len(work.folder.outcomes())
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


def _chosen(
    work: Work, only: str | None, names: list[str] | None, everything: bool, inside: Path | None
) -> tuple[list[Point], tuple[str, ...]]:
    """The points to run, and what comes before each command: inside an allocation, its pack and srun."""
    if inside is not None:
        from windlass.launch.sweep.pack import pack_here

        here = pack_here(work, inside)
        return here.points, here.step
    from windlass.launch.sweep.local import choose
    from windlass.launch.sweep.outcome import read_only

    return choose(work, read_only(only) if only else None, names, everything=everything), ()


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
    from windlass.figures.sweep import numbers

    there = numbers(rows)
    if any(row.get("outcome") == "ok" for row in rows) and key not in there:
        raise ConfigError("cli.rank-point-such-number", f"--rank-by {key}: no point has such a number", hint=f"columns with numbers: {', '.join(there) or 'none'}")  # fmt: skip
    return replace(work, loaded=replace(work.loaded, sweep=with_goal(work.sweep, key)))


def _finish(work: Work, rank_by: str | None, pick: Path | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.cli.sweep_text import print_rows
    from windlass.figures.sweep import best_first, counts
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
    print_rows(console(), work, rows, ranked, key)
    console().print(f"page: {page}   table: {paths[0]}")
    if pick is not None:
        console().print(f"the winner, {ranked[0]['point']}, is written to {pick}")
