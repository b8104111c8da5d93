"""A training worker: `python -m windlass.train.worker RUN`. Reads the run's config and its start; plans nothing."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

from windlass.clusters.scheduler import job_id, place, restart_count
from windlass.errors import ConfigError, WindlassError, guard_imports
from windlass.runs.folder import open_run
from windlass.runs.lock import locked
from windlass.runs.starts import start_name, wait_for_start
from windlass.train.supervisor import attend


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m windlass.train.worker", description=__doc__)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--start", help="name of the start (default: that of this SLURM job)")
    parser.add_argument("--locked", action="store_true", help="whoever starts this worker holds the run's lock")
    parser.add_argument("--store", help="copy of the token store on a disk of this node")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    options = parser.parse_args(arguments)
    position, folder = place(), open_run(options.run)
    start = wait_for_start(folder, options.start or start_name(job_id() or "local", restart_count()))
    if position.source == "slurm":
        attend(folder, position.rank)
    recipe = folder.recipe()
    if options.store is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"store": options.store})})
    with locked(folder.lock_file, job_id()) if position.rank == 0 and not options.locked else contextlib.nullcontext():
        from windlass.train import loop, mesh, profiler, progress, tracking  # torch: only once the start is there

        display = progress.ProgressDisplay(quiet=options.quiet or position.rank != 0)
        display.say(f"layout: {start.reason}" if start.reason else "")
        hooks = [profiler.Profiler(), display, tracking.Trackers()]
        code = loop.run(recipe, folder, start, position, hooks, display.say)
        mesh.leave()
        return code


def script() -> int:
    """`main` as a program: an error becomes one message, a hint and an exit code."""
    # Until training handles signals there is nothing to save, and Ctrl-C ends the process without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    guard_imports()
    try:
        return main()
    except WindlassError as error:
        if place().rank == 0 or not isinstance(error, ConfigError):  # every rank finds the same; rank 0 says it once
            hint = f"\nhint:  {error.hint}" if error.hint else ""
            sys.stderr.write(f"error: {error.message}{hint}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(script())
