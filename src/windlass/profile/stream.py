"""How is a trace of any size read without holding it? Event by event: a Kineto or Chrome JSON file, plain or gzipped, in batches."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from windlass.errors import ProfileError

CHUNK_BYTES = 4 << 20
LARGEST_EVENT_BYTES = 64 << 20
"""A single event, or a header before the events, larger than this means that the file is something else."""
CUT_TRIES = 8

Progress = Callable[[int], None]
"""Called with the bytes of the file (compressed, where it is) that were read so far."""

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_CUT = re.compile(rb"\}\s*,\s*(?=\{)")
_BARE = re.compile(r"(?<=[:\[,\s])(?:N/A|-?nan(?:\([a-z0-9]*\))?|-?inf)(?=[\s,\]}])", re.IGNORECASE)
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrtu])')
_OTHER_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
}

try:  # orjson is in the `data` extra: three times as fast, never needed
    _fast_loads: Callable[[bytes], Any] | None = importlib.import_module("orjson").loads
except ImportError:
    _fast_loads = None


class EventStream:
    """Iterate over it for lists of events; afterwards `meta` holds what stands beside them in the file."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self._progress = progress
        self._head = b""
        self._bare_list = False
        self._ended = False
        self._count = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(_open(self.path))
            file = stack.enter_context(_unpacked(raw, self.path))
            yield from self._batches(raw, file)

    def _batches(self, raw: IO[bytes], file: IO[bytes]) -> Iterator[list[dict[str, Any]]]:
        data = self._find_array(raw, file)
        while True:
            got = _front(data)
            if got is not None:
                events, data = got
                self._count += len(events)
                yield events
            else:
                whole = _whole(data)
                if whole is not None:
                    yield whole[0]
                    self._read_tail(whole[1], raw, file)
                    return
                if self._ended:
                    yield self._open_end(data)
                    return
            data = self._more(data, raw, file)

    def _read(self, raw: IO[bytes], file: IO[bytes]) -> bytes:
        try:
            block = file.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._torn(f"its compressed data ends or breaks ({error})") from None
        if self._progress is not None:
            self._progress(raw.tell())
        self._ended = not block
        return block

    def _more(self, data: bytes, raw: IO[bytes], file: IO[bytes]) -> bytes:
        if len(data) > LARGEST_EVENT_BYTES:
            raise self._torn(f"after event {self._count:,} come {len(data) >> 20} MiB that are no event")
        return data + self._read(raw, file)

    def _find_array(self, raw: IO[bytes], file: IO[bytes]) -> bytes:
        """Everything after the bracket that opens the events."""
        data = self._read(raw, file).removeprefix(b"\xef\xbb\xbf")
        if not data.strip():
            raise ProfileError(
                "profile.empty",
                f"{self.path} is empty",
                hint="the profiler writes the file when its window closes; was the run cut off?",
            )
        if data.lstrip()[:1] == b"[":
            self._bare_list = True
            return data.lstrip()[1:]
        if data.lstrip()[:1] != b"{":
            raise ProfileError(
                "profile.json-begins",
                f"{self.path} is no JSON: it begins with {data.lstrip()[:16]!r}",
                hint=_FOREIGN_HINT,
            )
        while (found := _ARRAY.search(data)) is None:
            if self._ended or len(data) > LARGEST_EVENT_BYTES:
                raise self._foreign(data)
            data += self._read(raw, file)
        self._head = data[: found.start()]
        return data[found.end() :]

    def _foreign(self, data: bytes) -> ProfileError:
        value = _loads(data)
        if isinstance(value, dict):
            keys = ", ".join(list(value)[:6]) or "none"
            return ProfileError(
                "profile.json-without-traceevents-keys",
                f"{self.path} is JSON without traceEvents (its keys: {keys})",
                hint=_FOREIGN_HINT,
            )
        return self._torn("no traceEvents were found before its end")

    def _torn(self, why: str) -> ProfileError:
        return ProfileError(
            "profile.torn-events-before-could",
            f"{self.path} is torn: {why}; {self._count:,} events before that could be read",
            hint="copy it again, or capture again; a trace is complete only when the profiler has closed its window",
        )

    def _open_end(self, data: bytes) -> list[dict[str, Any]]:
        """Chrome allows a bare list to end without its bracket; anything else that ends early is torn."""
        if self._bare_list:
            events = _loads(b"[" + data.rstrip().rstrip(b",") + b"]")
            if isinstance(events, list):
                return events
        raise self._torn("the file ends in the middle of the list of events")

    def _read_tail(self, tail: str, raw: IO[bytes], file: IO[bytes]) -> None:
        """Read to the end, so that a damaged archive is noticed, and keep what follows the events as metadata."""
        rest = [tail.encode()]
        while block := self._read(raw, file):
            rest.append(block)
            if sum(map(len, rest)) > LARGEST_EVENT_BYTES:
                raise self._torn("the events are followed by something endless")
        if self._bare_list:
            return
        value = _loads(self._head + b'"traceEvents": []' + b"".join(rest))
        if not isinstance(value, dict):
            raise self._torn("what follows the events is no valid JSON")
        self.meta = {k: v for k, v in value.items() if k != "traceEvents"}


_FOREIGN_HINT = "windlass reads Kineto / Chrome traces: what torch.profiler's export_chrome_trace writes, plain or .gz"


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ProfileError(
            "profile.does-exist", f"{path} does not exist", hint="give a run folder, or trace files (.json or .json.gz)"
        ) from None
    except OSError as error:
        raise ProfileError(
            "profile.cannot-read", f"{path} cannot be read: {error.strerror}", hint="check the path and its permissions"
        ) from None


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    magic = raw.read(6)
    raw.seek(0)
    for mark, what in _OTHER_ARCHIVES.items():
        if magic.startswith(mark):
            raise ProfileError(
                "profile.failed",
                f"{path} is {what}",
                hint="unpack it first; plain .json and .json.gz are read directly",
            )
    return gzip.GzipFile(fileobj=raw) if magic[:2] == b"\x1f\x8b" else raw  # type: ignore[return-value]


def _front(data: bytes) -> tuple[list[dict[str, Any]], bytes] | None:
    """As many whole events as possible from the front, and the rest.

    A cut is right exactly when the text before it is a valid list: inside a string or a nested object it never is.
    """
    for match in _cuts(data):
        events = _loads(b"[" + data[: match.start() + 1] + b"]")
        if isinstance(events, list):
            return events, data[match.end() :]
    return None


def _cuts(data: bytes) -> list[re.Match[bytes]]:
    """Places between two objects, the last ones first."""
    window = 1 << 16
    found = list(_CUT.finditer(data, max(0, len(data) - window)))
    if not found and len(data) > window:
        found = list(_CUT.finditer(data))
    return found[::-1][:CUT_TRIES]


def _whole(data: bytes) -> tuple[list[dict[str, Any]], str] | None:
    """The rest of the list when its closing bracket is here, and the text behind it."""
    text = "[" + data.decode("utf-8", "replace")
    for version in (text, _repair(text)):
        try:
            events, end = json.JSONDecoder(strict=False).raw_decode(version)
        except ValueError:
            continue
        return events, version[end:]
    return None


def _loads(data: bytes) -> Any:
    """The value, or None when this is no JSON even after the known faults of old profilers are repaired."""
    if _fast_loads is not None:
        with contextlib.suppress(ValueError):
            return _fast_loads(data)
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        return json.loads(text, strict=False)
    with contextlib.suppress(ValueError):
        return json.loads(_repair(text), strict=False)
    return None


def _repair(text: str) -> str:
    """Old profilers wrote bare N/A and nan, and single backslashes in names."""
    return _BAD_ESCAPE.sub(r"\\\\", _BARE.sub("null", text))
