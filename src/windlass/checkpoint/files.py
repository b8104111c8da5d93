"""Checkpoint folders on disk: names, the manifest that is written last, and its checksums. No torch.

A save is written to `checkpoints/.step-000001000.tmp/`. Its `manifest.json` comes last and lists every other file with
size and checksums; then the folder is renamed to `checkpoints/step-000001000/`. A folder whose manifest agrees with its
files is therefore complete, however the save ended.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import CheckpointError
from windlass.files import json_safe, read_json, write_json
from windlass.processes import usable_cores
from windlass.runs.events import known_float
from windlass.runs.folder import Run

FORMAT = 1  # raised when today's reader could not read a checkpoint
MANIFEST = "manifest.json"
EXTRA = "extra.json"
REASON = "damaged.json"  # in a folder that was set aside: the reason
SEAL = "seal"  # key of the manifest: the checksum of all its other keys, computed the same way in every format
CHUNK_BYTES = 64 * 2**20
# CRC-32 is in the standard library, uses the CPU's instruction (3.9 GiB/s a core measured) and finds every flipped bit;
# a cryptographic hash would be 2 to 5 times slower and protects against nothing that happens here.
ALGORITHM = "crc32-64MiB"
EARLIER_HINT = "use an earlier checkpoint of the run"


class UnknownFormatError(CheckpointError):
    """Complete, but of a version that this windlass does not read: never set aside, never deleted."""


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    manifest: dict[str, Any]
    set_aside: tuple[str, ...] = ()  # one sentence for each newer checkpoint that could not be used
    missing: str | None = None  # what is lost when a newer one was saved and is no longer there

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def tokens(self) -> int | None:
        return self.manifest.get("tokens")

    @property
    def bytes(self) -> int:
        return sum(int(f["bytes"]) for f in self.manifest["files"].values())

    @property
    def metric(self) -> float | None:
        return self.manifest.get("metric")

    @property
    def world_size(self) -> int | None:
        return self.manifest.get("world_size")

    @property
    def save_seconds(self) -> float | None:
        """Copying and writing together, as measured; None: unknown."""
        write_seconds = known_float(self.manifest.get("write_seconds"))
        stall_seconds = known_float(self.manifest.get("stall_seconds"))
        return None if write_seconds is None else write_seconds + (stall_seconds or 0.0)


def temporary(run: Run, step: int) -> Path:
    return run.checkpoints / f".step-{step:09d}.tmp"


def steps_on_disk(run: Run) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a finished checkpoint, ordered by step: clocks may jump."""
    return _numbered(run, r"step-(\d{9,})")


def temporaries(run: Run) -> list[tuple[int, Path]]:
    """(step, folder) of saves that did not reach their rename."""
    return _numbered(run, r"\.step-(\d{9,})\.tmp")


def _numbered(run: Run, pattern: str) -> list[tuple[int, Path]]:
    return sorted((int(m[1]), p) for p in _folders(run) if (m := re.fullmatch(pattern, p.name)))


def damaged(run: Run) -> list[Path]:
    """Checkpoints that were set aside, oldest first."""
    return sorted(path for path in _folders(run) if path.name.startswith("damaged-"))


def _folders(run: Run) -> list[Path]:
    try:
        return [path for path in run.checkpoints.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def list_saved(run: Run) -> list[SavedCheckpoint]:
    """Finished checkpoints of a run, oldest first; without those that have no readable manifest."""
    saved = []
    for _, path in steps_on_disk(run):
        with contextlib.suppress(OSError):
            saved.append(SavedCheckpoint(path, read_json(path / MANIFEST) or {}))
    return [checkpoint for checkpoint in saved if _lists_every_file(checkpoint.manifest)]


def newest_step(run: Run) -> int | None:
    """The step of the newest finished checkpoint, without reading its files."""
    return max((saved.step for saved in list_saved(run)), default=None)


def complete_by_size(run: Run) -> list[SavedCheckpoint]:
    """Those of `list_saved` whose files all exist at their full size; reads no content."""
    return [saved for saved in list_saved(run) if not any(size_problems(saved.path, saved.manifest))]


def _lists_every_file(manifest: dict[str, Any]) -> bool:
    """Every file has a size and a checksum for each chunk: with fewer, part of the file would go unchecked."""
    listed = manifest.get("files")
    return (
        isinstance(manifest.get("step"), int)
        and isinstance(listed, dict)
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("bytes"), int)
            and isinstance(entry.get("crc32"), list)
            and len(entry["crc32"]) == max(1, -(-entry["bytes"] // CHUNK_BYTES))
            for entry in listed.values()
        )
    )


def checksums(path: Path) -> list[str]:
    """One CRC-32 per 64 MiB, in hexadecimal; chunks are read in parallel (zlib releases the GIL)."""

    def checksum(start: int) -> str:
        crc, remaining = 0, CHUNK_BYTES
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while remaining and (block := file.read(min(remaining, 2**22))):
                crc = zlib.crc32(block, crc)
                remaining -= len(block)
        return f"{crc:08x}"

    with ThreadPoolExecutor(worker_threads()) as pool:
        return list(pool.map(checksum, range(0, max(1, path.stat().st_size), CHUNK_BYTES)))


def worker_threads() -> int:
    """Threads for reading and checksums: this process's cores, at most eight."""
    return min(8, usable_cores())


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": checksums(folder / name)} for name in names}


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its seal, which finds a flipped bit in the manifest itself."""
    plain = json_safe({key: value for key, value in manifest.items() if key != SEAL})
    return {**plain, SEAL: f"{zlib.crc32(json.dumps(plain, sort_keys=True, default=str).encode()):08x}"}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, or an error that says why the folder is not a complete checkpoint of a format we read."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except PermissionError:  # not damaged: the caller must not set it aside
        raise
    except OSError as error:
        raise CheckpointError(
            "checkpoint.unreadable", f"{path} cannot be read: {error.strerror}", hint=EARLIER_HINT
        ) from None
    if manifest is None:
        raise CheckpointError(
            "checkpoint.incomplete", f"{folder} has no readable {MANIFEST}: the save did not finish", hint=EARLIER_HINT
        )
    if SEAL in manifest and manifest != sealed(manifest):
        raise CheckpointError("checkpoint.damaged", f"{path} differs from what was written", hint=EARLIER_HINT)
    if manifest.get("format") != FORMAT:
        version = manifest.get("windlass", "unknown")
        raise UnknownFormatError(
            "checkpoint.unknown-format",
            f"{folder} has checkpoint format {manifest.get('format')!r} (written by windlass {version}); "
            f"this windlass reads {FORMAT}",
            hint="resume with the windlass that wrote it, or export its weights and start a new run with save.load",
        )
    if not _lists_every_file(manifest):
        raise CheckpointError(
            "checkpoint.damaged",
            f"{path} is damaged: it does not list every file with its checksums",
            hint=EARLIER_HINT,
        )
    return manifest


def size_problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Missing and truncated files; reads no content."""
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            yield f"{name} has {size:,} bytes instead of {entry['bytes']:,}"


def content_problems(folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> Iterator[str]:
    """Files whose bytes are not those that were written."""
    for name in names:
        written = manifest["files"][name]["crc32"]
        try:
            current = checksums(folder / name)
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        chunk = next((i for i, (a, b) in enumerate(zip(written, current, strict=False), 1) if a != b), None)
        if chunk is not None:
            yield f"{name} differs from what was written (64 MiB chunk {chunk} of {len(written)})"


def complete(folder: Path, *, verify: bool = True) -> SavedCheckpoint:
    """The checkpoint in `folder`, or a CheckpointError that names what is wrong with it."""
    manifest = read_manifest(folder)
    problems = list(size_problems(folder, manifest))
    if verify and not problems:
        problems = list(content_problems(folder, manifest, manifest["files"]))
    if problems:
        raise CheckpointError(
            "checkpoint.damaged", f"{folder} is damaged: {'; '.join(problems[:4])}", hint=EARLIER_HINT
        )
    return SavedCheckpoint(folder, manifest)


def sync_folder(folder: Path) -> None:
    """Make names durable. Some file systems refuse to sync a folder: then they decide how durable a rename is."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish(temporary_folder: Path, manifest: dict[str, Any], target: Path) -> None:
    """The last two steps of a save: the manifest, then the name."""
    write_json(temporary_folder / MANIFEST, sealed(manifest))
    sync_folder(temporary_folder)
    adopt(temporary_folder, target)


def adopt(temporary_folder: Path, target: Path) -> None:
    """Give a complete temporary folder its final name, replacing one of the same step (from before a rollback)."""
    if target.exists():
        remove(target)
    temporary_folder.rename(target)
    sync_folder(target.parent)


def set_aside(folder: Path, reason: str) -> Path:
    """Rename a damaged checkpoint, so that it is never used and can still be examined. Returns its new path."""
    name = f"damaged-{folder.name.strip('.')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    target = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(target)
    with contextlib.suppress(OSError):  # a full or read-only disk: the event has the reason too
        write_json(target / REASON, {"reason": reason})
    return target


def remove(folder: Path) -> None:
    """Delete a checkpoint: first its name, then its files, so that a kill leaves no partial one under a good name."""
    if not folder.name.startswith("."):
        folder = folder.rename(folder.with_name(f".removing-{folder.name}"))
    shutil.rmtree(folder, ignore_errors=True)


def sweep_removed(run: Run) -> None:
    """Finish deletions that a kill interrupted."""
    for path in _folders(run):
        if path.name.startswith(".removing-"):
            shutil.rmtree(path, ignore_errors=True)
