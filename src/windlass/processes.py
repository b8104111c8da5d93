"""Child processes that end with their parent, and forked workers that talk to it through pipes."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from windlass.errors import WindlassError

_PR_SET_PDEATHSIG = 1


def usable_cores() -> int:
    """CPU cores this process may use; under a scheduler fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` (or the first call in a forked child) that makes the kernel end the child when this process dies.

    Linux only; elsewhere the child simply lives on.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None)  # loaded here: a forked child of a threaded process should not load libraries

    def in_child() -> None:
        with contextlib.suppress(AttributeError):
            libc.prctl(_PR_SET_PDEATHSIG, int(signal_number))
        if os.getppid() != parent:  # the parent died before prctl: nobody would end this process
            os._exit(1)

    return in_child


class WorkerDiedError(Exception):
    """A forked worker ended without a message."""

    def __init__(self, exit_code: int | None) -> None:
        reason = f"ended with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            advice = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
            reason = f"was killed by {signal.Signals(-exit_code).name}{advice}"
        super().__init__(f"a worker {reason}")


class WorkerFailedError(Exception):
    """An unexpected exception in a forked worker, whose traceback was printed there."""


@dataclass(frozen=True)
class _WorkerEnded:
    replace: bool


class ForkedWorkers:
    """Forked processes, each with a pipe to this one. They end with this process and leave Ctrl-C to it.

    `serve(connection, number)` runs in each worker. When it returns True, a fresh fork takes the worker's place.
    When it raises an OSError or WindlassError, `messages` raises it here; any other exception arrives as
    WorkerFailedError.
    """

    def __init__(self, serve: Callable[[Connection, int], bool | None], count: int) -> None:
        self._serve = serve
        self._workers: dict[int, tuple[Any, Connection]] = {}
        for number in range(count):
            self._start(number)

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        parent_ends = [connection for _, connection in self._workers.values()] + [ours]
        process = context.Process(
            target=_run_worker, args=(self._serve, number, theirs, parent_ends, end_with_parent()), daemon=True
        )
        process.start()
        theirs.close()
        self._workers[number] = (process, ours)

    def replace(self, number: int) -> None:
        """Fork a fresh worker in the place of one that has ended."""
        process, connection = self._workers.pop(number)
        connection.close()
        process.join()
        self._start(number)

    def send(self, number: int, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `messages` reports a worker that died
            self._workers[number][1].send(message)

    def messages(self, timeout_seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """(worker, message) until all workers have ended. A silent death raises WorkerDiedError, silence
        TimeoutError."""
        active = set(self._workers)
        while active:
            numbers = {self._workers[number][1]: number for number in active}
            ready = wait(list(numbers), timeout_seconds)
            if not ready:
                raise TimeoutError(f"no worker answered within {timeout_seconds:g} s")
            for number in [number for connection, number in numbers.items() if connection in ready]:
                process, connection = self._workers[number]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    process.join(5)
                    raise WorkerDiedError(process.exitcode) from None
                if isinstance(message, Exception):
                    raise message
                if not isinstance(message, _WorkerEnded):
                    yield number, message
                elif message.replace:
                    self.replace(number)
                else:
                    active.discard(number)

    def close(self) -> None:
        """End all workers, also those that are busy."""
        for process, connection in self._workers.values():
            connection.close()
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join()


def _run_worker(
    serve: Callable[[Connection, int], bool | None],
    number: int,
    connection: Connection,
    parent_ends: list[Connection],
    end_with_parent_now: Callable[[], None],
) -> None:
    end_with_parent_now()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in parent_ends:  # an inherited copy would hide the parent's death from the worker at the other end
        other.close()
    for handle in list(Path("/proc/self/fd").glob("*")):
        with contextlib.suppress(OSError):
            # An inherited copy would hold the parent's lock after its death.
            if handle.readlink().name.endswith(".lock"):
                os.close(int(handle.name))
    try:
        connection.send(_WorkerEnded(bool(serve(connection, number))))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        os._exit(1)
    except Exception as error:
        if not isinstance(error, (OSError, WindlassError)):
            traceback.print_exc()
            # The exception itself may not survive pickling.
            error = WorkerFailedError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent stopped at another worker's error
            connection.send(error)
