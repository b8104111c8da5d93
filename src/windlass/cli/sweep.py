"""`windlass sweep SWEEP.toml`: a matrix of runs or of any command; out of memory and failure are results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from windlass.launch.sweep.folder import SweepRun
    from windlass.launch.sweep.outcome import PointOutcome
    from windlass.launch.sweep.points import SweepPoint


def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file (TOML), or a dvc.yaml with a matrix stage.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the points and the planner's predictions; run nothing.")
    ] = False,
    cluster: Annotated[str | None, typer.Option(help="Predict for this cluster instead of the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Sweep folder (default: runs/<name>).")] = None,
    only: Annotated[str | None, typer.Option(help="Repeat points by outcome: oom,fail,timeout,...")] = None,
    point: Annotated[list[str] | None, typer.Option("--point", help="Only this point (repeatable).")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also run points predicted to run out of memory.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write tables and page from the results so far; run nothing.")
    ] = False,
    pick: Annotated[Path | None, typer.Option(help="Write the winning recipe to this file.")] = None,
    rank_by: Annotated[str | None, typer.Option(help="Column to rank by, instead of the sweep file's.")] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit as packed SLURM jobs (an array) instead of running here.")
    ] = False,
    inside: Annotated[Path | None, typer.Option("--inside", hidden=True)] = None,
    to_dvc: Annotated[Path | None, typer.Option(help="Write an equivalent DVC matrix stage to this dvc.yaml.")] = None,
    stage: Annotated[str | None, typer.Option(help="With a dvc.yaml: which stage.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a matrix of recipes or of any command, and rank the results. Run it again to resume an interrupted sweep."""
    from windlass.cli.output import console, print_json
    from windlass.cli.sweep_text import show_dry
    from windlass.config.sweep import load_sweep
    from windlass.launch.slurm import SlurmScheduler, slurm_available
    from windlass.launch.sweep.dvc import read_dvc, write_dvc
    from windlass.launch.sweep.execute import choose_points
    from windlass.launch.sweep.expect import expect_all
    from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
    from windlass.launch.sweep.outcome import parse_only
    from windlass.launch.sweep.pack import pack_of_this_task, settle, submit_packs
    from windlass.launch.sweep.points import make_points
    from windlass.launch.sweep.results import check_pick

    loaded = read_dvc(file, stage) if file.suffix in (".yaml", ".yml") else load_sweep(file)
    points = make_points(loaded)
    if to_dvc is not None:
        write_dvc(loaded, points, to_dvc)
        console().print(f"wrote {to_dvc}: one matrix stage, {len(points)} points; `dvc repro` runs them")
        return
    expected, total = expect_all(loaded.sweep, points, cluster)
    if dry_run:
        show_dry(loaded, points, expected, total, as_json)
        return
    folder = open_sweep_folder(run or Path("runs") / loaded.sweep.name, loaded, points)
    sweep_run = SweepRun(loaded=loaded, folder=folder, points=points, expected=expected)
    if pick is not None:
        check_pick(sweep_run, pick)
    if inside is not None:
        chosen, launcher = pack_of_this_task(sweep_run, inside)
        # Packs of one sweep run side by side: each has a lock of its own.
        lock = inside.with_name(f"{chosen[0].name}.lock") if chosen else None
        _run(sweep_run, chosen, quiet=as_json, everything=everything, launcher=launcher, lock=lock)
        return
    if report:
        if folder.jobs_file.is_file() and slurm_available():
            settle(sweep_run, SlurmScheduler())
    else:
        chosen = choose_points(sweep_run, parse_only(only) if only else None, point, everything=everything)
        if slurm:
            submitted = submit_packs(sweep_run, chosen, cluster=cluster, everything=everything, stage=stage)
            if as_json:
                print_json(submitted)
                return
            for pack in submitted["packs"]:
                shape = f"{len(pack['points'])} points, {pack['nodes']} nodes, at most {pack['seconds'] / 60:.0f} min"
                console().print(f"job {pack['job']}: {shape}")
            console().print(f"when they are done: windlass sweep {loaded.path} --run {folder.path} --report")
            return
        _run(sweep_run, chosen, quiet=as_json, everything=everything)
    _finish(sweep_run, rank_by, pick, as_json)


def _run(sweep_run: SweepRun, points: Sequence[SweepPoint], *, quiet: bool, **options: Any) -> None:
    """Run the points with a progress bar on the error stream; `options` go to `run_points`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from windlass.cli.output import console
    from windlass.launch.sweep.execute import run_points

    def progress() -> str:
        return f"{len(sweep_run.folder.outcomes())} of {len(sweep_run.points)} points have an outcome"

    if not points:
        if not quiet:
            console().print(f"nothing to run: {progress()} (--only oom,fail repeats some)")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sweep", total=len(points))

        def say(text: str) -> None:
            bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

        def report(point: SweepPoint, outcome: PointOutcome | None) -> None:
            if outcome is None:
                bar.update(task, description=point.name)
                return
            bar.advance(task)
            if not quiet:
                say(f"{point.name}: {outcome.outcome}" + (f": {outcome.detail}" if outcome.outcome != "ok" else ""))

        try:
            run_points(sweep_run, points, report, **options)
        except KeyboardInterrupt:
            say(f"stopped: {progress()}; the same command continues with the others")
            raise typer.Exit(130) from None


def _finish(sweep_run: SweepRun, rank_by: str | None, pick: Path | None, as_json: bool) -> None:
    """Write tables, page and winner, and print the ranking."""
    from dataclasses import replace

    from windlass.cli.output import console, print_json
    from windlass.cli.sweep_text import print_rows
    from windlass.config.sweep import with_goal
    from windlass.errors import ConfigError
    from windlass.figures.sweep import best_first, counts, numbers
    from windlass.launch.sweep.results import collect_rows, write_page, write_pick, write_tables

    rows = collect_rows(sweep_run)
    if rank_by is not None:
        columns = numbers(rows)
        if any(row.get("outcome") == "ok" for row in rows) and rank_by not in columns:
            raise ConfigError(
                "sweep.unknown-column",
                f"--rank-by {rank_by}: no point has such a number",
                hint=f"columns with numbers: {', '.join(columns) or 'none'}",
            )
        loaded = replace(sweep_run.loaded, sweep=with_goal(sweep_run.sweep, rank_by))
        sweep_run = replace(sweep_run, loaded=loaded)
    sweep, key = sweep_run.sweep, sweep_run.sweep.rank_by
    paths, page = write_tables(sweep_run, rows), write_page(sweep_run, rows, key)
    ranked = best_first(rows, key, sweep.goal)
    if pick is not None:
        write_pick(sweep_run, ranked, key, pick)
    if as_json:
        value = {
            "sweep": sweep.name,
            "folder": sweep_run.folder.path,
            "rank_by": key,
            "best": ranked[0]["point"] if ranked else None,
            "counts": counts(rows),
            "rows": rows,
            "page": page,
            "tables": paths,
            "pick": pick,
        }
        print_json(value)
        return
    print_rows(console(), sweep_run, rows, ranked, key)
    console().print(f"page: {page}   table: {paths[0]}")
    if pick is not None:
        console().print(f"the winner, {ranked[0]['point']}, is written to {pick}")
