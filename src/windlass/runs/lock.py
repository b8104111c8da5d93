"""The lock file that keeps two jobs from writing one run; the lock of a dead process is taken over."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from windlass.errors import RunError
from windlass.files import read_json

# A lock of another host that nobody has touched for this long is taken over: its job is gone.
STALE_SECONDS = 3600.0


@contextlib.contextmanager
def locked(path: Path, job: str | None = None) -> Iterator[None]:
    """Hold `path` as a lock during the block; `job` is the scheduler's id where there is one.

    flock is dropped by the kernel when the process dies, so a crash leaves nothing to clean up. Where a parallel file
    system has no flock, the file's own record (host, pid, time) decides.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if _take(file, path) is not None:
            raise _busy(path)
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": time.time()}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def refuse_held(path: Path) -> None:
    """Raise when somebody holds the lock: before anything in the folder is changed."""
    if holder(path) is not None:
        raise _busy(path)


def touch(path: Path) -> None:
    """Tell other hosts that the holder lives; called with the heartbeat."""
    with contextlib.suppress(OSError):
        os.utime(path)


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock now, or None."""
    if not path.exists():
        return None
    with path.open("a+") as file:  # closing it drops the lock again
        return _take(file, path)


def _take(file: IO[str], path: Path) -> dict[str, Any] | None:
    """Take the lock; the record of the process that has it where that is another one."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return read_json(path) or {}
    except OSError:  # no flock on this file system
        record = read_json(path) or {}
        pid, since = record.get("pid"), record.get("since")
        is_fresh = isinstance(since, (int, float)) and time.time() - since < STALE_SECONDS
        is_alive = Path(f"/proc/{pid}").exists() if record.get("host") == socket.gethostname() else is_fresh
        return record if isinstance(pid, int) and is_alive else None
    return None


def _busy(path: Path) -> RunError:
    record = read_json(path) or {}
    job = f", job {record['job']}" if record.get("job") else ""
    who = f"host {record.get('host', 'unknown')}, pid {record.get('pid', 'unknown')}{job}"
    return RunError(
        "runs.locked",
        f"another process is writing to {path.parent} ({who})",
        hint="wait for it, stop it, or choose another folder with --run",
    )
