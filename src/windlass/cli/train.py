"""`windlass train RECIPE`: create a run and its start, then train it here or as a rank of a job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.options import (
    AdjustOption,
    NewDataOption,
    NewRunOption,
    OverridesArgument,
    ProcessesOption,
    QuietOption,
    RecipeArgument,
    ScratchOption,
)
from windlass.cli.output import console, working
from windlass.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RESUMABLE, ConfigError

if TYPE_CHECKING:
    from windlass.runs.folder import Run


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    run: NewRunOption = None,
    devices: ProcessesOption = None,
    restarts: Annotated[
        int,
        typer.Option("--restarts", min=0, help="Maximum number of times to restart failed workers (with --devices)."),
    ] = 3,
    adjust: AdjustOption = False,
    new_data: NewDataOption = False,
    from_scratch: ScratchOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a recipe on this machine, or as one rank of a job. A second start of the same run resumes it."""
    from windlass.checkpoint.files import newest_step
    from windlass.clusters.scheduler import place
    from windlass.config import load_recipe
    from windlass.launch.chain import finished
    from windlass.launch.start import check_store, create_planned_run, local_cluster
    from windlass.planner.changes import adjust_batch
    from windlass.runs.events import Finished
    from windlass.runs.folder import Run

    loaded = load_recipe(recipe, overrides or ())
    folder = Run(run or Path("runs") / loaded.recipe.name)

    def create(devices_per_node: int, nodes: int) -> str:
        check_store(loaded.recipe)
        used, cluster = loaded, local_cluster(loaded.recipe, devices_per_node)
        if adjust:
            adjusted, note = adjust_batch(loaded.recipe, cluster, nodes)
            used = replace(loaded, recipe=adjusted)
            console().print(
                f"adjusted: {note}" if note else "adjusted: nothing; the batch already divides evenly", markup=False
            )
        reason = create_planned_run(folder.path, used, cluster, nodes)[1]
        last = [Finished(), *folder.events(Finished)][-1]
        is_kept = newest_step(folder) == last.step  # else the start says what is lost
        if place().source == "single" and is_kept and finished(folder) and not from_scratch:
            console().print(
                f"{folder.path} is finished (step {last.step}, {last.tokens or 0:,} tokens); "
                f"to train further: windlass resume {folder.argument} train.steps=... (or data.tokens=...)",
                markup=False, soft_wrap=True,
            )  # fmt: skip
            raise typer.Exit
        return reason

    raise typer.Exit(
        train_start(
            folder,
            create,
            devices=devices or 1,
            restarts=restarts,
            from_scratch=from_scratch,
            new_data=new_data,
            quiet=quiet,
        )
    )


def train_start(run: Run, prepare: Callable[[int, int], str], **options: Any) -> int:
    """`bind_and_train`; a new run that does not come to its first event leaves no folder behind."""
    from windlass.clusters.scheduler import place
    from windlass.runs.folder import discard_unstarted

    is_new = place().source == "single" and not run.config_file.exists()
    try:
        return bind_and_train(run, prepare, **options)
    finally:
        if is_new:
            discard_unstarted(run)


def bind_and_train(
    run: Run,
    prepare: Callable[[int, int], str],
    *,
    devices: int,
    restarts: int = 0,
    new_data: bool = False,
    from_scratch: bool = False,
    quiet: bool = False,
) -> int:
    """Bind a new start of a run and train it: in this process, under a supervisor, or as one rank of a job; the exit
    code.

    `prepare(devices per node, nodes)` brings the run folder up to date and returns the reason for its layout. In a job,
    rank 0 prepares and binds, and `devices` does not count; the other ranks wait for the start.
    """
    from windlass.checkpoint.files import newest_step
    from windlass.checkpoint.missing import restart_from_scratch
    from windlass.clusters.scheduler import job_id, place, step_start
    from windlass.launch.start import bind_start
    from windlass.runs import lock, starts
    from windlass.runs.events import GaveUp
    from windlass.train import supervisor

    position = place()
    single = position.source == "single"
    count, per_node = (devices, devices) if single else (position.world_size, position.local_world_size)
    job, restart = (None, 0) if single else step_start()
    options, reason = ["--quiet"] if quiet else [], ""
    if position.rank == 0:
        lock.refuse_held(run.lock_file)
        reason = prepare(per_node, position.nodes)
        if from_scratch:
            restart_from_scratch(run)
        if new_data:
            from windlass.data.run_check import accept_data  # numpy: not for every start

            accept_data(run.recipe(), run, console().print)
    with lock.locked(run.lock_file, job_id()) if position.rank == 0 else contextlib.nullcontext():
        if position.rank == 0:
            start = bind_start(run, devices=count, devices_per_node=per_node, job=job, restart=restart, reason=reason)
        else:
            start = starts.wait_for_start(run, starts.start_name(job or "", restart), reused_name=job_id() is None)
        if not single or count == 1:
            with working("importing torch", quiet=quiet or not single):
                import torch  # noqa: F401  here, because it takes seconds

                from windlass.train import worker
            try:
                return worker.main([str(run.path), "--start", start.name, "--locked", *options])
            except ConfigError as error:
                if position.rank == 0:
                    raise
                return error.exit_code  # every rank finds the same; rank 0 says it once, and each has left its record
        worker_argv = supervisor.worker_argv(run, start, *options)

        def announced(attempt: int) -> Sequence[str]:
            if not quiet and sys.stderr.isatty():
                sys.stderr.write(f"{'restarting' if attempt else 'starting'} {count} workers, which import torch ...\n")
            return worker_argv(attempt)

        code = supervisor.run_workers(announced, count, run, restarts)
    if code == EXIT_RESUMABLE:
        saved = newest_step(run) is not None
        again = (
            f"to resume: windlass resume {run.argument}" if saved else "nothing was saved yet: run the command again"
        )
        console().print(again, markup=False, soft_wrap=True)
    elif code == EXIT_INTERRUPTED:
        console().print(f"stopped at once, without a save; to resume: windlass resume {run.argument}", markup=False)
    elif code != EXIT_DONE and (given_up := list(run.events(GaveUp))):
        console().print(f"gave up: {given_up[-1].reason}", markup=False, style="red")
    return code
