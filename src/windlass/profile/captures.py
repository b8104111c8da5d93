"""The trace files that a run folder, a folder or a file stands for, and the request to capture one."""

import contextlib
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from windlass.errors import ProfileError, RunError
from windlass.files import read_json, write_json
from windlass.runs import Run, open_run
from windlass.runs.events import Profiled
from windlass.runs.lock import holder

_TRACE_NAME = re.compile(r"\.json(\.gz)?$")
_WINDOW_NAME = re.compile(r"^step-(\d+)$")
_RANK_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
# Files of a run folder or of a capture that end in .json but are not traces.
_OTHER_FILES = frozenset(("config.json", "manifest.json", "plan.json", "summary.json"))


@dataclass(frozen=True)
class ProfileTarget:
    """What one argument of `profile` or `compare` stands for."""

    label: str
    run: Run | None
    traces: list[Path]  # may be empty for a run that was never profiled; `compare` still compares its metrics


def find_target(path: Path | str, *, step: int | None = None) -> ProfileTarget:
    """A run folder (its newest window, or the one that begins at `step`), a folder with traces, or one trace file."""
    path = Path(path)
    if path.is_file():
        label = _TRACE_NAME.sub("", path.name).removesuffix(".pt.trace")
        return ProfileTarget(label or path.name, None, [path])
    try:
        run = open_run(path)
    except RunError:
        run = None
    if run is not None:
        folders = [p for p in run.profile.iterdir() if p.is_dir()] if run.profile.is_dir() else []
        windows = {int(match[1]): _traces_in(p) for p in folders if (match := _WINDOW_NAME.match(p.name))}
        complete = {first: traces for first, traces in sorted(windows.items()) if traces}
        if step is not None and step not in complete:
            raise ProfileError(
                "profile.window-missing",
                f"{run.name} has no window that begins at step {step}",
                hint=f"windows of this run begin at: {', '.join(map(str, complete)) or 'none'}",
            )
        newest = max(complete, default=None) if step is None else step
        return ProfileTarget(run.name, run, _traces_in(run.profile) if newest is None else complete[newest])
    if not path.is_dir():
        raise ProfileError(
            "profile.path-missing",
            f"{path} does not exist",
            hint="give a run folder, a folder of traces, or trace files (.json or .json.gz)",
        )
    subfolders = sorted((p for p in path.iterdir() if p.is_dir()), reverse=True)
    traces = next((traces for folder in (path, *subfolders) if (traces := _traces_in(folder))), [])
    if not traces:
        raise ProfileError(
            "profile.folder-without-traces",
            f"{path} contains no traces",
            hint='traces end in .json or .json.gz; `profile.steps = "20:23"` in a recipe captures one',
        )
    return ProfileTarget(path.resolve().name, None, traces)


def require_traces(target: ProfileTarget) -> ProfileTarget:
    if not target.traces:
        raise ProfileError(
            "profile.run-without-traces",
            f"the run {target.label} has no trace",
            hint=f"`windlass profile {target.label} --now` asks a running run for one; "
            '`profile.steps = "20:23"` in the recipe captures steps 20 to 22',
        )
    return target


def rank_of_name(path: Path) -> int | None:
    return int(match[1]) if (match := _RANK_NAME.search(path.name)) else None


def _traces_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    traces = [p for p in folder.iterdir() if p.is_file() and _TRACE_NAME.search(p.name) and p.name not in _OTHER_FILES]
    return sorted(traces, key=lambda p: (-1 if (rank := rank_of_name(p)) is None else rank, p.name))


# A longer window makes a trace that is too large to read.
MAX_STEPS = 100


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
        raise ProfileError(
            "profile.window-length-invalid",
            f"a window of {request.steps} steps is not possible",
            hint=f"choose 1 to {MAX_STEPS}; three are usually enough",
        )
    if holder(run.lock_file) is None:
        last_step = run.last_metrics().step
        where = f" (last step {last_step})" if last_step is not None else ""
        raise ProfileError(
            "profile.run-not-training",
            f"{run.name} is not training now{where}",
            hint='start it, or set profile.steps = "20:23" in its recipe before it starts',
        )
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
