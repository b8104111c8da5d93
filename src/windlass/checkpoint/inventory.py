"""The checkpoints of a run: which are complete, and which rule keeps each. Read-only; no torch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.checkpoint import files, keep
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError
from windlass.files import read_json
from windlass.runs.folder import Run

MANIFEST_FIELDS = ("tokens", "metric", "metric_name", "world_size", "written_at", "stall_seconds", "write_seconds")


@dataclass(frozen=True)
class CheckpointEntry:
    """One folder under checkpoints/."""

    name: str
    # complete (sizes agree), verified (every byte agrees), damaged, set aside, unfinished or unknown format
    state: str
    step: int | None = None
    tokens: int | None = None
    bytes: int | None = None  # on the disk now
    metric: float | None = None
    metric_name: str | None = None
    world_size: int | None = None
    written_at: float | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    problem: str | None = None
    kept_by: tuple[str, ...] = ()  # rules that keep it; empty: the next save removes it, or it is not complete

    @property
    def usable(self) -> bool:
        return self.state in ("complete", "verified")


def inventory(
    run: Run,
    config: SaveConfig,
    *,
    verify: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CheckpointEntry]:
    """Finished ones, oldest first; then unfinished ones and those set aside. `progress`: folders checked, total."""
    reasons = keep.keep_reasons(files.complete_by_size(run), config)
    finished, entries = files.steps_on_disk(run), []
    for step, folder in finished:
        entry = CheckpointEntry(folder.name, "verified" if verify else "complete", step, bytes=_size(folder))
        try:
            manifest = files.complete(folder, verify=verify).manifest
            recorded: dict[str, Any] = {key: manifest.get(key) for key in MANIFEST_FIELDS}
            if recorded["metric"] is not None:
                recorded["metric"] = keep.shown_metric(recorded["metric_name"] or config.metric, recorded["metric"])
            entries.append(replace(entry, kept_by=reasons.get(step, ()), **recorded))
        except CheckpointError as error:
            state = "unknown format" if isinstance(error, files.UnknownFormatError) else "damaged"
            # The folder is in the table already.
            problem = error.message.replace(f"{folder}/", "").removeprefix(f"{folder} ").removeprefix("is damaged: ")
            entries.append(replace(entry, state=state, problem=problem))
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            entries.append(replace(entry, state="damaged", bytes=None, problem=problem))
        progress(len(entries), len(finished))
    for step, folder in files.temporaries(run):
        problem = "a save is in progress or was interrupted"
        entries.append(CheckpointEntry(folder.name, "unfinished", step=step, bytes=_size(folder), problem=problem))
    for folder in files.damaged(run):
        reason = (read_json(folder / files.REASON) or {}).get("reason") or "reason unknown"
        old_step = next(map(int, re.findall(r"\d+", folder.name)), None)
        entries.append(CheckpointEntry(folder.name, "set aside", old_step, bytes=_size(folder), problem=str(reason)))
    return entries


def resumes_from(entries: Sequence[CheckpointEntry]) -> int | None:
    """The step that a resume starts at; None without one, or when a newer one of an unknown format prevents it."""
    for entry in reversed([e for e in entries if e.name.startswith("step-")]):
        if entry.state == "unknown format" or entry.usable:
            return entry.step if entry.usable else None
    return None


def _size(folder: Path) -> int | None:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # it was removed meanwhile or cannot be read
        return None
