"""`windlass train RECIPE`: create a run and its start, then train it here or as a rank of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from windlass.clusters.scheduler import Place
    from windlass.runs.folder import Run
    from windlass.runs.starts import Start


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: layout.micro_batch=4.", metavar="KEY=VALUE"),
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Run folder (default: runs/<name>).")] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes on this machine, one per device.")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often failed workers are restarted (with --devices).")
    ] = 3,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress lines.")] = False,
) -> None:
    """Train a recipe on this machine, or as one rank of a job. A second start of the same run resumes it."""
    from windlass.clusters.scheduler import place, step_start
    from windlass.config import load_recipe
    from windlass.launch.start import bind_start, create_planned_run, local_cluster
    from windlass.runs.folder import Run
    from windlass.runs.lock import refuse_held
    from windlass.runs.starts import start_name, wait_for_start

    loaded, here = load_recipe(recipe, overrides or ()), place()
    folder = run or Path("runs") / loaded.recipe.name
    single = here.source == "single"
    count = (devices or 1) if single else here.world_size
    per_node = count if single else here.local_world_size
    job, restart = (None, 0) if single else step_start()
    if here.rank == 0:
        refuse_held(Run(folder).lock_file)
        target, reason = create_planned_run(folder, loaded, local_cluster(loaded.recipe, per_node), here.nodes)
        start = bind_start(target, devices=count, devices_per_node=per_node, job=job, restart=restart, reason=reason)
    else:  # rank 0 of this srun step writes the start
        target = Run(folder)
        start = wait_for_start(target, start_name(job or "", restart))
    raise typer.Exit(run_start(target, start, here, restarts=restarts, quiet=quiet))


def run_start(run: Run, start: Start, here: Place, *, restarts: int, quiet: bool) -> int:
    """Train a bound start: in this process, or one worker per device under a supervisor; the exit code."""
    import contextlib
    from dataclasses import replace

    from windlass.cli.output import console
    from windlass.clusters.scheduler import job_id
    from windlass.errors import EXIT_DONE, EXIT_RESUMABLE, ConfigError
    from windlass.runs.events import GaveUp
    from windlass.runs.lock import locked
    from windlass.runs.starts import write_start
    from windlass.train import supervisor, worker

    def arguments(attempt: int) -> list[str]:
        current = replace(start, restart=start.restart + attempt)
        if attempt:
            write_start(run, current)
        return [str(run.path), "--start", current.name, *(["--quiet"] if quiet else [])]

    with locked(run.lock_file, job_id()) if here.rank == 0 else contextlib.nullcontext():
        if here.source != "single" or start.devices == 1:
            try:
                return worker.main(arguments(0))
            except ConfigError as error:
                if here.rank == 0:
                    raise
                return error.exit_code  # every rank finds the same; rank 0 says it once, and each has left its record
        program = [sys.executable, "-m", "windlass.train.worker"]
        code = supervisor.run_workers(lambda n: [*program, *arguments(n)], start.devices, run, restarts)
    if code == EXIT_RESUMABLE:
        console().print(f"to resume: windlass resume {run.path}", markup=False)
    elif code != EXIT_DONE and (given_up := list(run.events(GaveUp))):
        console().print(f"gave up: {given_up[-1].reason}", markup=False, style="red")
    return code
