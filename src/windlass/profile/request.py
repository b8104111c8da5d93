"""How does another shell ask a live run for a trace? With a small file in the run folder; rank 0 answers with the steps."""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from windlass.errors import ProfileError
from windlass.files import read_json, write_json
from windlass.runs import Run
from windlass.runs.events import Profiled
from windlass.runs.lock import holder

MAX_STEPS = 100
"""A longer window makes a trace that nobody can read."""


@dataclass(frozen=True, kw_only=True)
class Request:
    id: str
    steps: int = 3
    ranks: list[int] = field(default_factory=lambda: [0])
    """Empty: all ranks."""
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    first: int | None = None
    """The first step of the window; rank 0 fills it in."""


def request_file(run: Run) -> Path:
    return run.requests / "profile.json"


def answer_file(run: Run) -> Path:
    return run.requests / "profile-window.json"


def ask(
    run: Run,
    *,
    steps: int = 3,
    ranks: list[int] | None = None,
    shapes: bool = False,
    stacks: bool = False,
    memory: bool = False,
) -> Request:
    """Put the request into the run folder. A run that nobody is training is refused: the request would lie there for ever."""
    if not 1 <= steps <= MAX_STEPS:
        raise ProfileError(
            "profile.window-steps",
            f"a window of {steps} steps",
            hint=f"choose 1 to {MAX_STEPS}; three are usually enough",
        )
    if holder(run.lock_file) is None:
        last = run.last_metrics().step
        where = f" (last step {last})" if last is not None else ""
        raise ProfileError(
            "profile.nobody-training-now",
            f"nobody is training {run.name} now{where}",
            hint='start it, or set profile.steps = "20:23" in its recipe before it starts',
        )
    made = Request(
        id=uuid.uuid4().hex[:12],
        steps=steps,
        ranks=[0] if ranks is None else ranks,
        shapes=shapes,
        stacks=stacks,
        memory=memory,
    )
    write_json(request_file(run), asdict(made))
    return made


def read_request(path: Path) -> Request | None:
    """None when there is none, or when it is not ours: a live run never fails for a stray file."""
    value = read_json(path)
    if value is None:
        return None
    with contextlib.suppress(TypeError):
        made = Request(**value)
        if isinstance(made.steps, int) and 1 <= made.steps <= MAX_STEPS and isinstance(made.ranks, list):
            return made
    return None


def answer(run: Run, request: Request, first: int) -> Request:
    """Rank 0 names the first step, far enough ahead for the other ranks to see it; the request itself is taken away."""
    made = Request(**{**asdict(request), "first": first})
    write_json(answer_file(run), asdict(made))
    request_file(run).unlink(missing_ok=True)
    return made


def wait_for_trace(run: Run, request: Request, seconds: float, *, poll_seconds: float = 0.5) -> list[str]:
    """Files of the answered request, as paths relative to the run folder; empty when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        files = _files(run, request)
        if files or time.monotonic() >= deadline:
            return files
        time.sleep(min(poll_seconds, max(deadline - time.monotonic(), 0.0)))


def _files(run: Run, request: Request) -> list[str]:
    events = [e for e in run.events(Profiled) if e.request == request.id]
    if len(events) < max(1, len(request.ranks)):
        return []
    return [file for e in events for file in e.files]
