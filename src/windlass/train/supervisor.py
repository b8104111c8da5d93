"""Starts one worker per device on this machine and restarts them from the last checkpoint when one fails.

This process never imports torch: it stays small, receives every signal at once and outlives whatever kills a worker.
It forwards signals, reads the fault records, and stops trying when a restart cannot help."""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType

from windlass import errors
from windlass.checkpoint.files import newest_step
from windlass.clusters.scheduler import job_id
from windlass.processes import end_with_parent, usable_cores
from windlass.runs.events import FaultEvent, GaveUp, Restarted
from windlass.runs.faults import INCURABLE, FaultRecord, write_fault
from windlass.runs.folder import Run, open_run
from windlass.runs.lock import locked
from windlass.runs.starts import Start, wait_for_start, write_start
from windlass.train.signals import handled_signals

MAX_PAUSE_SECONDS = 60.0
# Environment variable with rank 0's file descriptor of the socket on which the workers of one machine meet.
LISTEN_HANDLE = "WINDLASS_LISTEN_HANDLE"
# After the first failure the others get this long to write their own records before they are ended. A death is named
# within 5 s: gloo ends the others at once, other collective libraries keep them waiting until this has passed.
GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_STOPPED = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT)


@dataclass(frozen=True)
class WorkerFault:
    """The failure that came first, of all the failures that followed from it."""

    rank: int
    kind: str
    error: str
    exit_code: int
    host: str


class ForwardedSignals:
    """Signals that this process received and has to pass on to the workers."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.interrupts, self.stopping = 0, False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        self.stopping = True
        self.waiting.append(signal.SIGTERM if number == signal.SIGHUP else number)


class WorkerGroup:
    """The workers of one attempt."""

    def __init__(self, argv: Sequence[str], devices: int, run: Run, env: Mapping[str, str] | None) -> None:
        # (rank, return code) of the worker that failed first.
        self.first_failure: tuple[int, int] | None = None
        run.logs.mkdir(parents=True, exist_ok=True)
        run.ranks.mkdir(parents=True, exist_ok=True)
        self.logs = [(run.logs / f"rank-{rank:05d}.log").open("ab") for rank in range(1, devices)]
        with_parent = end_with_parent()  # two sets of workers must never write one run

        def before_worker() -> None:
            with_parent()
            # Ctrl-C waits until `worker.script` takes it: a traceback of Python's imports helps nobody.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

        # Rank 0 inherits the bound socket: a port that was only free before is taken by others while torch is imported.
        with socket.socket() as meeting:
            meeting.bind(("127.0.0.1", 0))
            meeting.listen(1024)
            shared = {
                "OMP_NUM_THREADS": str(max(1, usable_cores() // devices)),
                **(os.environ if env is None else env),
                "WORLD_SIZE": str(devices),
                "LOCAL_WORLD_SIZE": str(devices),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(meeting.getsockname()[1]),
                LISTEN_HANDLE: str(meeting.fileno()),
            }
            self.workers = [
                subprocess.Popen(
                    list(argv),
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    # A session of its own: Ctrl-C in the terminal reaches this process only, which passes it on once.
                    start_new_session=True,
                    preexec_fn=before_worker,
                    pass_fds=(meeting.fileno(),) if rank == 0 else (),
                )
                for rank, output in enumerate([None, *self.logs])
            ]

    def poll(self) -> bool:
        """Update every worker and note the first failure; whether one is still alive."""
        codes = [worker.poll() for worker in self.workers]
        good = (errors.EXIT_DONE, errors.EXIT_RESUMABLE)
        failures = ((rank, code) for rank, code in enumerate(codes) if code is not None and code not in good)
        self.first_failure = self.first_failure or next(failures, None)
        return None in codes

    def kill(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)  # the worker's own session: data loaders go with it
        for worker in self.workers:
            worker.wait()
        for log in self.logs:
            log.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m windlass.train.supervisor RUN --start NAME`: all workers of a start on this machine; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m windlass.train.supervisor", description=__doc__)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--start", required=True, help="name of the start")
    parser.add_argument("--restarts", type=int, default=3, help="how often failed workers are restarted")
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    start = wait_for_start(run, options.start)
    with locked(run.lock_file, job_id()):
        return run_workers(worker_argv(run, start), start.devices, run, options.restarts)


def worker_argv(run: Run, start: Start, *options: str) -> Callable[[int], list[str]]:
    """The command of a start's workers by attempt. A restart is a start of its own: its file is written here."""

    def argv(attempt: int) -> list[str]:
        current = replace(start, restart=start.restart + attempt)
        if attempt:
            write_start(run, current)
        worker = [sys.executable, "-m", "windlass.train.worker", str(run.path)]
        return [*worker, "--start", current.name, "--locked", *options]

    return argv


def run_workers(
    argv: Callable[[int], Sequence[str]],
    devices: int,
    run: Run,
    max_restarts: int = 3,
    *,
    env: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    pause_seconds: float = 1.0,
) -> int:
    """Run `argv(attempt)` once per device until it is done, stopped or incurable; the exit code to leave with."""
    signals = ForwardedSignals()
    history: list[tuple[str, int | None]] = []
    with handled_signals(signals.handle):
        for attempt in range(max_restarts + 1):
            code, fault = _run_attempt(argv(attempt), devices, run, env, signals, grace_seconds)
            if fault is None:
                return code
            run.record(FaultEvent(**asdict(fault), attempt=attempt))
            # The same failure has the same signature: numbers (process ids, ports, times) are left out.
            history.append((f"{fault.kind}: {re.sub(r'[0-9]+', '#', fault.error)}", newest_step(run)))
            reason = reason_to_stop(fault, history, signals.stopping, max_restarts)
            if reason is not None:
                run.record(GaveUp(reason=reason, attempts=attempt + 1))
                return fault.exit_code
            # Failures in a row at the same checkpoint wait longer and longer; a run that moves on restarts at once.
            steps = [step for _, step in reversed(history)]
            in_a_row = next((n for n, step in enumerate(steps) if step != steps[0]), len(steps)) - 1
            deadline = time.monotonic() + min(pause_seconds * 2**in_a_row, MAX_PAUSE_SECONDS)
            while not signals.stopping and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if signals.stopping:
                return 130 if signals.interrupts > 1 else errors.EXIT_RESUMABLE
            run.record(Restarted(attempt=attempt + 1, reason=f"rank {fault.rank}: {fault.kind}: {fault.error}"))
    return 1


def reason_to_stop(
    fault: WorkerFault, history: Sequence[tuple[str, int | None]], stopping: bool, max_restarts: int
) -> str | None:
    """Why not to restart, or None. `history`: signature of each failure and the newest checkpoint's step at that
    time."""
    if stopping:
        return f"a stop was requested, and rank {fault.rank} failed while stopping: {fault.error}"
    if fault.exit_code in INCURABLE:
        return f"{INCURABLE[fault.exit_code]}: {fault.error}"
    if len(history) >= 2 and history[-1] == history[-2]:
        return (
            f"the same failure twice without a new checkpoint (still at step {history[-1][1] or 0}): "
            f"{fault.kind}: {fault.error}"
        )
    if len(history) > max_restarts:
        return f"{len(history)} failures with {max_restarts} restarts allowed; the last: {fault.kind}: {fault.error}"
    return None


def _run_attempt(
    argv: Sequence[str],
    devices: int,
    run: Run,
    env: Mapping[str, str] | None,
    signals: ForwardedSignals,
    grace_seconds: float,
) -> tuple[int, WorkerFault | None]:
    for rank in range(devices):
        run.error_file(rank).unlink(missing_ok=True)
    group = WorkerGroup(argv, devices, run, env)
    try:
        deadline: float | None = None
        while group.poll():
            while signals.waiting:
                number = signals.waiting.pop(0)
                for worker in group.workers:
                    worker.send_signal(number)
            if signals.interrupts > 1 or (deadline is not None and time.monotonic() > deadline):
                break
            if deadline is None and group.first_failure is not None:
                deadline = time.monotonic() + grace_seconds
            time.sleep(_POLL_SECONDS)
        codes = [worker.returncode for worker in group.workers]  # before our own kill, which is nobody's fault
    finally:
        group.kill()
    if signals.interrupts > 1:
        return 130, None
    if signals.stopping and all(code in (0, errors.EXIT_RESUMABLE, *_STOPPED) for code in codes):
        return errors.EXIT_RESUMABLE, None  # ended by the signal itself, before there was anything to save
    if group.first_failure is None:
        return (errors.EXIT_RESUMABLE if errors.EXIT_RESUMABLE in codes else errors.EXIT_DONE), None
    return 0, find_fault(run, group.first_failure, codes)


def find_fault(run: Run, first: tuple[int, int], codes: Sequence[int | None]) -> WorkerFault:
    """The failure that came first. A rank that was killed writes nothing, and those that lost it only report that.

    Every record is of this attempt: those of the last one were removed before it, so that no clock has to tell them
    apart."""
    records = sorted((r for r in run.faults() if (r.rank or 0) < len(codes)), key=lambda r: r.time)
    causes = [r for r in records if r.is_cause]
    rank, code = first
    killed = [(r, c) for r, c in enumerate(codes) if c is not None and c < 0 and not any(x.rank == r for x in records)]
    if killed and code >= 0:
        rank, code = killed[0]
    if causes or (records and code >= 0):
        record = (causes or records)[0]
        rank = record.rank or 0
        code = errors.EXIT_HANG if record.kind == "hang" else record.exit_code or codes[rank] or 1
        blamed = rank if record.culprit is None else record.culprit
        return WorkerFault(blamed, str(record.kind), record.error, code, str(record.host))
    if code < 0:
        return killed_worker(rank, -code)
    error = f"the process ended with exit code {code} and left no record"
    return WorkerFault(rank, "crash", error, code, socket.gethostname())


def killed_worker(rank: int, number: int) -> WorkerFault:
    error = f"the process was ended by {signal.Signals(number).name}"
    return WorkerFault(rank, "killed", error, 128 + number, socket.gethostname())


def attend(run: Run, rank: int) -> None:
    """Fork: the caller goes on as the child, and its parent stays. Each records at once that a signal ended the other.

    For the ranks of srun, which have no supervisor: srun ends the others of a killed rank two minutes later, and its
    own message is in the job's log only. SLURM sends signals to both processes, so the parent ignores them."""
    parent, (reader, writer) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)

        def leave_with_parent() -> None:
            os.read(reader, 1)  # returns when the kernel closes the parent's end
            _record_killed(run, killed_worker(rank, signal.SIGKILL), parent)
            os._exit(128 + signal.SIGKILL)

        threading.Thread(target=leave_with_parent, name="windlass-parent", daemon=True).start()
        return
    os.close(reader)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    if code not in _STOPPED:
        _record_killed(run, killed_worker(rank, -code), child)
    os._exit(128 - code)


def _record_killed(run: Run, fault: WorkerFault, pid: int) -> None:
    with contextlib.suppress(OSError):
        write_fault(run, FaultRecord(**asdict(fault), pid=pid, time=time.time()))
        run.record(FaultEvent(**asdict(fault)))


if __name__ == "__main__":
    sys.exit(main())
