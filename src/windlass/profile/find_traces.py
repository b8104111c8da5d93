"""The trace files that a run folder, a folder or a file stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import ProfileError, RunError
from windlass.runs import Run, open_run

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
        return ProfileTarget(run.name, run, _run_traces(run, step))
    if not path.is_dir():
        hint = "give a run folder, a folder of traces, or trace files (.json or .json.gz)"
        raise ProfileError("profile.path-missing", f"{path} does not exist", hint=hint)
    subfolders = sorted((p for p in path.iterdir() if p.is_dir()), reverse=True)
    traces = next((traces for folder in (path, *subfolders) if (traces := _traces_in(folder))), [])
    if not traces:
        hint = 'traces end in .json or .json.gz; `profile.steps = "20:23"` in a recipe captures one'
        raise ProfileError("profile.folder-without-traces", f"{path} contains no traces", hint=hint)
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
    match = _RANK_NAME.search(path.name)
    return int(match.group(1)) if match else None


def _run_traces(run: Run, step: int | None) -> list[Path]:
    folders = run.profile.iterdir() if run.profile.is_dir() else ()
    windows = {int(match[1]): _traces_in(p) for p in folders if p.is_dir() and (match := _WINDOW_NAME.match(p.name))}
    complete = {first: traces for first, traces in sorted(windows.items()) if traces}
    if step is None:
        return complete[max(complete)] if complete else _traces_in(run.profile)
    if step not in complete:
        hint = f"windows of this run begin at: {', '.join(map(str, complete)) or 'none'}"
        raise ProfileError("profile.window-missing", f"{run.name} has no window that begins at step {step}", hint=hint)
    return complete[step]


def _traces_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    traces = [p for p in folder.iterdir() if p.is_file() and _TRACE_NAME.search(p.name) and p.name not in _OTHER_FILES]
    return sorted(traces, key=lambda p: (-1 if (rank := rank_of_name(p)) is None else rank, p.name))
