"""`windlass train RECIPE`: one process, one process per device of this machine, or a rank of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.clusters import Cluster
    from windlass.config import Loaded
    from windlass.runs.folder import Run


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: layout.micro_batch=4.", metavar="KEY=VALUE"),
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Run folder; runs/<name> when left out.")] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes on this machine, one per device.")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often failed workers are started again (with --devices).")
    ] = 3,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress lines.")] = False,
) -> None:
    """Train a recipe: on this machine, or as one rank of a job. A second start of the same run goes on where it stopped."""
    from windlass.clusters.scheduler import place
    from windlass.config import load_recipe
    from windlass.runs import Run, create_run
    from windlass.runs.lock import refuse_held

    loaded = load_recipe(recipe, overrides or ())
    where = place()
    loaded, reason = _with_layout(loaded, where, devices)
    folder = run or Path("runs") / loaded.recipe.name
    if where.rank == 0:
        if "WINDLASS_LOCKED" not in os.environ:  # else our supervisor holds it
            refuse_held(Run(folder).lock_file)
        made = create_run(folder, loaded)
        _keep_plan(made, loaded, where, devices)
    else:
        made = _wait_for_run(folder)
    if devices is not None and devices > 1 and where.source == "single":
        raise typer.Exit(_supervise(made, devices, restarts))
    raise typer.Exit(_work(loaded, made, where, quiet, reason))


def _with_layout(loaded: Loaded, where: Any, devices: int | None) -> tuple[Loaded, str]:
    """A recipe without `[layout]` gets the planner's best for the devices that are really there, and the reason."""
    if loaded.recipe.layout is not None:
        return loaded, ""
    from dataclasses import replace

    from windlass.planner.search import fill_recipe

    recipe, reason = fill_recipe(loaded.recipe, _here(loaded, where, devices), nodes=where.nodes)
    return replace(loaded, recipe=recipe), f"layout: {reason}"


def _here(loaded: Loaded, where: Any, devices: int | None) -> Cluster:
    """The recipe's cluster with as many devices per node as this job really uses."""
    from windlass.clusters import load_cluster
    from windlass.clusters.here import with_gpus
    from windlass.planner.search import on_devices

    used = devices if devices is not None and where.source == "single" else where.local_world_size
    file = load_cluster(loaded.recipe.cluster)
    here, _ = with_gpus(file)
    return on_devices(here if used <= here.node.devices else file, used)


def _keep_plan(run: Run, loaded: Loaded, where: Any, devices: int | None) -> None:
    """What the planner expects goes into the run folder, so that report and energy lay it beside what was measured."""
    import contextlib

    from windlass.errors import WindlassError
    from windlass.planner import plan, write_plan

    if "WINDLASS_LOCKED" in os.environ:  # a worker: its supervisor has done it
        return
    with contextlib.suppress(WindlassError):  # a recipe beyond the planner's model is trained all the same
        cluster = _here(loaded, where, devices)
        if cluster.device == "cpu" and any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/kfd")):
            return  # the workstation's file describes a CPU, and this run will take the GPU
        write_plan(run, plan(loaded.recipe, cluster, nodes=where.nodes))


def _supervise(run: Run, devices: int, restarts: int) -> int:
    """Start one worker per device with this very command line, and watch over them."""
    from windlass.clusters.scheduler import job_id
    from windlass.runs.lock import locked
    from windlass.train.supervise import run_workers

    with locked(run.lock_file, job_id()):
        command = [sys.executable, "-m", "windlass", *sys.argv[1:]]
        code: int = run_workers(command, devices, run, restarts, env={**os.environ, "WINDLASS_LOCKED": "1"})
    _tell_end(run, code)
    return code


def _tell_end(run: Run, code: int) -> None:
    """Why the supervisor stopped trying, or how to go on."""
    from windlass.cli.output import console
    from windlass.errors import EXIT_DONE, EXIT_RESUMABLE
    from windlass.runs.events import GaveUp

    if code == EXIT_RESUMABLE:
        console().print(f"to go on: windlass resume {run.path}", markup=False)
    elif code != EXIT_DONE:
        last = next(reversed(list(run.events(GaveUp))), None)
        if last is not None:
            console().print(f"gave up: {last.reason}", markup=False, style="red")


def _work(loaded: Loaded, run: Run, where: Any, quiet: bool, reason: str = "") -> int:
    import contextlib

    from windlass.clusters.scheduler import job_id
    from windlass.errors import ConfigError
    from windlass.runs.lock import locked
    from windlass.train.progress import ProgressDisplay

    mine = where.rank == 0 and "WINDLASS_LOCKED" not in os.environ
    with locked(run.lock_file, job_id()) if mine else contextlib.nullcontext():
        from windlass.train.loop import run as train_run
        from windlass.train.mesh import leave
        from windlass.train.profiler import Profiler
        from windlass.train.tracking import Trackers

        progress = ProgressDisplay(quiet=quiet or where.rank != 0)
        progress.say(reason)
        hooks = [Profiler(), progress, Trackers()]
        try:
            code = int(train_run(loaded.recipe, run, where=where, hooks=hooks, say=progress.say))
        except ConfigError as error:
            if where.rank == 0:
                raise
            return error.exit_code  # every rank finds the same; rank 0 says it once, and each has left its record
        except Exception as error:
            raise _in_our_words(error, run) from error
        leave()
        return code


def _in_our_words(error: Exception, run: Run) -> Exception:
    """A rank that loses its connection is not at fault: say that another one went away, and where that one's record is."""
    from windlass.errors import WindlassError
    from windlass.runs.faults import kind_of

    if isinstance(error, WindlassError) or kind_of(error) != "lost":
        return error
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return WindlassError(
        "cli.another-worker-went-away",
        f"another worker went away while this one waited for it ({first[:160]})",
        hint=f"what that worker knows of it is in {run.ranks}; the run goes on from its last checkpoint when it is started again",
    )


def _wait_for_run(folder: Path, seconds: float = 60.0) -> Run:
    """Rank 0 makes the folder; a slow parallel file system shows it to the others a little later."""
    import time

    from windlass.errors import RunError
    from windlass.runs.folder import Run

    end = time.monotonic() + seconds
    while not (folder / "config.json").is_file():
        if time.monotonic() > end:
            raise RunError(
                "cli.rank-made-run-folder",
                f"rank 0 has made no run folder {folder} within {seconds:.0f} s",
                hint="is the folder on a file system that all nodes share?",
            )
        time.sleep(0.2)
    return Run(folder)
