"""Requests for a trace of a running run: a small file in the run folder, answered by rank 0 with the first step."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from windlass.errors import ProfileError
from windlass.files import read_json, write_json
from windlass.runs import Run
from windlass.runs.events import Profiled
from windlass.runs.lock import holder

MAX_STEPS = 100
"""A longer window makes a trace that is too large to read."""


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    id: str
    steps: int = 3
    ranks: list[int] = field(default_factory=lambda: [0])  # empty: all ranks
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    first: int | None = None  # the first step of the window; rank 0 fills it in


def request_file(run: Run) -> Path:
    return run.requests / "profile.json"


def answer_file(run: Run) -> Path:
    return run.requests / "profile-window.json"


def submit_request(run: Run, request: TraceRequest) -> None:
    """Write the request into the run folder. Refused when the run is not training: nothing would ever answer it."""
    if not 1 <= request.steps <= MAX_STEPS:
        message, hint = f"a window of {request.steps} steps", f"choose 1 to {MAX_STEPS}; three are usually enough"
        raise ProfileError("profile.window-length-invalid", message, hint=hint)
    if holder(run.lock_file) is None:
        last_step = run.last_metrics().step
        where = f" (last step {last_step})" if last_step is not None else ""
        hint = 'start it, or set profile.steps = "20:23" in its recipe before it starts'
        raise ProfileError("profile.run-not-training", f"{run.name} is not training now{where}", hint=hint)
    write_json(request_file(run), asdict(request))


def read_request(path: Path) -> TraceRequest | None:
    """None when there is none, or when the file is not a valid request: a stray file never ends a run."""
    with contextlib.suppress(TypeError):  # missing or unknown keys, or a number of steps that is not a number
        request = TraceRequest(**(read_json(path) or {}))
        return request if 1 <= request.steps <= MAX_STEPS and isinstance(request.ranks, list) else None
    return None


def answer_request(run: Run, request: TraceRequest, first: int) -> TraceRequest:
    """Rank 0 names the first step, late enough for the other ranks to read it; the request itself is removed."""
    answered = replace(request, first=first)
    write_json(answer_file(run), asdict(answered))
    request_file(run).unlink(missing_ok=True)
    return answered


def wait_for_trace(run: Run, request: TraceRequest, seconds: float, *, poll_seconds: float = 0.5) -> list[str]:
    """Files of the answered request, as paths relative to the run folder; empty when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        events = [event for event in run.events(Profiled) if event.request == request.id]
        files = [file for event in events for file in event.files]
        if files and len(events) >= max(1, len(request.ranks)):
            return files
        if time.monotonic() >= deadline:
            return []
        time.sleep(min(poll_seconds, max(deadline - time.monotonic(), 0.0)))
