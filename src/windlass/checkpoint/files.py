"""What is a complete checkpoint on disk? Names, the manifest that is written last, and the checksums in it. No torch.

A save is written to `checkpoints/.step-000001000.tmp/`; its `manifest.json` comes last and lists every other file with size and
checksums; then the folder is renamed to `checkpoints/step-000001000/`. So a folder with a manifest that agrees is whole, whatever
happened on the way.
"""

from __future__ import annotations

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
from windlass.runs.folder import Run

FORMAT = 1
"""Raised when a reader of today could not read tomorrow's checkpoints."""
MANIFEST = "manifest.json"
EXTRA = "extra.json"
REASON = "damaged.json"
"""In a folder that was set aside: why."""
CHUNK_BYTES = 64 * 2**20
# CRC-32 is in the standard library, uses the CPU's own instruction (3.9 GiB/s a core measured) and finds every flipped bit;
# a cryptographic hash would be 2 to 5 times slower and protects against nothing that happens here.
ALGORITHM = "crc32-64MiB"
_NAME = re.compile(r"^step-(\d{9,})$")
_TEMPORARY = re.compile(r"^\.step-(\d{9,})\.tmp$")


@dataclass(frozen=True)
class Saved:
    """A checkpoint folder with a readable manifest."""

    path: Path
    manifest: dict[str, Any]

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
    def save_seconds(self) -> float | None:
        """The copy and the writing together, as measured."""
        write = self.manifest.get("write_seconds")
        return None if write is None else float(write) + float(self.manifest.get("stall_seconds") or 0.0)

    @property
    def metric_name(self) -> str | None:
        return self.manifest.get("metric_name")

    @property
    def world_size(self) -> int | None:
        return self.manifest.get("world_size")


def temporary(run: Run, step: int) -> Path:
    return run.checkpoints / f".step-{step:09d}.tmp"


def steps_on_disk(run: Run) -> list[tuple[int, Path]]:
    """(step, folder) of everything that is named like a finished checkpoint, oldest first. By number: clocks may jump."""
    return sorted((int(m[1]), p) for p in _children(run.checkpoints) if (m := _NAME.match(p.name)))


def temporaries(run: Run) -> list[tuple[int, Path]]:
    """What a save left behind that did not come to its rename."""
    return sorted((int(m[1]), p) for p in _children(run.checkpoints) if (m := _TEMPORARY.match(p.name)))


def damaged(run: Run) -> list[Path]:
    """Checkpoints that were set aside, oldest first."""
    return sorted((p for p in _children(run.checkpoints) if p.name.startswith("damaged-")), key=lambda p: p.name)


def _children(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if p.is_dir()]
    except FileNotFoundError:
        return []


def list_saved(run: Run) -> list[Saved]:
    """Finished checkpoints of a run, oldest first; those without a readable manifest are left out."""
    found = ((path, _manifest(path)) for _, path in steps_on_disk(run))
    return [Saved(path, manifest) for path, manifest in found if manifest is not None and _shape_is_ours(manifest)]


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return read_json(folder / MANIFEST)
    except OSError:
        return None


def newest_step(run: Run) -> int | None:
    """The step of the newest finished checkpoint, without reading it."""
    saved = list_saved(run)
    return saved[-1].step if saved else None


def whole_by_size(run: Run) -> list[Saved]:
    """Those of `list_saved` whose files are all there at their full size; reads no content."""
    return [saved for saved in list_saved(run) if next(size_problems(saved.path, saved.manifest), None) is None]


def _shape_is_ours(manifest: dict[str, Any]) -> bool:
    files = manifest.get("files")
    return (
        isinstance(manifest.get("step"), int)
        and isinstance(files, dict)
        and all(_entry_is_ours(f) for f in files.values())
    )


def _entry_is_ours(entry: Any) -> bool:
    """A size, and a checksum for every chunk of it: with fewer, part of the file would go unchecked."""
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("bytes"), int)
        or not isinstance(entry.get("crc32"), list)
    ):
        return False
    return len(entry["crc32"]) == max(1, -(-entry["bytes"] // CHUNK_BYTES))


# -- checksums ------------------------------------------------------------------------------------------------------------


def checksums(path: Path, *, threads: int | None = None) -> list[str]:
    """One CRC-32 per 64 MiB, in hexadecimal; chunks are read in parallel (zlib lets go of the GIL)."""
    starts = range(0, max(1, path.stat().st_size), CHUNK_BYTES)
    if len(starts) == 1:
        return [_chunk(path, 0)]
    with ThreadPoolExecutor(threads or worker_threads()) as pool:
        return list(pool.map(lambda start: _chunk(path, start), starts))


def _chunk(path: Path, start: int) -> str:
    crc, left = 0, CHUNK_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (block := file.read(min(left, 2**22))):
            crc = zlib.crc32(block, crc)
            left -= len(block)
    return f"{crc:08x}"


def worker_threads() -> int:
    """Threads for reading and checksums: this process's cores, at most eight."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and checksums of files, as the manifest lists them."""
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": checksums(folder / name)} for name in names}


# -- is it whole? ---------------------------------------------------------------------------------------------------------


SEAL = "seal"
"""The manifest's own checksum, over all its other keys; computed the same way in every format."""


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its seal: a flipped bit in it is found as well as one in the files it lists."""
    plain = json_safe({key: value for key, value in manifest.items() if key != SEAL})
    return {**plain, SEAL: f"{zlib.crc32(json.dumps(plain, sort_keys=True, default=str).encode()):08x}"}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, or an error that says why the folder is no complete checkpoint of a version we read."""
    hint = "use an earlier checkpoint of the run"
    try:
        manifest = read_json(folder / MANIFEST)
    except PermissionError:  # not damaged: whoever asks must not set it aside
        raise
    except OSError as error:
        raise CheckpointError(
            "checkpoint.cannot-read", f"{folder / MANIFEST} cannot be read: {error.strerror}", hint=hint
        ) from None
    if manifest is None:
        raise CheckpointError(
            "checkpoint.readable-save-did-finish",
            f"{folder} has no readable {MANIFEST}: the save did not finish",
            hint=hint,
        )
    if SEAL in manifest and manifest != sealed(manifest):
        raise CheckpointError(
            "checkpoint.differs-what-written", f"{folder / MANIFEST} differs from what was written", hint=hint
        )
    if manifest.get("format") != FORMAT:
        raise UnknownFormatError(
            f"{folder} has checkpoint format {manifest.get('format')!r} (written by windlass {manifest.get('windlass', 'unknown')}); this one reads {FORMAT}",
            hint="resume with the windlass that wrote it, or start a new run from its weights with save.load after an export",
        )
    if not _shape_is_ours(manifest):
        raise CheckpointError(
            "checkpoint.does-list-every-file",
            f"{folder / MANIFEST} does not list every file with its checksums: it is damaged",
            hint=hint,
        )
    return manifest


class UnknownFormatError(CheckpointError):
    """Whole, but of a version that this windlass does not read: never set aside, never deleted."""


def size_problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Missing, truncated and foreign files; reads no content."""
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            yield f"{name} has {size:,} bytes instead of {entry['bytes']:,}"


def content_problems(folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> Iterator[str]:
    """Files whose bytes are not those that were written."""
    for name in names:
        try:
            found = checksums(folder / name)
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        expected = manifest["files"][name]["crc32"]
        if bad := [i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b]:
            yield f"{name} differs from what was written (64 MiB chunk {bad[0] + 1} of {len(expected)})"


def complete(folder: Path, *, verify: bool = True) -> Saved:
    """The checkpoint in `folder`, or a CheckpointError that names what is wrong with it."""
    manifest = read_manifest(folder)
    problems = list(size_problems(folder, manifest))
    if verify and not problems:
        problems = list(content_problems(folder, manifest, manifest["files"]))
    if problems:
        raise CheckpointError(
            "checkpoint.damaged",
            f"{folder} is damaged: {'; '.join(problems[:4])}",
            hint="use an earlier checkpoint of the run",
        )
    return Saved(folder, manifest)


# -- changing names -------------------------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    """Make names durable; some file systems refuse to sync a folder, and then the rename is as durable as they make it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def publish(temporary_folder: Path, manifest: dict[str, Any], target: Path) -> None:
    """The last two steps of a save: the manifest, then the name."""
    write_json(temporary_folder / MANIFEST, sealed(manifest))
    sync_folder(temporary_folder)
    adopt(temporary_folder, target)


def adopt(temporary_folder: Path, target: Path) -> None:
    """Give a complete temporary folder its final name; a checkpoint of the same step (before a rollback) makes way for it."""
    if target.exists():
        remove(target)
    temporary_folder.rename(target)
    sync_folder(target.parent)


def set_aside(folder: Path, reason: str) -> Path:
    """Rename a damaged checkpoint, so that it is never taken for a good one and can still be looked at."""
    target, number = folder.with_name(f"damaged-{folder.name.strip('.')}"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"damaged-{folder.name.strip('.')}-{number}")
    folder.rename(target)
    try:
        write_json(target / REASON, {"reason": reason})
    except OSError:  # a full or read-only disk: the event says it too
        pass
    return target


def remove(folder: Path) -> None:
    """Delete a checkpoint: first its name, then its files, so that a kill in between leaves no half under a good name."""
    doomed = folder if folder.name.startswith(".") else folder.with_name(f".removing-{folder.name}")
    if doomed != folder:
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep_removed(run: Run) -> None:
    """Finish deletions that a kill cut off."""
    for path in _children(run.checkpoints):
        if path.name.startswith(".removing-"):
            shutil.rmtree(path, ignore_errors=True)
