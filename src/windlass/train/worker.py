"""A training worker: `python -m windlass.train.worker RUN`. Reads the run's config and its start; plans nothing."""

from __future__ import annotations

import argparse
import contextlib
import sys

from windlass.clusters.scheduler import Place, job_id, place, restart_count
from windlass.errors import ConfigError, WindlassError
from windlass.runs.faults import exit_code_of, kind_of
from windlass.runs.folder import Run, open_run
from windlass.runs.lock import locked
from windlass.runs.starts import Start, start_name, wait_for_start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m windlass.train.worker", description=__doc__)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--start", help="name of the start, given by the supervisor (default: this job's)")
    parser.add_argument("--store", help="copy of the token store on a disk of this node")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    options = parser.parse_args(arguments)
    here = place()
    try:
        run = open_run(options.run)
        name = options.start or start_name(job_id() or "local", restart_count())
        start = wait_for_start(run, name)
        # The supervisor holds the lock where there is one.
        own_lock = here.rank == 0 and options.start is None
        with locked(run.lock_file, job_id()) if own_lock else contextlib.nullcontext():
            return work(run, start, here, quiet=options.quiet, store=options.store)
    except WindlassError as error:
        if here.rank == 0 or not isinstance(error, ConfigError):  # every rank finds the same; rank 0 says it once
            print(f"error: {error.message}", file=sys.stderr)
            if error.hint:
                print(f"hint:  {error.hint}", file=sys.stderr)
        return exit_code_of(error)


def work(run: Run, start: Start, here: Place, *, quiet: bool = False, store: str | None = None) -> int:
    """Train this rank's part of a start; the exit code. `store` replaces the recipe's path of the token store."""
    from windlass.train.loop import run as train_run
    from windlass.train.mesh import leave
    from windlass.train.profiler import Profiler
    from windlass.train.progress import ProgressDisplay
    from windlass.train.tracking import Trackers

    recipe = run.recipe()
    if store is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"store": store})})
    display = ProgressDisplay(quiet=quiet or here.rank != 0)
    display.say(f"layout: {start.reason}" if start.reason else "")
    try:
        code = train_run(recipe, run, start, here, [Profiler(), display, Trackers()], display.say)
    except WindlassError:
        raise
    except Exception as error:
        if kind_of(error) != "lost":
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WindlassError(
            "train.worker-lost",
            f"another worker went away while this one waited for it ({first[:160]})",
            hint=f"see {run.ranks} for that worker's error; the run continues from its last checkpoint when it is restarted",
        ) from error
    leave()
    return code


if __name__ == "__main__":
    sys.exit(main())
