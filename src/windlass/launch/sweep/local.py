"""How do points run on one machine? One after another, each in a folder of its own, under its limits; Ctrl-C loses only the running one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from windlass.clusters.scheduler import job_id
from windlass.config.sweep import LoadedSweep, SweepConfig
from windlass.errors import ConfigError
from windlass.launch.sweep.expect import Expectation
from windlass.launch.sweep.folder import SweepFolder
from windlass.launch.sweep.kernel import oom_kills
from windlass.launch.sweep.outcome import COMMAND_MARK, Outcome, classify
from windlass.launch.sweep.points import Point
from windlass.launch.sweep.results import collect_rows, read_results, write_tables
from windlass.runs.lock import locked

END_SECONDS = 15.0
"""A point that is asked to end gets this long before it is killed."""
TABLE_SHARE = 0.05
"""Of the time that the points take, at most, for tables while they run."""
MARK = "WINDLASS_POINT"
"""In the environment of everything a point starts: its folder."""
Say = Callable[[Point, str], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be done: the points, what is expected of them, and which of them are chosen."""

    loaded: LoadedSweep
    folder: SweepFolder
    points: Sequence[Point]
    expected: Sequence[Expectation]

    @property
    def sweep(self) -> SweepConfig:
        return self.loaded.sweep

    @cached_property
    def _expected(self) -> dict[str, Expectation]:
        return {point.name: expected for point, expected in zip(self.points, self.expected, strict=True)}

    def expectation(self, point: Point) -> Expectation:
        return self._expected[point.name]


def choose(work: Work, only: set[str] | None, names: Sequence[str] | None = None, *, everything: bool = False) -> list[Point]:  # fmt: skip
    """Points without an outcome, or those whose outcome is of a class to repeat. What would surely not fit is left out once."""
    done = work.folder.outcomes()
    _check_known(work, names or ())
    chosen = []
    for point in work.points:
        last = done.get(point.name, {}).get("outcome")
        wanted = last is None if only is None else last in only
        wanted = wanted or (last == "skipped" and everything)
        if wanted and (not names or point.name in names):
            chosen.append(point)
    return chosen


def _check_known(work: Work, names: Sequence[str]) -> None:
    known = {p.name for p in work.points}
    missing = [name for name in names if name not in known]
    if missing:
        from difflib import get_close_matches

        near = get_close_matches(missing[0], sorted(known), n=3, cutoff=0.3)
        raise ConfigError(
            "launch.point-sweep",
            f"there is no point {', '.join(missing)} in this sweep",
            hint=f"did you mean {' or '.join(near)}?" if near else "--dry-run lists the points",
        )


def run_points(
    work: Work,
    points: Sequence[Point],
    say: Say,
    *,
    everything: bool = False,
    step: Sequence[str] = (),
    lock: Path | None = None,
) -> dict[str, str]:
    """Run them in order; point -> outcome. `step` comes before each command (srun inside an allocation)."""
    found: dict[str, str] = {}
    tables = LiveTables(work)
    with locked(lock or work.folder.lock_file, job_id()):
        for point in points:
            say(point, "runs")
            end_leftovers(work.folder.point(point.name).path)
            outcome = run_point(work, point, everything=everything, step=step)
            found[point.name] = outcome.outcome
            tables.write(last=point is points[-1])
            say(point, outcome.outcome + (f": {outcome.detail}" if outcome.outcome != "ok" else ""))
    return found


class LiveTables:
    """The tables that the dashboard follows. Hundreds of short points would spend their time on them: they get a share of it."""

    def __init__(self, work: Work) -> None:
        self.work, self._next = work, 0.0

    def write(self, *, last: bool) -> None:
        began = time.monotonic()
        if began < self._next and not last:
            return
        with contextlib.suppress(OSError):  # they are written again at the end
            write_tables(self.work, collect_rows(self.work))
        self._next = time.monotonic() + (time.monotonic() - began) / TABLE_SHARE


def run_point(work: Work, point: Point, *, everything: bool = False, step: Sequence[str] = ()) -> Outcome:
    expected = work.expectation(point)
    if expected.verdict == "illegal":
        return _keep(work, point, Outcome(outcome="error", evidence="plan", detail=expected.reason), None)
    if expected.skip and not everything:
        return _keep(work, point, Outcome(outcome="skipped", evidence="plan", detail=expected.reason), None)
    work.folder.set_aside(point.name)
    run = work.folder.point(point.name)
    log = work.folder.log(point.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    work.folder.begin(point.name, job_id())
    began, killed, results = time.time(), oom_kills() or 0, Results.of(work, point)
    code, timed_out = _execute(command_of(work, point, step), log, point)
    killed = (oom_kills() or 0) - killed
    outcome = classify(run, code, log=log, timed_out=timed_out, since=began, oom_kills=killed)
    return _keep(work, point, results.check(outcome), time.time() - began)


@dataclass(frozen=True)
class Results:
    """The file in which a command leaves its numbers, as it was before the command ran: numbers of an earlier run are not its own."""

    path: Path | None
    before: tuple[int, ...] | None

    @classmethod
    def of(cls, work: Work, point: Point) -> Results:
        if point.recipe is not None or work.sweep.results is None:
            return cls(None, None)
        path = point.results_file(work.folder.point(point.name).path, work.sweep.results)
        return cls(path, _stamp(path))

    def check(self, outcome: Outcome) -> Outcome:
        """A command that ended well but left no valid results did not end well."""
        if outcome.outcome != "ok" or self.path is None:
            return outcome
        try:
            read_results(self.path)
        except ConfigError as error:
            return self._invalid(error.message)
        if self.before is not None and _stamp(self.path) == self.before:
            return self._invalid(f"the results file {self.path} was there before, and the command did not write it")
        return outcome

    def _invalid(self, why: str) -> Outcome:
        return Outcome(outcome="error", evidence="results", detail=why, file=str(self.path), exit_code=0)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _keep(work: Work, point: Point, outcome: Outcome, seconds: float | None) -> Outcome:
    work.folder.add_outcome({"point": point.name, "seconds": seconds, **outcome.as_dict()})
    return outcome


def command_of(work: Work, point: Point, step: Sequence[str] = ()) -> list[str]:
    """What a point starts: `windlass train` with its recipe, or the sweep's own command."""
    run = work.folder.point(point.name).path
    if point.recipe is None:
        return [*step, *point.command(run)]
    # A point is not resumed: it uses its allocation to the end. The lead for a last save (five minutes) would stop the last points of every pack.
    lead = ["save.lead=0"] if job_id() is not None and point.recipe.save.lead == "auto" else []
    words = [sys.executable, "-m", "windlass", "train", str(work.folder.recipe(point.name)), *lead, "--run", str(run)]
    if step:  # the scheduler starts one task per device
        return [*step, *words]
    return [*words, "--devices", str(point.devices or 1), "--restarts", str(work.sweep.restarts)]


def _execute(command: Sequence[str], log: Path, point: Point) -> tuple[int, float | None]:
    """Exit code, and the limit where that ended it."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", MARK: str(log.parents[1].absolute())}
    with log.open("ab") as output:
        output.write(f"{COMMAND_MARK}{' '.join(shlex.join(command).splitlines())}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env,
                start_new_session=True, preexec_fn=_limits(point.memory_limit),
            )  # fmt: skip
        except OSError as error:
            output.write(f"error: {command[0]} cannot be started: {error.strerror}\n".encode())
            return 127, None
        with _ended(process):
            try:
                return process.wait(timeout=point.time_limit), None
            except subprocess.TimeoutExpired:
                return end(process), point.time_limit


def _limits(memory: int | None) -> Callable[[], None]:
    """In the child: a limit on its private memory (and on that of every process it starts), and an end together with us."""
    libc, set_death_signal = ctypes.CDLL(None), 1

    def apply() -> None:
        libc.prctl(set_death_signal, int(signal.SIGTERM))
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    return apply


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens to us (Ctrl-C), the point does not live on."""
    try:
        yield
    except BaseException:
        end(process)
        raise


def end_leftovers(folder: Path) -> int:
    """A sweep that was killed outright could not end its point: whatever of it still runs would write into the new try's folder."""
    mark, count = f"{MARK}={folder.absolute()}".encode(), 0
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
                count += 1
    return count


def end(process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
