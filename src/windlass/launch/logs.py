"""The logs of a run's jobs: the newest one, or all of them one after the other while they grow."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.errors import RunError
from windlass.runs import Run

LOG_POLL_SECONDS = 0.5
# How often the scheduler is asked while a log is followed; sites dislike more.
STATE_SECONDS = 3.0


def log_files(run: Run, job: str | None = None) -> list[Path]:
    """Logs of the run, oldest first; only those of one job (or of its array tasks) when it is named."""
    files = sorted(run.logs.glob("*.out"), key=lambda p: p.stat().st_mtime)
    return [p for p in files if job is None or p.stem == job or p.stem.startswith(f"{job}_")]


def read_tail(path: Path, size: int = 65536) -> str:
    """The end of a text file; empty when the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def last_lines(run: Run, *, job: str | None = None, lines: int = 40) -> str:
    files = log_files(run, job)
    if files:
        return _last_lines(files[-1], lines)
    message, hint = (
        f"{run.path} has no logs yet",
        f"`windlass jobs {run.name}` shows whether its jobs are still pending",
    )
    if job is not None:
        with_log = ", ".join(p.stem for p in log_files(run)) or "none yet"
        message, hint = f"job {job} has no log in {run.logs}", f"jobs with a log: {with_log}; a pending job has none"
    raise RunError("launch.no-log", message, hint=hint)


def _last_lines(path: Path, lines: int) -> str:
    text = path.read_text(errors="replace").splitlines(keepends=True)
    return "".join(text[-lines:] if lines else [])


def follow_logs(run: Run, is_active: Callable[[], bool], *, job: str | None = None, lines: int = 40) -> Iterator[str]:
    """Pieces of text as they are written, from job to job, until `is_active` says that no job waits or runs."""
    positions: dict[Path, int] = {}
    asked_at, active = 0.0, True
    while True:
        if time.monotonic() - asked_at >= STATE_SECONDS:
            active, asked_at = is_active(), time.monotonic()
        wrote, first, files = False, not positions, log_files(run, job)
        for path in files:
            if first:  # earlier jobs are not repeated, of the newest only the last lines
                positions[path] = path.stat().st_size
                text = _last_lines(path, lines) if path == files[-1] else ""
            else:
                with path.open("rb") as file:
                    file.seek(positions.get(path, 0))
                    text = file.read(1 << 20).decode("utf-8", "replace")
                    positions[path] = file.tell()
            if text:
                wrote = True
                yield text
        if not wrote and not active:
            return
        if not wrote:
            time.sleep(LOG_POLL_SECONDS)
