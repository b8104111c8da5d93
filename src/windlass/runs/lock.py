"""The lock file that keeps two jobs from writing one run; the lock of a dead process is taken over."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(path) from None
        except OSError:  # no flock on this file system
            if _alive(read_json(path)):
                raise _busy(path) from None
        file.seek(0)
        file.truncate()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": time.time()}
        file.write(json.dumps(owner))
        file.flush()
        try:
            yield
        finally:
            file.seek(0)
            file.truncate()
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


def holder(path: Path) -> dict[str, object] | None:
    """Who holds the lock now, or None."""
    if not path.exists():
        return None
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_json(path) or {}
        except OSError:
            record = read_json(path)
            return record if _alive(record) else None
        fcntl.flock(file, fcntl.LOCK_UN)
    return None


def _alive(record: dict[str, object] | None) -> bool:
    if not record or not isinstance(record.get("pid"), int):
        return False
    if record.get("host") == socket.gethostname():
        return Path(f"/proc/{record['pid']}").exists()
    since = record.get("since")
    return isinstance(since, (int, float)) and time.time() - since < STALE_SECONDS


def _busy(path: Path) -> RunError:
    record = read_json(path) or {}
    who = f"host {record.get('host', 'unknown')}, pid {record.get('pid', 'unknown')}" + (
        f", job {record['job']}" if record.get("job") else ""
    )
    return RunError(
        "runs.locked",
        f"{path.parent} is being written by another process ({who})",
        hint="wait for it, stop it, or choose another folder with --run",
    )
