"""Copies the token store and the checkpoints of a run to a fast file system, in a CPU job before the ranks start.

Files are copied in parallel; a copy that was cut off goes on with the files that are missing.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.clusters.model import Cluster
from windlass.errors import LaunchError
from windlass.files import NO_SPACE_ERRNOS
from windlass.runs import Run
from windlass.runs.lock import refuse_held
from windlass.units import print_bytes

# In the target folder once every file is there.
MARKER = ".staged"
# Copies at the same time: one stream does not fill a parallel file system.
STREAMS = 8
# What those streams copy together; assumed, for the wall time of the job.
COPY_BYTES_PER_SECOND = 1e9
# Parts of copies from another node that nobody has written to for this long are of a job that was killed.
STALE_COPY_SECONDS = 3600.0


@dataclass(frozen=True)
class FolderCopy:
    source: str
    target: str
    files: int = 0  # copied now
    bytes: int = 0
    kept_files: int = 0  # were already there
    seconds: float = 0.0


def expand(path: str, cluster: Cluster, account: str | None) -> Path | None:
    """A path of the cluster file on this machine; None where a variable is not set. The account names $PROJECT."""
    project = os.environ.get("PROJECT") or account
    if project and any("$PROJECT" in s.path for s in cluster.storage.values()):
        path = path.replace("$PROJECT", project)
    expanded = os.path.expandvars(path)
    return None if "$" in expanded else Path(expanded)


def missing_files(source: Path, target: Path) -> tuple[list[tuple[Path, Path]], int]:
    """Files of `source` whose copy is missing or differs in size or time, and how many are already there.

    Links are followed: a shard or a checkpoint may lie on another disk.
    """
    missing, kept = [], 0
    for folder, folders, names in os.walk(source, followlinks=True):
        for link in (Path(folder, name) for name in folders if Path(folder, name).is_symlink()):
            if Path(folder).resolve().is_relative_to(link.resolve()):
                raise LaunchError(
                    "launch.staging-loop",
                    f"{link} is a link to {link.resolve()}, a folder that it is in: the copy would not end",
                    hint="remove the link",
                )
        for name in names:
            file = Path(folder, name)
            copy, original = target / file.relative_to(source), file.stat()
            has = copy.stat() if copy.is_file() else None
            if has is not None and (has.st_size, has.st_mtime_ns) == (original.st_size, original.st_mtime_ns):
                kept += 1
            else:
                missing.append((file, copy))
    return missing, kept


def is_staged(source: Path, target: Path) -> bool:
    return (target / MARKER).is_file() and source.is_dir() and not missing_files(source, target)[0]


def part_of(file: Path) -> Path:
    """The name under which this process writes a file."""
    return file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}.part")


def is_abandoned(part: Path) -> bool:
    """Whether the process that wrote it has ended; of another node's process only its silence tells it."""
    _, of_this_node, pid = part.stem.rpartition(f".{os.uname().nodename}-")
    if of_this_node and not Path("/proc", pid).exists():
        return True
    return time.time() - part.stat().st_mtime > STALE_COPY_SECONDS


def copy_folder(
    source: Path, target: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> FolderCopy:
    """Copy what is missing; the mark is removed first and written last."""
    began = time.monotonic()
    if not source.is_dir():
        raise LaunchError(
            "launch.staging-source", f"{source} is not a folder: there is nothing to copy", hint="check data.store"
        )
    target.mkdir(parents=True, exist_ok=True)
    for part in target.rglob(".*.part"):
        if is_abandoned(part):
            part.unlink(missing_ok=True)
    missing, kept = missing_files(source, target)
    total_bytes, free = sum(file.stat().st_size for file, _ in missing), shutil.disk_usage(target).free
    if total_bytes > free:
        raise LaunchError(
            "launch.staging-space",
            f"copying {source} needs {print_bytes(total_bytes)} more in {target}, but only {print_bytes(free)} are "
            "free",
            hint="free some space there, or set launch.stage_data = false",
        )
    if missing:
        (target / MARKER).unlink(missing_ok=True)

    def copy(pair: tuple[Path, Path]) -> int:
        file, destination = pair
        destination.parent.mkdir(parents=True, exist_ok=True)
        part, before = part_of(destination), file.stat()
        try:
            shutil.copy2(file, part)
            after, size = file.stat(), part.stat().st_size
            if (size, after.st_size, after.st_mtime_ns) != (before.st_size, before.st_size, before.st_mtime_ns):
                raise LaunchError(
                    "launch.staging-changed",
                    f"{file} was written while it was copied: {before.st_size:,} bytes before, {after.st_size:,} after",
                    hint="repeat the command when nothing writes to the folder",
                )
            part.replace(destination)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return size

    done_bytes = 0
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            for size in pool.map(copy, missing):
                done_bytes += size
                on_progress(done_bytes, total_bytes)
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS:
            raise
        raise LaunchError(
            "launch.staging-space",
            f"{error.strerror}: {print_bytes(done_bytes)} of {print_bytes(total_bytes)} are copied to {target}, and "
            f"{print_bytes(shutil.disk_usage(target).free)} are free",
            hint="free some space there, and run the same command again: it continues",
        ) from None
    (target / MARKER).touch()
    return FolderCopy(str(source), str(target), len(missing), done_bytes, kept, time.monotonic() - began)


def link_checkpoints(
    run: Run, target: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> FolderCopy:
    """Move the run's checkpoints to `target` and leave a link. Cut off at any point, it can be repeated."""
    folder, old = run.checkpoints, run.path / "checkpoints.moved"
    if folder.is_symlink() and folder.resolve() != target.resolve():
        raise LaunchError(
            "launch.checkpoints-elsewhere",
            f"the checkpoints of {run.path} are in {folder.resolve()}, not in {target}",
            hint="move them by hand, or set launch.checkpoints_on to its old value",
        )
    result = FolderCopy(str(folder), str(target))
    if not folder.is_symlink():
        refuse_held(run.lock_file)  # what a training run saves after the copy would be removed
        if old.is_dir() and not folder.exists():  # cut off before the link; the target may be another one now
            old.rename(folder)
        target.mkdir(parents=True, exist_ok=True)
        if folder.is_dir() and any(folder.iterdir()):
            result = copy_folder(folder, target, on_progress)
            (target / MARKER).unlink()
        if folder.is_dir():
            folder.rename(old)
        folder.symlink_to(target.resolve(), target_is_directory=True)
    shutil.rmtree(old, ignore_errors=True)
    return replace(result, source=str(folder))


def stage(
    run: Run,
    store_target: Path | None,
    checkpoints_target: Path | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[FolderCopy]:
    """What a staging job does. A job killed meanwhile is submitted again and goes on."""
    copies, store = [], run.recipe().data.store
    if store_target is not None and store is not None:
        copies.append(copy_folder(Path(os.path.expandvars(store)), store_target, on_progress))
    if checkpoints_target is not None:
        copies.append(link_checkpoints(run, checkpoints_target, on_progress))
    return copies


def folder_bytes(folder: str | None) -> int | None:
    """Bytes of all files below a folder; None when it is not here."""
    path = Path(os.path.expandvars(folder)) if folder else None
    if path is None or not path.is_dir():
        return None
    return sum(Path(place, name).stat().st_size for place, _, names in os.walk(path) for name in names)
