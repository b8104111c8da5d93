"""Which trace files does a person mean by a run, a folder or a file?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import ProfileError, RunError
from windlass.runs import Run, open_run

_TRACE = re.compile(r"\.json(\.gz)?$")
_WINDOW = re.compile(r"^step-(\d+)$")
_RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
# Files of a run folder or of a capture that end in .json but hold no events.
_NOT_TRACES = frozenset(("config.json", "manifest.json", "plan.json", "summary.json"))


@dataclass(frozen=True)
class Target:
    """What one argument of `profile` or `compare` stands for."""

    label: str
    run: Run | None
    traces: list[Path]
    """May be empty for a run that was never profiled; `compare` can still compare the rest of it."""


def find_target(given: Path | str, *, step: int | None = None) -> Target:
    """A run folder (its newest window, or the one of `step`), any folder with traces, or one trace file."""
    path = Path(given)
    if path.is_file():
        return Target(_stem(path), None, [path])
    run = _as_run(path)
    if run is not None:
        return Target(run.name, run, _run_traces(run, step))
    if not path.is_dir():
        raise ProfileError(
            "profile.does-exist",
            f"{path} does not exist",
            hint="give a run folder, a folder of traces, or trace files (.json or .json.gz)",
        )
    traces = _folder_traces(path)
    if not traces:
        raise ProfileError(
            "profile.holds-traces",
            f"{path} holds no traces",
            hint='traces end in .json or .json.gz; `profile.steps = "20:23"` in a recipe makes one',
        )
    return Target(path.resolve().name, None, traces)


def need_traces(target: Target) -> Target:
    if target.traces:
        return target
    raise ProfileError(
        "profile.run-holds-trace",
        f"the run {target.label} holds no trace",
        hint=f'`windlass profile {target.label} --now` asks a live run for one; `profile.steps = "20:23"` in the recipe captures steps 20 to 22',
    )


def windows(run: Run) -> list[tuple[int, Path]]:
    """The captured windows of a run: first step and folder, oldest first."""
    if not run.profile.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in run.profile.iterdir() if p.is_dir() and (m := _WINDOW.match(p.name))]
    return sorted(found)


def rank_of_name(path: Path) -> int | None:
    match = _RANK.search(path.name)
    return int(match.group(1)) if match else None


def _as_run(path: Path) -> Run | None:
    try:
        return open_run(path)
    except RunError:
        return None


def _run_traces(run: Run, step: int | None) -> list[Path]:
    found = [(first, traces) for first, folder in windows(run) if (traces := _in(folder))]
    if step is None:
        return found[-1][1] if found else _in(run.profile)
    for first, traces in found:
        if first == step:
            return traces
    known = ", ".join(str(first) for first, _ in found) or "none"
    raise ProfileError(
        "profile.window-begins-step",
        f"{run.name} has no window that begins at step {step}",
        hint=f"windows of this run begin at: {known}",
    )


def _folder_traces(path: Path) -> list[Path]:
    direct = _in(path)
    if direct:
        return direct
    nested = sorted(p for p in path.iterdir() if p.is_dir())
    return next((traces for p in reversed(nested) if (traces := _in(p))), [])


def _in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.is_file() and _TRACE.search(p.name) and p.name not in _NOT_TRACES]
    return sorted(found, key=lambda p: (rank_of_name(p) if rank_of_name(p) is not None else -1, p.name))


def _stem(path: Path) -> str:
    name = _TRACE.sub("", path.name)
    return name.removesuffix(".pt.trace") or path.name
