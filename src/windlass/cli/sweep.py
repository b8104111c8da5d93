"""`windlass sweep SWEEP.toml`: a matrix of runs or of any command; out of memory and failure are results."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.options import EngineProfileOption, JsonOption
from windlass.cli.output import show, table, working
from windlass.errors import ConfigError, interrupt_exit_code
from windlass.units import (
    print_bytes,
    print_figure,
    print_kwh,
    print_node_hours,
    print_rate,
    print_seconds,
    print_share,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from windlass.config.sweep import LoadedSweep
    from windlass.launch.checks import Finding
    from windlass.launch.sweep.expect import Expectation, SweepTotal
    from windlass.launch.sweep.folder import SweepRun
    from windlass.launch.sweep.outcome import PointOutcome
    from windlass.launch.sweep.pack import PackArray, SweepPack
    from windlass.launch.sweep.points import SweepPoint

POINT_DROP = ("energy", "node-hours", "MFU", "OOM risk", "time")
BEST_DROP = ("point", "energy", "seeds", "time", "texts/s")


def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file (TOML), or a dvc.yaml with a matrix stage.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys for the jobs of a command, such as launch.account=NAME.", metavar="KEY=VALUE"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show points, predictions and (--slurm) job scripts; run nothing.")
    ] = False,
    cluster: Annotated[str | None, typer.Option(help="Predict for this cluster instead of the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Sweep folder (default: runs/<name>).")] = None,
    only: Annotated[str | None, typer.Option(help="Repeat points with these outcomes: oom,fail,timeout,...")] = None,
    point: Annotated[list[str] | None, typer.Option("--point", help="Run only this point (repeatable).")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also run points predicted to run out of memory.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write the tables and the page from the results so far; run nothing.")
    ] = False,
    pick: Annotated[Path | None, typer.Option(help="Write the winning recipe to this file.")] = None,
    leaderboard: Annotated[
        Path | None, typer.Option(help="Also write the leaderboard (models x data sets) to this HTML file.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(help="Run this command instead of the file's; it names the same axes in braces.")
    ] = None,
    rank_by: Annotated[str | None, typer.Option(help="Column to rank by, instead of the sweep file's.")] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit as packed SLURM jobs (an array) instead of running here.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run even if a check of the command or job fails.")] = False,
    inside: Annotated[Path | None, typer.Option("--inside", hidden=True)] = None,
    to_dvc: Annotated[Path | None, typer.Option(help="Write an equivalent DVC matrix stage to this dvc.yaml.")] = None,
    stage: Annotated[str | None, typer.Option(help="With a dvc.yaml: name of the stage.")] = None,
    engine_profile: EngineProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a matrix of recipes or of any command, and rank the results. Run it again to resume an interrupted sweep."""
    from windlass.clusters import load_cluster
    from windlass.config.sweep import load_sweep, with_command, with_launch
    from windlass.launch.slurm import SlurmScheduler, slurm_available
    from windlass.launch.sweep import command as commands
    from windlass.launch.sweep import dvc, execute, expect, outcome, pack, results
    from windlass.launch.sweep.folder import SweepFolder, SweepRun, open_sweep_folder
    from windlass.launch.sweep.points import make_points

    if engine_profile is not None and not dry_run:
        raise ConfigError(
            "sweep.profile-needs-dry-run",
            f"--engine-profile {engine_profile} only predicts; the points run in their own engine",
            hint="add --dry-run",
        )
    loaded = dvc.read_dvc(file, stage) if file.suffix in (".yaml", ".yml") else load_sweep(file)
    loaded = with_launch(loaded, overrides) if overrides else loaded
    loaded = with_command(loaded, command) if command is not None else loaded
    points = make_points(loaded)
    if to_dvc is not None:
        dvc.write_dvc(loaded, points, to_dvc)
        return show(False, None, f"wrote {to_dvc}: one matrix stage, {len(points)} points; `dvc repro` runs them")
    with working(f"predicting {len(points)} points", quiet=as_json):
        points = expect.use_nearest_batches(loaded.sweep, points, cluster)
        expected, total = expect.expect_all(loaded.sweep, points, cluster, engine_profile)
    faults = commands.check_commands(loaded, points, load_cluster(cluster) if cluster else None)
    path = run or Path("runs") / loaded.sweep.name
    named = {"--command": command, "--stage": stage}
    options = [*(overrides or ()), *(text for name, value in named.items() if value for text in (name, value))]
    options += ["--force"] if force else []
    if dry_run:
        arrays = []
        if slurm:
            sweep_run = SweepRun(loaded=loaded, folder=SweepFolder(path), points=points, expected=expected)
            chosen = pack.points_with_job(sweep_run, points, everything=everything)
            arrays = pack.prepare_packs(sweep_run, chosen, cluster=cluster, options=options)
        return _show_dry(loaded, points, expected, total, engine_profile, faults, arrays, as_json)
    if inside is None and not report:
        commands.refuse_commands(faults, loaded.path, force=force)
    folder = open_sweep_folder(path, loaded, points)
    sweep_run = SweepRun(loaded=loaded, folder=folder, points=points, expected=expected)
    if pick is not None:
        results.check_pick(sweep_run, pick)
    if leaderboard is not None:
        results.check_leaderboard(sweep_run)
    if inside is not None:
        chosen, launcher = pack.pack_of_this_task(sweep_run, inside)
        # Packs of one sweep run side by side: each has a lock of its own.
        lock = inside.with_name(f"{chosen[0].name}.lock") if chosen else None
        return _run(sweep_run, chosen, quiet=as_json, everything=everything, launcher=launcher, lock=lock)
    if report:
        if folder.jobs_file.is_file() and slurm_available():
            pack.settle(sweep_run, SlurmScheduler())
    else:
        chosen = execute.choose_points(
            sweep_run, outcome.parse_only(only) if only else None, point, everything=everything
        )
        if slurm:
            submitted = pack.submit_packs(
                sweep_run, chosen, cluster=cluster, everything=everything, options=options, force=force
            )
            return _show_submitted(sweep_run, submitted, as_json)
        _run(sweep_run, chosen, quiet=as_json, everything=everything)
    return _finish(sweep_run, rank_by, pick, leaderboard, as_json)


def _show_submitted(sweep_run: SweepRun, submitted: dict[str, Any], as_json: bool) -> None:
    lines = [
        f"job {job['job']}: {len(job['points'])} points, {job['nodes']} nodes, at most {job['seconds'] / 60:.0f} min"
        for job in submitted["packs"]
    ]
    file, folder = (shlex.quote(str(path)) for path in (sweep_run.loaded.path, sweep_run.folder.path))
    again = f"windlass sweep {file} --run {folder} --report"
    show(as_json, submitted, *lines, f"when they are done: {again}")


def _show_dry(
    loaded: LoadedSweep,
    points: Sequence[SweepPoint],
    expected: Sequence[Expectation],
    total: SweepTotal,
    engine_profile: str | None,
    faults: Sequence[Finding],
    arrays: Sequence[PackArray],
    as_json: bool,
) -> None:
    """The points, the predictions for each, what all of them cost, faults of commands, and the scripts of jobs."""
    from windlass.cost.engines import AS_IN_2024
    from windlass.figures.sweep import equivalence_table
    from windlass.launch.script import render

    sweep, pairs = loaded.sweep, list(zip(points, expected, strict=True))
    title = f"{sweep.title or sweep.name}: {len(points)} point{'s' * (len(points) != 1)}"
    rows = [
        {
            "point": p.name,
            "values": dict(p.values),
            "devices": p.devices,
            "problem": p.problem,
            "batch_tokens": p.recipe.data.batch_tokens if p.recipe else None,
            "wanted_batch_tokens": p.wanted_batch_tokens,
            "expected": e,
        }
        for p, e in pairs
    ]
    jobs = [
        {"packs": array.packs, "script": render(array.job, array.machine), "findings": array.findings}
        for array in arrays
    ]
    findings = [*faults, *{(f.rule, f.message): f for array in arrays for f in array.findings}.values()]
    document = {"sweep": sweep.name, "points": rows, "total": total, "equivalence": sweep.equivalence}
    document |= {"engine_profile": engine_profile, "faults": faults, "jobs": jobs}
    scripts = [text for array in arrays for text in (_shape_line(array.packs), render(array.job, array.machine))]
    warnings = [f"{f.level}: {f.rule}: {f.message}" + (f"\n  -> {f.hint}" if f.hint else "") for f in findings]
    if sweep.command is not None:
        width = max(len(p.name) for p in points)
        # Not a table: a folded command cannot be copied.
        commands = [f"{point.name:{width}}  {point.shown_command()}" for point in points]
        unknown = "cost unknown: the planner predicts recipes only"
        show(as_json, document, title, *commands, *scripts, unknown, *warnings)
        return
    cells = []
    for point, e in pairs:
        text = "skip: out of memory" if e.skip else "out of memory" if e.verdict == "oom" else "fits"
        memory = ["" if e.peak_bytes is None else print_bytes(e.peak_bytes), print_share(e.oom_chance, "", digits=0)]
        speed = [
            print_rate(e.tokens_per_second_per_device, unit=""),
            print_share(e.mfu),
            print_seconds(e.seconds),
        ]
        cost = [print_node_hours(e.node_hours, unit=""), print_kwh(e.kwh)]
        if e.verdict in ("illegal", "unknown"):
            text, memory = f"{'invalid' if e.verdict == 'illegal' else e.verdict}: {e.reason}", [""] * 2
        if point.recipe is not None and point.wanted_batch_tokens is not None:
            text += f"; batch {point.recipe.data.batch_tokens:,} tokens, nearest to {point.wanted_batch_tokens:,}"
        if e.skip or e.verdict in ("illegal", "unknown"):
            speed, cost = [""] * 3, [""] * 2
        cells.append((point.name, text, *memory, *speed, *cost))
    columns = (
        "point", "prediction", "memory", "OOM risk", "tokens/s per device", "MFU", "time", "node-hours", "energy",
    )  # fmt: skip
    names, sums = equivalence_table(sweep), None
    if total.node_hours is not None:
        units = ""
        if total.units is not None and total.unit not in ("", "hour"):
            units = f", {print_figure(total.units)} {total.unit}s"
        sums = f"total {print_node_hours(total.node_hours)}{units}, {print_kwh(total.kwh)}; "
        sums += f"{print_seconds(total.seconds)} if run one after another"
    skipped = f"{total.skipped} skipped as out of memory (probability at least {print_share(sweep.skip_oom, digits=0)})"
    show(
        as_json,
        document,
        table(title, columns, cells, right=range(2, len(columns)), drop=POINT_DROP),
        table("Names of the strategies in each engine", names.columns, names.rows) if names.rows else None,
        f"{total.run} of {total.points} points would run, {skipped}, {total.illegal} invalid",
        sums,
        f"time and node-hours include {print_seconds(sweep.startup)} of start-up per point; energy is that of the steps",
        f"Predicted for {engine_profile} {AS_IN_2024} instead of windlass's own engine." if engine_profile else None,
        "memory: the peak that the run will log, without the allocator's reserve",
        "OOM risk: chance that the point runs out of memory, from the errors of the estimate on 129 published runs",
        *scripts,
        *warnings,
    )


def _shape_line(packs: Sequence[SweepPack]) -> str:
    listed = "; ".join(", ".join(pack.points) for pack in packs)
    return f"array of {len(packs)}, nodes: {packs[0].nodes}, devices per node: {packs[0].devices}, points: {listed}"


def _run(sweep_run: SweepRun, points: Sequence[SweepPoint], *, quiet: bool, **options: Any) -> None:
    """Run the points with a progress bar on the error stream; `options` go to `run_points`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from windlass.launch.sweep.execute import run_points

    def progress() -> str:
        return f"{len(sweep_run.folder.outcomes())} of {len(sweep_run.points)} points have an outcome"

    if not points:
        if not quiet:
            show(False, None, f"nothing to run: {progress()} (--only oom,fail repeats some)")
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
        except KeyboardInterrupt as error:
            say(f"stopped: {progress()}; the same command continues with the others")
            raise typer.Exit(interrupt_exit_code(error)) from None


def _finish(
    sweep_run: SweepRun, rank_by: str | None, pick: Path | None, leaderboard: Path | None, as_json: bool
) -> None:
    """Write tables, page and winner, and print the ranking: best first, then what did not succeed."""
    from windlass.config.sweep import with_goal
    from windlass.figures import sweep as figures
    from windlass.figures.leaderboard import entry_table
    from windlass.launch.sweep import results

    rows = results.collect_rows(sweep_run)
    if rank_by is not None:
        columns = figures.numbers(rows)
        if any(row.get("outcome") == "ok" for row in rows) and rank_by not in columns:
            raise ConfigError(
                "sweep.unknown-column",
                f"--rank-by {rank_by}: no point has such a number",
                hint=f"columns with numbers: {', '.join(columns) or 'none'}",
            )
        sweep_run = replace(sweep_run, loaded=replace(sweep_run.loaded, sweep=with_goal(sweep_run.sweep, rank_by)))
    sweep, key = sweep_run.sweep, sweep_run.sweep.rank_by
    with working("writing tables and page", quiet=as_json):
        paths, page = results.write_tables(sweep_run, rows), results.write_page(sweep_run, rows, key)
    entries, board = results.write_leaderboard(sweep_run, rows, leaderboard), sweep.leaderboard
    best = entry_table(board, entries) if board is not None else None
    ranked, counts = figures.best_first(rows, key, sweep.goal), figures.counts(rows)
    if pick is not None:
        results.write_pick(sweep_run, ranked, key, pick)
    document = {
        "sweep": sweep.name,
        "folder": sweep_run.folder.path,
        "rank_by": key,
        "best": ranked[0]["point"] if ranked else None,
        "counts": counts,
        "rows": rows,
        "page": page,
        "tables": paths,
        "pick": pick,
    }
    document |= {"leaderboard": entries} if board is not None else {}
    content = figures.points_table(sweep, rows, ranked, key)
    title = f"{sweep.title or sweep.name}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    energy = None
    if counts.get("ok") and sweep.command is None and all(row.get("joules_per_token") is None for row in rows):
        modelled = sum(row.get("modelled_joules") is not None for row in rows)
        energy = f"energy: not measured on any point, modelled on {modelled} (modelled_joules in {paths[0].name})"
    show(
        as_json,
        document,
        table(title, content.columns, content.rows, right=content.right),
        table("Leaderboard", best.columns, best.rows, right=best.right, drop=BEST_DROP) if best is not None else None,
        energy,
        figures.no_winner(rows, key) if counts.get("ok") and not ranked else None,
        f"page: {page}   table: {paths[0]}",
        None if pick is None else f"the recipe of the winner, {ranked[0]['point']}, was written to {pick}",
    )
