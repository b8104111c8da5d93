"""Crash-safe files: whole files are written beside their target and renamed; logs are appended one JSON line at a
time."""

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from windlass.errors import ConfigError, DataError

# A disk or a quota without room.
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# How much of a large file is read at a time.
READ_BLOCK_BYTES = 4 << 20
# Deeper than any JSON file of windlass or transformers; functions that walk a value call themselves once per level.
MAX_JSON_DEPTH = 64
FileStamps = tuple[tuple[int, int] | None, ...]


def _known_float(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


_DECODER = json.JSONDecoder(parse_constant=lambda name: None, parse_float=_known_float)


def write_atomic(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of it."""
    # A file name that is not UTF-8 may be part of a report: its bytes are written as \udcff.
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a write to a full disk names no file, and the temporary one says nothing
            error.filename, error.filename2 = str(path), None
        raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    write_atomic(path, json.dumps(json_safe(value), indent=2, default=str, allow_nan=False) + "\n", sync=sync)


def json_line(value: Any) -> str:
    return json.dumps(json_safe(value), default=str, allow_nan=False) + "\n"


def append_line(path: Path, *values: Any) -> None:
    """Append one JSON line for each value, all in one write call; after a torn line (crash, full disk) the next one
    starts on a new line."""
    line = "".join(map(json_line, values)).encode()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # where a file system has no flock, O_APPEND alone keeps lines apart
            fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(handle, line)
        if written != len(line):  # a full disk took part of the line: remove it again
            os.ftruncate(handle, size)
            raise OSError(28, "no space left for a line", str(path))
    finally:
        os.close(handle)


# Lines that could not be written to a full or read-only disk; they are written before the next line.
_buffered: dict[Path, list[Any]] = {}
_RETRY_ERRNOS = (*NO_SPACE_ERRNOS, errno.EROFS, errno.EIO, errno.ESTALE)
_MAX_BUFFERED_LINES = 100_000


def append_line_buffered(path: Path, value: Any) -> bool:
    """Append a line, or keep it in memory while the disk is full: logging must not stop training. False: kept in
    memory."""
    lines = [*_buffered.pop(path, []), value]
    while lines:
        try:
            append_line(path, lines[0])
        except OSError as error:
            if error.errno not in _RETRY_ERRNOS:
                raise
            _buffered[path] = lines[-_MAX_BUFFERED_LINES:]
            return False
        lines.pop(0)
    return True


def open_file(path: Path | str) -> BinaryIO:
    """Open a file for reading. FileNotFoundError for anything but a regular file: opening a named pipe, which others
    may have put into a folder, would wait forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, oldest first. Lines that are not a JSON object (a torn last line) are skipped."""
    with contextlib.suppress(FileNotFoundError), open_file(path) as file:
        yield from (value for raw in file if (value := _object(raw)) is not None)


def file_stamps(*paths: Path) -> FileStamps:
    """(modification time, size) of each file, None for a missing one. A cache is valid as long as they do not
    change."""
    stamps: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
            stamps.append((status.st_mtime_ns, status.st_size))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text; NaN, Infinity and numbers like 1e400, which no JSON file may have, are None (unknown).

    ValueError: not JSON, not UTF-8, nested more than MAX_JSON_DEPTH deep, or an integer of thousands of digits.
    """
    text = str(raw, "utf-8-sig")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep") from None
    # Few brackets cannot be nested too deep: the value need not be walked.
    return value if text.count("{") + text.count("[") <= MAX_JSON_DEPTH else json_safe(value)


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_last_json_line(path: Path, *, tail_bytes: int = 65536) -> dict[str, Any] | None:
    """The newest complete line, read from the end of the file."""
    if not path.exists():
        return None
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tail_bytes))
        lines = file.read().splitlines()
    return next((value for raw in reversed(lines) if (value := _object(raw)) is not None), None)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None when the file is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_file(path) as file:
        return _object(file.read())
    return None


def json_safe(value: Any, depth: int = MAX_JSON_DEPTH) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None (unknown)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, (dict, list, tuple)):
        return value
    if depth == 0:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(value, dict):
        return {str(k): json_safe(v, depth - 1) for k, v in value.items()}
    return [json_safe(v, depth - 1) for v in value]


def private_folder(path: Path) -> Path:
    """Make `path` a folder that only this user can enter; a folder of another user is refused."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(
            "files.foreign-folder",
            f"{path} belongs to the user with id {status.st_uid}, not to you ({os.getuid()}): "
            "what windlass keeps there is run as a program",
            hint="set XDG_CACHE_HOME to a folder of your own",
        )
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


def set_compile_cache() -> None:
    """Have torch keep compiled kernels in the user's cache, unless TORCHINDUCTOR_CACHE_DIR is set.

    Its default is a name in /tmp that every user can predict and create first; it is also gone with the node, and a
    job chain should find its kernels again.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        folder = private_folder(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass/compile")
    except (OSError, RuntimeError):  # no home in this container: a new folder (mode 700) with a random name
        folder = Path(tempfile.mkdtemp(prefix="windlass-compile-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def read_text_file(path: Path, description: str) -> str:
    """The text of a file that a user wrote; a file that is not UTF-8 is an error that names the position."""
    if not path.is_file():
        raise DataError("files.missing", f"there is no {description} {path}", hint="check the path")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            "files.not-utf8",
            f"the {description} {path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start:,}",
            hint="convert it to UTF-8, for example with iconv -f LATIN1 -t UTF-8",
        ) from None
