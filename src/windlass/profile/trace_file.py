"""Event batches of a Kineto or Chrome trace file (JSON, plain or gzipped), read in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from windlass.errors import ProfileError

try:  # orjson comes with the `data` extra: three times as fast as the standard library, but optional
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

CHUNK_BYTES = 4 << 20
# A single event, or a header before the events, that is larger than this means that the file is not a trace.
LARGEST_EVENT_BYTES = 64 << 20
# A chunk is cut between two events. Cuts are looked for in the last bytes first, and only a few are tried.
CUT_WINDOW_BYTES = 1 << 16
MAX_CUT_ATTEMPTS = 8

FOREIGN_HINT = "windlass reads Kineto and Chrome traces, as torch.profiler's export_chrome_trace writes them"
_EVENT_LIST = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")
_BARE_WORD = re.compile(r"(?<=[:\[,\s])(?:N/A|-?nan(?:\([a-z0-9]*\))?|-?inf)(?=[\s,\]}])", re.IGNORECASE)
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrtu])')
_UNSUPPORTED_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
}


class TraceFile:
    """Iterate over it to get lists of events; afterwards `meta` holds the values that stand beside the event list.

    `progress` is called with the bytes of the file (compressed, if it is) that were read so far.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self._progress = progress
        self._events_read = 0
        self._head: bytes | None = None  # the text before the event list; None when the file is a bare list

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with self._open() as self._raw:
            magic = self._raw.read(6)
            self._raw.seek(0)
            for mark, description in _UNSUPPORTED_ARCHIVES.items():
                if magic.startswith(mark):
                    hint = "unpack it first; plain .json and .json.gz are read directly"
                    raise self._error("archive-unsupported", f"is {description}", hint)
            self._file = gzip.GzipFile(fileobj=self._raw) if magic[:2] == b"\x1f\x8b" else self._raw
            data = self._skip_to_events()
            while True:
                if front := _leading_events(data):
                    events, data = front
                    self._events_read += len(events)
                    yield events
                elif end := _last_events(data):
                    yield end[0]
                    self._read_tail(end[1])
                    return
                if len(data) > LARGEST_EVENT_BYTES:
                    raise self._damaged(
                        f"after event {self._events_read:,} follow {len(data) >> 20} MiB that are not an event"
                    )
                remaining_bytes = len(data)
                data += self._read()
                if len(data) == remaining_bytes and not front:
                    break
            # Chrome allows a bare list to end without its bracket; any other file that ends early is damaged.
            last = _parse(b"[" + data.rstrip().rstrip(b",") + b"]") if self._head is None else None
            if not isinstance(last, list):
                raise self._damaged("the file ends in the middle of the event list")
            yield last

    def _open(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            hint = "give a run folder, or trace files (.json or .json.gz)"
            raise ProfileError("profile.path-missing", f"{self.path} does not exist", hint=hint) from None
        except OSError as error:
            hint = "check the path and its permissions"
            raise self._error("unreadable", f"cannot be read: {error.strerror}", hint) from None

    def _read(self) -> bytes:
        """The next bytes; empty at the end."""
        try:
            block = self._file.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._damaged(f"its compressed data ends early or is corrupt ({error})") from None
        if self._progress is not None:
            self._progress(self._raw.tell())
        return block

    def _skip_to_events(self) -> bytes:
        """Read up to the bracket that opens the event list; returns the bytes after it."""
        data = self._read().removeprefix(b"\xef\xbb\xbf").lstrip()
        if not data:
            hint = "the profiler writes the file when its window closes; the run may have ended before that"
            raise self._error("empty", "is empty", hint)
        if data[:1] == b"[":
            return data[1:]
        if data[:1] != b"{":
            raise self._error("not-json", f"is not a JSON trace: it begins with {data[:16]!r}", FOREIGN_HINT)
        while (match := _EVENT_LIST.search(data)) is None:
            block = self._read()
            if not block or len(data) > LARGEST_EVENT_BYTES:
                value = _parse(data)
                if not isinstance(value, dict):
                    raise self._damaged("it ends before any traceEvents")
                keys = ", ".join(list(value)[:6]) or "none"
                raise self._error("without-events-key", f"is JSON without traceEvents (its keys: {keys})", FOREIGN_HINT)
            data += block
        self._head = data[: match.start()]
        return data[match.end() :]

    def _read_tail(self, tail: str) -> None:
        """Read to the end, so that a damaged archive is noticed, and keep what follows the events as metadata."""
        data = tail.encode()
        while block := self._read():
            data += block
            if len(data) > LARGEST_EVENT_BYTES:
                raise self._damaged(f"more than {LARGEST_EVENT_BYTES >> 20} MiB follow the events")
        if self._head is None:
            return
        value = _parse(self._head + b'"traceEvents": []' + data)
        if not isinstance(value, dict):
            raise self._damaged("the text after the events is not valid JSON")
        self.meta = {k: v for k, v in value.items() if k != "traceEvents"}

    def _error(self, code: str, message: str, hint: str) -> ProfileError:
        return ProfileError(f"profile.trace-{code}", f"{self.path} {message}", hint=hint)

    def _damaged(self, reason: str) -> ProfileError:
        message = f"is damaged: {reason}; {self._events_read:,} events before that could be read"
        hint = "copy it again, or capture again; a trace is complete only when the profiler has closed its window"
        return self._error("damaged", message, hint)


def _leading_events(data: bytes) -> tuple[list[dict[str, Any]], bytes] | None:
    """As many complete events as possible from the front, and the remaining bytes.

    A cut is right exactly when the text before it is a valid list: inside a string or a nested object it never is.
    """
    cuts = list(_BETWEEN_EVENTS.finditer(data, max(0, len(data) - CUT_WINDOW_BYTES)))
    for cut in (cuts or list(_BETWEEN_EVENTS.finditer(data)))[: -MAX_CUT_ATTEMPTS - 1 : -1]:
        events = _parse(b"[" + data[: cut.start() + 1] + b"]")
        if isinstance(events, list):
            return events, data[cut.end() :]
    return None


def _last_events(data: bytes) -> tuple[list[dict[str, Any]], str] | None:
    """The remaining events if the closing bracket of the list is in `data`, and the text after it."""
    for text in _readable_versions("[" + data.decode("utf-8", "replace")):
        with contextlib.suppress(ValueError):
            events, end = json.JSONDecoder(strict=False).raw_decode(text)
            return events, text[end:]
    return None


def _parse(data: bytes) -> Any:
    """The JSON value, or None when this is not JSON even after the known faults of old profilers are repaired."""
    if orjson is not None:
        with contextlib.suppress(ValueError):
            return orjson.loads(data)
    for text in _readable_versions(data.decode("utf-8", "replace")):
        with contextlib.suppress(ValueError):
            return json.loads(text, strict=False)
    return None


def _readable_versions(text: str) -> Iterator[str]:
    """The text, then a repaired one: old profilers wrote bare N/A and nan, and single backslashes in names."""
    yield text
    yield _BAD_ESCAPE.sub(r"\\\\", _BARE_WORD.sub("null", text))
