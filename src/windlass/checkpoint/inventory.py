"""The checkpoints of a run: which are complete, and which rule keeps each. Read-only; no torch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint import files, keep
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError
from windlass.files import read_json
from windlass.runs.folder import Run


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
        entries.append(_finished_entry(step, folder, verify, reasons))
        progress(len(entries), len(finished))
    for step, folder in files.temporaries(run):
        problem = "a save is in progress or was interrupted"
        entries.append(CheckpointEntry(folder.name, "unfinished", step=step, bytes=_size(folder), problem=problem))
    for folder in files.damaged(run):
        reason = (read_json(folder / files.REASON) or {}).get("reason") or "reason unknown"
        number = re.search(r"\d+", folder.name)
        old_step = int(number[0]) if number else None
        entries.append(CheckpointEntry(folder.name, "set aside", old_step, bytes=_size(folder), problem=str(reason)))
    return entries


def resumes_from(entries: Sequence[CheckpointEntry]) -> int | None:
    """The step that a resume starts at; None without one, or when a newer one of an unknown format prevents it."""
    for entry in reversed([e for e in entries if e.name.startswith("step-")]):
        if entry.state == "unknown format" or entry.usable:
            return entry.step if entry.usable else None
    return None


def _finished_entry(step: int, folder: Path, verify: bool, reasons: dict[int, tuple[str, ...]]) -> CheckpointEntry:
    try:
        saved = files.complete(folder, verify=verify)
    except CheckpointError as error:
        state = "unknown format" if isinstance(error, files.UnknownFormatError) else "damaged"
        # The folder is in the table already.
        problem = error.message.replace(f"{folder}/", "").removeprefix(f"{folder} ").removeprefix("is damaged: ")
        return CheckpointEntry(folder.name, state, step=step, bytes=_size(folder), problem=problem)
    except OSError as error:
        return CheckpointEntry(folder.name, "damaged", step=step, problem=f"cannot be read: {error.strerror}")
    return CheckpointEntry(
        folder.name,
        "verified" if verify else "complete",
        step=saved.step,
        tokens=saved.tokens,
        bytes=_size(folder),
        metric=saved.metric,
        metric_name=saved.manifest.get("metric_name"),
        world_size=saved.world_size,
        written_at=saved.manifest.get("written_at"),
        stall_seconds=saved.manifest.get("stall_seconds"),
        write_seconds=saved.manifest.get("write_seconds"),
        kept_by=reasons.get(saved.step, ()),
    )


def _size(folder: Path) -> int | None:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # it was removed meanwhile or cannot be read
        return None
