"""What checkpoints does a run have, which are whole, and why does each stay? Looks only; no torch, nothing is renamed or deleted."""

from __future__ import annotations

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
class Entry:
    """One folder under checkpoints/."""

    name: str
    state: str
    """whole (every file at its size), verified (every byte as it was written), damaged, set aside, unfinished, or unknown format."""
    step: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    """On the disk now."""
    metric: float | None = None
    metric_name: str | None = None
    world_size: int | None = None
    written_at: float | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    problem: str | None = None
    kept_by: tuple[str, ...] = ()
    """Which of the run's rules want it; empty for what the next save removes, and for what is not whole."""

    @property
    def usable(self) -> bool:
        return self.state in ("whole", "verified")


def inventory(
    run: Run, config: SaveConfig, *, verify: bool = False, told: Callable[[int, int], None] = lambda done, whole: None
) -> list[Entry]:
    """Finished ones, oldest first; then what a save left unfinished and what was set aside. `told`: folders looked at, of how many."""
    reasons = {kept.step: kept.reasons for kept in keep.judge(files.whole_by_size(run), config)}
    finished, others = files.steps_on_disk(run), [*files.temporaries(run), *((None, p) for p in files.damaged(run))]
    made = []
    for step, folder in finished:
        made.append(_finished(step, folder, verify, reasons))
        told(len(made), len(finished))
    return made + [_other(step, folder) for step, folder in others]


def resumes_from(entries: Sequence[Entry]) -> int | None:
    """The step that a resume goes on from; None when there is none, or when a newer one of an unknown format stops it."""
    for entry in reversed([e for e in entries if e.name.startswith("step-")]):
        if entry.state == "unknown format" or entry.usable:
            return entry.step if entry.usable else None
    return None


def _finished(step: int, folder: Path, verify: bool, reasons: dict[int, tuple[str, ...]]) -> Entry:
    try:
        saved = files.complete(folder, verify=verify)
    except files.UnknownFormatError as error:
        return Entry(folder.name, "unknown format", step=step, bytes=size_of(folder), problem=_without(folder, error))
    except CheckpointError as error:
        return Entry(folder.name, "damaged", step=step, bytes=size_of(folder), problem=_without(folder, error))
    except OSError as error:
        return Entry(folder.name, "damaged", step=step, problem=f"cannot be read: {error.strerror}")
    about = {key: saved.manifest.get(key) for key in ("metric_name", "written_at", "stall_seconds", "write_seconds")}
    return Entry(
        folder.name, "verified" if verify else "whole", step=saved.step, tokens=saved.tokens, bytes=size_of(folder), metric=saved.metric,
        world_size=saved.world_size, kept_by=reasons.get(saved.step, ()), **about,
    )  # fmt: skip


def _other(step: int | None, folder: Path) -> Entry:
    if step is not None:
        return Entry(
            folder.name, "unfinished", step=step, bytes=size_of(folder), problem="a save is under way, or was cut off"
        )
    reason = (read_json(folder / files.REASON) or {}).get("reason") or "unknown why"
    number = re.search(r"\d+", folder.name)
    return Entry(
        folder.name, "set aside", step=int(number[0]) if number else None, bytes=size_of(folder), problem=str(reason)
    )


def _without(folder: Path, error: CheckpointError) -> str:
    """The message without the folder's path, which stands in the line already."""
    return error.message.replace(f"{folder}/", "").removeprefix(f"{folder} ").removeprefix("is damaged: ")


def size_of(folder: Path) -> int | None:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # it went away or cannot be read
        return None
