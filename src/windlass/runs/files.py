"""How does a file survive a crash, a full disk and a reader at the same time? Written whole and renamed, or appended by line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of it."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    write_whole(path, json.dumps(clean(value), indent=2, default=str, allow_nan=False) + "\n", sync=sync)


def append_line(path: Path, value: Any) -> None:
    """One JSON line in one write call. After a torn line (a crash, a full disk) the next one starts on a line of its own."""
    line = (json.dumps(clean(value), default=str, allow_nan=False) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):  # where a file system has no flock, O_APPEND alone keeps lines apart
            fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(handle, line)
        if written != len(line):  # a full disk takes part of a line: take it back, so that no reader meets it
            os.ftruncate(handle, size)
            raise OSError(28, "no space left for a line", str(path))
    finally:
        os.close(handle)


_held: dict[Path, list[Any]] = {}
"""Lines that a full or read-only disk did not take; they come before the next one that it takes."""
_HOLD_ON = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_HOLD_MOST = 100_000


def append_patiently(path: Path, value: Any) -> bool:
    """Append a line, or hold it in memory while the disk takes nothing: a record must not stop what it records."""
    lines = [*_held.pop(path, []), value]
    while lines:
        try:
            append_line(path, lines[0])
        except OSError as error:
            if error.errno not in _HOLD_ON:
                raise
            _held[path] = lines[-_HOLD_MOST:]
            return False
        lines.pop(0)
    return True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, oldest first. A torn or foreign line is passed over: a record is worth more than its last line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            if (value := _object(raw)) is not None:
                yield value


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_last(path: Path, *, tail_bytes: int = 65536) -> dict[str, Any] | None:
    """The newest whole line, without reading a long file from its start."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tail_bytes))
        lines = file.read().splitlines()
    return next((value for raw in reversed(lines) if (value := _object(raw)) is not None), None)


def read_json(path: Path) -> dict[str, Any] | None:
    """A whole JSON file, or None when it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def clean(value: Any) -> Any:
    """Not-a-number and infinity are not JSON; they are written as null, which means unknown."""
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value
