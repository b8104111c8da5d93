"""Who starts the workers of one machine, and what happens when one fails? One process per device, restarted from the last checkpoint.

This process never imports torch: it stays small, hears every signal at once and outlives whatever kills a worker. It forwards
signals, gathers the error records, and stops trying when trying again cannot help.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from windlass import errors
from windlass.checkpoint.files import newest_step
from windlass.runs.events import FaultEvent, GaveUp, Restarted
from windlass.runs.faults import INCURABLE, FaultRecord
from windlass.runs.folder import Run

LONGEST_PAUSE_SECONDS = 60.0
LISTEN_HANDLE = "WINDLASS_LISTEN_HANDLE"
"""Rank 0's file descriptor of the socket on which the workers of one machine meet; the other ranks are told its port."""
GRACE_SECONDS = 5.0
"""After the first failure the others get this long to write their own records before they are ended."""
_POLL_SECONDS = 0.05
_STOPPED = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT)


# -- the supervisor's end --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """The failure that began it, of all the failures that followed."""

    rank: int
    kind: str
    error: str
    exit_code: int
    host: str
    hint: str | None = None

    @property
    def signature(self) -> str:
        """The same for the same failure: numbers (process ids, ports, times) are left out."""
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', self.error)}"


@dataclass
class _Attempt:
    """One set of workers."""

    workers: list[subprocess.Popen[bytes]]
    logs: list[IO[bytes]] = field(default_factory=list)
    first_failure: tuple[int, int] | None = None
    """(rank, return code) of the worker that failed first."""


class _Signals:
    """Counts the signals that this process was sent, so that they can be passed on."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.interrupts = 0
        self.stopping = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the run outlives its terminal
            numbers.append(signal.SIGHUP)
        before = {n: signal.signal(n, self._heard) for n in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        self.stopping = True
        self.waiting.append(signal.SIGTERM if number == signal.SIGHUP else number)


def run_workers(
    command: Sequence[str], devices: int, run: Run, max_restarts: int = 3, *, env: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS, pause_seconds: float = 1.0,
) -> int:  # fmt: skip
    """Run `command` once per device until it is done, stopped or hopeless; the exit code that the caller should leave with."""
    heard = _Signals()
    history: list[tuple[str, int | None]] = []
    with heard.taken():
        for attempt in range(max_restarts + 1):
            code, fault = _attempt(command, devices, run, attempt, env, heard, grace_seconds)
            if fault is None:
                return code
            run.record(
                FaultEvent(
                    rank=fault.rank,
                    kind=fault.kind,
                    error=fault.error,
                    host=fault.host,
                    exit_code=fault.exit_code,
                    attempt=attempt,
                )
            )
            history.append((fault.signature, newest_step(run)))
            why = _hopeless(fault, history, heard, max_restarts)
            if why is not None:
                run.record(GaveUp(reason=why, attempts=attempt + 1))
                return fault.exit_code
            if not _pause(pause_seconds * 2 ** _in_a_row(history), heard):
                return 130 if heard.interrupts > 1 else errors.EXIT_RESUMABLE
            run.record(Restarted(attempt=attempt + 1, reason=f"rank {fault.rank}: {fault.kind}: {fault.error}"))
    return 1


def _in_a_row(history: Sequence[tuple[str, int | None]]) -> int:
    """How many failures before the last one came at the same checkpoint: a run that gets on is restarted without delay."""
    steps = [step for _, step in reversed(history)]
    return next((count for count, step in enumerate(steps) if step != steps[0]), len(steps)) - 1


def _pause(seconds: float, heard: _Signals) -> bool:
    """Wait before the next attempt; False as soon as somebody wants to stop."""
    end = time.monotonic() + min(seconds, LONGEST_PAUSE_SECONDS)
    while not heard.stopping and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return not heard.stopping


def _hopeless(
    fault: Fault, history: Sequence[tuple[str, int | None]], heard: _Signals, max_restarts: int
) -> str | None:
    """Why not to try again, or None."""
    if heard.stopping:
        return f"asked to stop, and rank {fault.rank} failed on the way: {fault.error}"
    if fault.exit_code in INCURABLE:
        return f"{INCURABLE[fault.exit_code]}: {fault.error}"
    if len(history) >= 2 and history[-1] == history[-2]:
        step = history[-1][1]
        return f"the same failure twice without a new checkpoint (still at step {step if step is not None else 0}): {fault.kind}: {fault.error}"
    if len(history) > max_restarts:
        return f"{len(history)} failures with {max_restarts} restarts allowed; the last: {fault.kind}: {fault.error}"
    return None


def _attempt(
    command: Sequence[str],
    devices: int,
    run: Run,
    attempt: int,
    env: Mapping[str, str] | None,
    heard: _Signals,
    grace: float,
) -> tuple[int, Fault | None]:
    for rank in range(devices):
        run.error_file(rank).unlink(missing_ok=True)
    current = _start(command, devices, run, attempt, env)
    try:
        _wait(current, heard, grace)
        codes = [worker.returncode for worker in current.workers]  # before our own kill, which is nobody's fault
    finally:
        _kill(current)
    if heard.interrupts > 1:
        return 130, None
    if heard.stopping and all(code is not None and code in (0, errors.EXIT_RESUMABLE, *_STOPPED) for code in codes):
        return errors.EXIT_RESUMABLE, None  # ended by the signal itself, before there was anything to save
    if current.first_failure is None:
        return (errors.EXIT_RESUMABLE if errors.EXIT_RESUMABLE in codes else errors.EXIT_DONE), None
    return 0, find_fault(run, current.first_failure, codes)


def _start(command: Sequence[str], devices: int, run: Run, attempt: int, env: Mapping[str, str] | None) -> _Attempt:
    run.logs.mkdir(parents=True, exist_ok=True)
    run.ranks.mkdir(parents=True, exist_ok=True)
    meeting = listen()
    base = dict(os.environ if env is None else env) | _shared(devices, attempt, meeting)
    base.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // devices)))
    made = _Attempt([])
    end_with_us = _die_with_parent()
    for rank in range(devices):
        output = None if rank == 0 else (run.logs / f"rank-{rank:05d}.log").open("ab")
        if output is not None:
            made.logs.append(output)
        # A session of its own: Ctrl-C in the terminal reaches this process only, which passes it on once.
        made.workers.append(
            subprocess.Popen(
                list(command), env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_us,
                pass_fds=(meeting.fileno(),) if rank == 0 else (),
            )
        )  # fmt: skip
    meeting.close()  # rank 0 has it
    return made


def listen() -> socket.socket:
    """Where the workers will meet. Rank 0 inherits it: a port that was only found free is taken by others while torch is imported."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen(1024)
    return made


def _shared(devices: int, attempt: int, meeting: socket.socket) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting.getsockname()[1]), LISTEN_HANDLE: str(meeting.fileno()), "WINDLASS_ATTEMPT": str(attempt),
    }  # fmt: skip


def _die_with_parent() -> Any:
    """A hook that has the kernel kill a worker when this process dies: two sets of workers must never write one run."""
    libc, set_death_signal, parent = ctypes.CDLL(None), 1, os.getpid()

    def end_with_us() -> None:
        libc.prctl(set_death_signal, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the kernel had promised: nobody would end us, or know of us
            os._exit(1)

    return end_with_us


def _wait(current: _Attempt, heard: _Signals, grace: float) -> None:
    """Until all workers are gone, or `grace` seconds after the first failed."""
    deadline: float | None = None
    while any(worker.poll() is None for worker in current.workers):
        while heard.waiting:
            _forward(current, heard.waiting.pop(0))
        if heard.interrupts > 1:
            return
        if deadline is None and _note_failure(current):
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)
    _note_failure(current)


def _note_failure(current: _Attempt) -> bool:
    if current.first_failure is None:
        failed = [
            (rank, w.returncode)
            for rank, w in enumerate(current.workers)
            if w.returncode not in (None, errors.EXIT_DONE, errors.EXIT_RESUMABLE)
        ]
        current.first_failure = failed[0] if failed else None
    return current.first_failure is not None


def _forward(current: _Attempt, number: int) -> None:
    for worker in current.workers:
        if worker.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(number)


def _kill(current: _Attempt) -> None:
    for worker in current.workers:
        if worker.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # the worker's own session: data loaders go with it
    for worker in current.workers:
        worker.wait()
    for log in current.logs:
        log.close()


def find_fault(run: Run, first: tuple[int, int], codes: Sequence[int | None]) -> Fault:
    """The failure that began it. A rank that was killed writes nothing, and those that lost it only say so.

    Every record is of this start: those of the last one were removed before it, so that no clock has to tell them apart.
    """
    records = sorted((r for r in run.faults() if (r.rank or 0) < len(codes)), key=lambda r: r.time)
    causes = [r for r in records if r.is_cause]
    if causes:
        return _from_record(causes[0], codes)
    rank, code = first
    killed = [(r, c) for r, c in enumerate(codes) if c is not None and c < 0 and not any(x.rank == r for x in records)]
    if killed and not (code < 0):
        rank, code = killed[0]
    if code < 0:
        name = signal.Signals(-code).name
        hint = "the kernel kills a process when host memory runs out: see dmesg" if name == "SIGKILL" else None
        return Fault(rank, "killed", f"the process was ended by {name}", 128 - code, socket.gethostname(), hint)
    if records:
        return _from_record(records[0], codes)
    return Fault(
        rank,
        "crash",
        f"the process ended with exit code {code} and left no record",
        code,
        socket.gethostname(),
        f"see {_log_of(run, rank)}",
    )


def _from_record(record: FaultRecord, codes: Sequence[int | None]) -> Fault:
    rank = record.rank or 0
    code = errors.EXIT_HANG if record.kind == "hang" else record.exit_code or codes[rank] or 1
    blamed = rank if record.culprit is None else record.culprit
    return Fault(blamed, str(record.kind), record.error, code, str(record.host), record.hint)


def _log_of(run: Run, rank: int) -> Path:
    return run.logs / f"rank-{rank:05d}.log"
