"""Forked workers: messages, failures, replacement and silent deaths."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from windlass import processes
from windlass.errors import DataError
from windlass.processes import ForkedWorkers, WorkerDiedError, WorkerFailedError


def collect(serve: Any, count: int, timeout_seconds: float | None = None) -> list[tuple[int, Any]]:
    workers = ForkedWorkers(serve, count)
    try:
        return sorted(workers.messages(timeout_seconds))
    finally:
        workers.close()


def test_messages_of_all_workers_arrive_with_their_number() -> None:
    assert collect(lambda connection, number: connection.send(number * 10), 3) == [(0, 0), (1, 10), (2, 20)]


def test_a_worker_that_returns_true_is_replaced_by_a_fresh_fork(tmp_path: Any) -> None:
    def serve(connection: Connection, number: int) -> bool:
        first = not (tmp_path / "first").exists()
        (tmp_path / "first").touch()
        connection.send(os.getpid())
        return first

    pids = [pid for _, pid in collect(serve, 1)]
    assert len(set(pids)) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("data.some-code", "message", "hint"), DataError),
        (OSError(28, "No space left on device"), OSError),
        (ValueError("odd"), WorkerFailedError),
    ],
)
def test_errors_reach_the_parent(error: Exception, expected: type[Exception]) -> None:
    def serve(connection: Connection, number: int) -> None:
        raise error

    with pytest.raises(expected) as caught:
        collect(serve, 2)
    assert getattr(caught.value, "code", "data.some-code") == "data.some-code"


def test_a_killed_worker_and_a_silent_one() -> None:
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        collect(lambda *_: os.kill(os.getpid(), signal.SIGKILL), 1)
    with pytest.raises(TimeoutError):
        collect(lambda *_: signal.pause(), 1, timeout_seconds=0.1)


def test_an_error_that_nobody_listens_to_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent stopped at the error of another worker and closed its pipes."""

    class Closed:
        def send(self, message: Any) -> None:
            raise BrokenPipeError

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    processes._run_worker(full, 0, Closed(), [], lambda: None)  # type: ignore[arg-type]
