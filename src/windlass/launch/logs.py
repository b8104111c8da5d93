"""What do the jobs of a run print? The newest log, or all of them one after the other while they grow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.errors import RunError
from windlass.launch.executor import Executor
from windlass.launch.ledger import entries
from windlass.runs import Run

POLL_SECONDS = 0.5
STATE_SECONDS = 3.0
"""How often the scheduler is asked while a log is followed; sites dislike more."""


def log_files(run: Run, job: str | None = None) -> list[Path]:
    """Logs of the run, oldest first; of one job when it is named."""
    found = sorted(run.logs.glob("*.out"), key=lambda p: p.stat().st_mtime) if run.logs.is_dir() else []
    if job is None:
        return found
    mine = [p for p in found if p.stem == job or p.stem.startswith(f"{job}_")]
    if not mine:
        known = ", ".join(p.stem for p in found) or "none yet"
        raise RunError(
            "launch.job-log",
            f"job {job} has no log in {run.logs}",
            hint=f"jobs with a log: {known}; a job that waits has none",
        )
    return mine


def last_lines(run: Run, *, job: str | None = None, lines: int = 40) -> str:
    files = log_files(run, job)
    if not files:
        raise RunError(
            "launch.logs-yet",
            f"{run.path} has no logs yet",
            hint=f"`windlass jobs {run.name}` shows whether its jobs still wait",
        )
    return _last(files[-1], lines)


def _last(path: Path, lines: int) -> str:
    text = path.read_text(errors="replace").splitlines(keepends=True)
    return "".join(text[-lines:] if lines else [])


def follow_logs(
    run: Run, executors: Mapping[str, Executor], *, job: str | None = None, lines: int = 40
) -> Iterator[str]:
    """Pieces of text as they are written, from link to link, until no job of the run waits or runs."""
    positions: dict[Path, int] = {}
    asked, busy = 0.0, True
    first = True
    while True:
        if time.monotonic() - asked >= STATE_SECONDS:
            busy, asked = _busy(run, executors, job), time.monotonic()
        wrote = False
        files = (
            log_files(run)
            if job is None
            else [p for p in log_files(run) if p.stem == job or p.stem.startswith(f"{job}_")]
        )
        for path in files:
            if first and path != files[-1]:
                positions[path] = path.stat().st_size  # earlier links are not repeated
            text, positions[path] = _grown(path, positions.get(path), lines if first else 0)
            if text:
                wrote = True
                yield text
        first = first and not files
        if not busy and not wrote:
            return
        if not wrote:
            time.sleep(POLL_SECONDS)


def _grown(path: Path, position: int | None, lines: int) -> tuple[str, int]:
    if position is None and lines:
        size = path.stat().st_size
        return _last(path, lines), size
    with path.open("rb") as file:
        file.seek(position or 0)
        data = file.read(1 << 20)
    return data.decode("utf-8", "replace"), (position or 0) + len(data)


def _busy(run: Run, executors: Mapping[str, Executor], job: str | None) -> bool:
    found = [e for e in entries(run, executors) if job in (None, e.job)]
    return any((e.state.waiting or e.state.live) and not e.state.never for e in found)
