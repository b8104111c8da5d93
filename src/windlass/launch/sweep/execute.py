"""Runs points on this machine one after another, each in its own folder and under its limits.

Ctrl-C loses only the point that is running.
"""

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from windlass.clusters.scheduler import job_id, without_step_options
from windlass.config import load_recipe
from windlass.config.secret import redact_text
from windlass.errors import ConfigError, WindlassError
from windlass.launch.start import bind_start, create_planned_run, local_cluster
from windlass.launch.sweep.command import srun_request
from windlass.launch.sweep.folder import SweepRun
from windlass.launch.sweep.outcome import COMMAND_MARK, PointOutcome, classify, oom_kills
from windlass.launch.sweep.points import SweepPoint
from windlass.launch.sweep.results import collect_rows, read_results, write_tables
from windlass.processes import end_with_parent
from windlass.runs.faults import record_fault
from windlass.runs.lock import locked

END_SECONDS = 15.0  # a point that is asked to end gets this long before it is killed
TABLE_SHARE = 0.05  # maximum share of the run time for writing tables while points run
POINT_VARIABLE = "WINDLASS_POINT"  # in the environment of everything a point starts: its folder


@dataclass(frozen=True)
class StepLauncher:
    """What starts one task per device of several nodes inside an allocation (srun)."""

    argv: tuple[str, ...]
    nodes: int
    devices_per_node: int


def choose_points(
    sweep_run: SweepRun, only: set[str] | None, names: Sequence[str] | None = None, *, everything: bool = False
) -> list[SweepPoint]:
    """Points without an outcome, or those whose outcome is in `only`. Skipped points are chosen with `everything`."""
    by_name = {point.name: point for point in sweep_run.points}
    missing = [name for name in names or () if name not in by_name]
    if missing:
        near = get_close_matches(missing[0], sorted(by_name), n=3, cutoff=0.3)
        raise ConfigError(
            "sweep.unknown-point",
            f"there is no point {', '.join(missing)} in this sweep",
            hint=f"did you mean {' or '.join(near)}?" if near else "list the points with --dry-run",
        )
    last = {name: line["outcome"] for name, line in sweep_run.folder.outcomes().items()}
    repeated = {*(only or ()), *(["skipped"] if everything else [])}
    return [
        point
        for name, point in by_name.items()
        if (not names or name in names) and (last[name] in repeated if name in last else only is None)
    ]


def run_points(
    sweep_run: SweepRun,
    points: Sequence[SweepPoint],
    report: Callable[[SweepPoint, PointOutcome | None], None] = lambda point, outcome: None,
    *,
    everything: bool = False,
    launcher: StepLauncher | None = None,
    lock: Path | None = None,
) -> dict[str, str]:
    """Run them in order; point -> outcome. `launcher` starts each command once per device.

    `report` is called at the start of each point (with None) and at its end.
    """
    outcomes: dict[str, str] = {}
    tables = LiveTables(sweep_run)
    with locked(lock or sweep_run.folder.path / "sweep.lock", job_id()):
        for point in points:
            report(point, None)
            end_leftovers(sweep_run.folder.point(point.name).path)
            outcome = run_point(sweep_run, point, everything=everything, launcher=launcher)
            outcomes[point.name] = outcome.outcome
            tables.write(last=point is points[-1])
            report(point, outcome)
    return outcomes


class LiveTables:
    """The tables that the dashboard follows. With hundreds of short points they are updated less often."""

    def __init__(self, sweep_run: SweepRun) -> None:
        self.sweep_run, self._not_before = sweep_run, 0.0

    def write(self, *, last: bool) -> None:
        started_at = time.monotonic()
        if started_at < self._not_before and not last:
            return
        with contextlib.suppress(OSError):  # they are written again at the end
            write_tables(self.sweep_run, collect_rows(self.sweep_run))
        self._not_before = time.monotonic() + (time.monotonic() - started_at) / TABLE_SHARE


def run_point(
    sweep_run: SweepRun, point: SweepPoint, *, everything: bool = False, launcher: StepLauncher | None = None
) -> PointOutcome:
    """Run one point, unless the planner says that it is invalid or would not fit, and record its outcome."""
    expected, folder = sweep_run.expectations[point.name], sweep_run.folder
    seconds = None
    if expected.verdict == "illegal" or (expected.skip and not everything):
        outcome = PointOutcome(
            outcome="error" if expected.verdict == "illegal" else "skipped", evidence="plan", detail=expected.reason
        )
    else:
        folder.set_aside(point.name)
        run, log = folder.point(point.name), folder.log(point.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        folder.begin(point.name, job_id())
        named = sweep_run.sweep.results if point.recipe is None else None
        results = point.results_file(run.path, named) if named is not None else None
        stamp, started_at, kills = _stamp(results), time.time(), oom_kills() or 0
        try:
            command = command_of(sweep_run, point, launcher)
        except WindlassError as error:  # the recipe, its layout or its cluster: a result of this point
            log.write_text(f"error: {error.message}\n" + (f"hint:  {error.hint}\n" if error.hint else ""))
            record_fault(run, 0, error)
            code, timed_out = error.exit_code, None
        else:
            code, timed_out = _execute(command, log, point)
        kills = (oom_kills() or 0) - kills
        outcome = classify(run, code, log=log, timed_out=timed_out, since=started_at, oom_kills=kills)
        if outcome.outcome == "ok" and results is not None:
            fault = ""
            if stamp is not None and _stamp(results) == stamp:  # the file is from an earlier run
                fault = f"the results file {results} existed before, and the command did not write it"
            try:
                read_results(results)
            except ConfigError as error:
                fault = error.message
            if fault:
                outcome = PointOutcome(
                    outcome="error", evidence="results", detail=fault, file=str(results), exit_code=0
                )
        seconds = time.time() - started_at
    folder.add_outcome({"point": point.name, "seconds": seconds, **asdict(outcome)})
    return outcome


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Changes when the file is written; None when there is no file."""
    if path is None or not path.exists():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def command_of(sweep_run: SweepRun, point: SweepPoint, launcher: StepLauncher | None = None) -> list[str]:
    """What a point starts: the sweep's own command, or the workers of a recipe. Creates the run and its start first."""
    folder = sweep_run.folder.point(point.name).path
    if point.recipe is None:
        return [*(launcher.argv if launcher else ()), *point.command(folder)]
    # A point is not resumed: it uses its allocation to the end. A lead for a last save would stop
    # the last points of a pack.
    lead = ["save.lead=0"] if job_id() is not None and point.recipe.save.lead == "auto" else []
    loaded = load_recipe(sweep_run.folder.recipe(point.name), lead)
    nodes, per_node = (launcher.nodes, launcher.devices_per_node) if launcher else (1, point.devices or 1)
    run, reason = create_planned_run(folder, loaded, local_cluster(loaded.recipe, per_node), nodes)
    start = bind_start(run, devices=nodes * per_node, devices_per_node=per_node, reason=reason)
    argv = [str(run.path), "--start", start.name]
    if launcher is None and per_node > 1:
        return [sys.executable, "-m", "windlass.train.supervisor", *argv, "--restarts", str(sweep_run.sweep.restarts)]
    return [*(launcher.argv if launcher else ()), sys.executable, "-m", "windlass.train.worker", *argv]


def _execute(command: Sequence[str], log: Path, point: SweepPoint) -> tuple[int, float | None]:
    """The exit code, and the time limit where that ended the point."""
    calls_srun = point.recipe is None and srun_request(point) is not None
    env = without_step_options(os.environ) if calls_srun else dict(os.environ)
    env |= {"PYTHONUNBUFFERED": "1", POINT_VARIABLE: str(log.parents[1].absolute())}
    end_with_us = end_with_parent(signal.SIGTERM)

    def in_child() -> None:
        end_with_us()
        if point.memory_limit is not None:  # private memory, of every process it starts
            resource.setrlimit(resource.RLIMIT_DATA, (point.memory_limit, point.memory_limit))

    with log.open("ab") as output:
        output.write(f"{COMMAND_MARK}{redact_text(' '.join(shlex.join(command).splitlines()))}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                list(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except OSError as error:
            output.write(f"error: {command[0]} cannot be started: {error.strerror}\n".encode())
            return 127, None
        try:
            return process.wait(timeout=point.time_limit), None
        except subprocess.TimeoutExpired:
            return end_group(process), point.time_limit
        except BaseException:  # Ctrl-C: the point must not keep running
            end_group(process)
            raise


def end_leftovers(folder: Path) -> None:
    """Kill what still runs of a point after its sweep was killed: it would write into the folder of the new attempt."""
    mark = f"{POINT_VARIABLE}={folder.absolute()}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


def end_group(process: subprocess.Popen[bytes]) -> int:
    """Ask a point to end, and kill it after END_SECONDS or at a second Ctrl-C."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        return process.wait(timeout=END_SECONDS)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, (ProcessLookupError, subprocess.TimeoutExpired)):
            raise
    return process.wait()
