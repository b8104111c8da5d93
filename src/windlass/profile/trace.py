"""One trace as numpy columns, one row per event: a million events take a few dozen megabytes.

The file (Kineto or Chrome JSON, plain or gzipped) is read in batches of events, in bounded memory.
"""

import contextlib
import json
import math
import re
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from windlass.errors import ProfileError
from windlass.files import READ_BLOCK_BYTES

try:  # orjson comes with the `data` extra: three times as fast as the standard library, but optional
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

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
# Python refuses to read integers of more than 4300 digits; as an id or a time such a number is wrong anyway.
_TRACE_DECODER = json.JSONDecoder(strict=False, parse_int=lambda digits: int(digits) if len(digits) < 400 else math.inf)
LONGEST_WORD = len("-Infinity") + 1
GZIP_MAGIC = b"\x1f\x8b"
_UNSUPPORTED_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
}


@dataclass
class TraceFile:
    """A trace file. Iterate over it to get lists of events; afterwards `meta` holds the values next to the event list,
    and `notes` what was odd about the file.

    `progress` is called with the bytes of the file (compressed, if it is) that were read so far.
    """

    path: Path
    progress: Callable[[int], None] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _events_read: int = 0
    _bytes_read: int = 0  # of the text, unpacked
    _lines_read: int = 0
    _head: bytes | None = None  # the text before the event list; None when the file is a bare list

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        try:
            self._raw = self.path.open("rb")
        except FileNotFoundError:
            raise ProfileError(
                "profile.path-missing",
                f"{self.path} does not exist",
                hint="give a run folder, or trace files (.json or .json.gz)",
            ) from None
        except OSError as error:
            raise self._error(
                "unreadable", f"cannot be read: {error.strerror}", "check the path and its permissions"
            ) from None
        with self._raw:
            magic = self._raw.read(6)
            self._raw.seek(0)
            for mark, description in _UNSUPPORTED_ARCHIVES.items():
                if magic.startswith(mark):
                    raise self._error(
                        "archive-unsupported",
                        f"is {description}",
                        "unpack it first; plain .json and .json.gz are read directly",
                    )
            plain = iter(lambda: self._raw.read(READ_BLOCK_BYTES), b"")
            self._blocks: Iterator[bytes] = self._unpack() if magic[:2] == GZIP_MAGIC else plain
            data = self._skip_to_events()
            while True:
                if front := self._leading_events(data):
                    events, data = front
                    self._events_read += len(events)
                    yield events
                elif end := _last_events(data):
                    yield end[0]
                    break
                if not front and (at := _damage_in(b"[", data)) is not None:
                    raise self._damaged_at(data, at)
                if len(data) > LARGEST_EVENT_BYTES:
                    raise self._damaged(f"{len(data) >> 20} MiB follow that are not an event")
                remaining_bytes = len(data)
                data += self._read()
                if len(data) == remaining_bytes and not front:
                    # Chrome allows a bare list to end without its bracket; any other file that ends early is damaged.
                    last = _parse(b"[" + data.rstrip().rstrip(b",") + b"]") if self._head is None else None
                    if not isinstance(last, list):
                        raise self._damaged("the file ends in the middle of the event list")
                    yield last
                    return
            # To the end, so that a damaged archive is noticed; what follows the events is metadata.
            tail = end[1].encode()
            before = b"" if self._head is None else self._head + b'"traceEvents": []'
            if before and (at := _damage_in(before, tail)) is not None:  # such as a stray bracket among the events
                raise self._damaged_at(tail, at)
            while block := self._read():
                tail += block
                if len(tail) > LARGEST_EVENT_BYTES:
                    raise self._damaged(f"more than {LARGEST_EVENT_BYTES >> 20} MiB follow the events")
            if self._head is None:
                if tail.strip():
                    raise self._damaged_at(tail, len(tail) - len(tail.lstrip()))
                return
            value = _parse(before + tail)
            if not isinstance(value, dict):
                at = _damage_in(before, tail)
                raise self._damaged_at(tail, len(tail) if at is None else at)
            self.meta = {k: v for k, v in value.items() if k != "traceEvents"}

    def _read(self) -> bytes:
        """The next bytes; empty at the end."""
        try:
            block = next(self._blocks, b"")
        except (EOFError, zlib.error) as error:
            reason = (
                f"its compressed data ends early or is corrupt ({error}), near byte {self._raw.tell():,} of the file"
            )
            raise self._damaged(reason) from None
        self._bytes_read += len(block)
        self._lines_read += block.count(b"\n")
        if self.progress is not None:
            self.progress(self._raw.tell())
        return block

    def _unpack(self) -> Iterator[bytes]:
        """The text of every gzip member; what follows the last one is noted, because the trace itself is complete."""
        member = zlib.decompressobj(wbits=31)
        packed = self._raw.read(READ_BLOCK_BYTES)
        while packed:
            if text := member.decompress(packed, READ_BLOCK_BYTES):
                yield text
            packed = member.unused_data.lstrip(b"\0") if member.eof else member.unconsumed_tail
            while len(packed) < len(GZIP_MAGIC) and (block := self._raw.read(READ_BLOCK_BYTES)):
                packed += block.lstrip(b"\0") if member.eof and not packed else block
            if member.eof:
                if not packed.startswith(GZIP_MAGIC):
                    break
                member = zlib.decompressobj(wbits=31)
        if not member.eof:
            raise EOFError("the last block is missing")
        if ignored_bytes := len(packed) + self.path.stat().st_size - self._raw.tell():
            self.notes.append(f"{ignored_bytes:,} bytes after the end of the compressed data were ignored")

    def _leading_events(self, data: bytes) -> tuple[list[dict[str, Any]], bytes] | None:
        """As many complete events as possible from the front, and the remaining bytes.

        A cut is right exactly when the text before it is a valid list: inside a string or a nested object it never is.
        """
        cuts = list(_BETWEEN_EVENTS.finditer(data, max(0, len(data) - CUT_WINDOW_BYTES)))
        for attempt, cut in enumerate((cuts or list(_BETWEEN_EVENTS.finditer(data)))[: -MAX_CUT_ATTEMPTS - 1 : -1]):
            events = _parse(b"[" + data[: cut.start() + 1] + b"]")
            if isinstance(events, list):
                return events, data[cut.end() :]
            if not attempt and (at := _damage_in(b"[", data)) is not None:  # then no cut can be right
                raise self._damaged_at(data, at)
        return None

    def _skip_to_events(self) -> bytes:
        """Read up to the bracket that opens the event list; returns the bytes after it."""
        data = self._read().removeprefix(b"\xef\xbb\xbf").lstrip()
        if not data:
            raise self._error(
                "empty",
                "is empty",
                "the profiler writes the file when its window closes; the run may have ended before that",
            )
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

    def _error(self, code: str, message: str, hint: str) -> ProfileError:
        return ProfileError(f"profile.trace-{code}", f"{self.path} {message}", hint=hint)

    def _damaged_at(self, data: bytes, at: int) -> ProfileError:
        """`data`: the end of what was read, with the damage at one of its bytes."""
        offset = self._bytes_read - len(data) + at
        line = self._lines_read - data.count(b"\n", at) + 1
        return self._damaged(f"it is not JSON near byte {offset:,}, line {line:,}: {data[max(0, at - 24) : at + 24]!r}")

    def _damaged(self, reason: str) -> ProfileError:
        return self._error(
            "damaged",
            f"is damaged: {reason}; {self._events_read:,} events before that could be read",
            "copy it again, or capture again; a trace is complete only when the profiler has closed its window",
        )


def _last_events(data: bytes) -> tuple[list[dict[str, Any]], str] | None:
    """The remaining events if the closing bracket of the list is in `data`, and the text after it."""
    for text in _readable_versions("[" + data.decode("utf-8", "replace")):
        with contextlib.suppress(ValueError, RecursionError):
            events, end = _TRACE_DECODER.raw_decode(text)
            return events, text[end:]
    return None


def _parse(data: bytes) -> Any:
    """The JSON value, or None when this is not JSON even after the known faults of old profilers are repaired."""
    if orjson is not None:
        with contextlib.suppress(ValueError):
            return orjson.loads(data)
    for text in _readable_versions(data.decode("utf-8", "replace")):
        with contextlib.suppress(ValueError, RecursionError):
            return _TRACE_DECODER.decode(text)
    return None


def _damage_in(before: bytes, data: bytes) -> int | None:
    """Where `data` stops being JSON, whatever may follow it; None when it is right so far. `before` precedes it."""
    if (at := data.find(b"\0")) >= 0:  # a hole in the file
        return at
    text = (before + data).decode("utf-8", "surrogateescape")
    repaired = _repair(text)
    try:
        json.JSONDecoder(strict=False, parse_int=float).raw_decode(repaired)
    except json.JSONDecodeError as error:
        # A text that ends inside a string, a number or a word may still be continued.
        if error.msg.startswith("Unterminated string") or error.pos > len(repaired) - LONGEST_WORD:
            return None
        at = error.pos
        if repaired != text:
            at = bisect_left(range(len(text)), at, key=lambda end: len(_repair(text[:end])))
        return max(0, len(text[:at].encode("utf-8", "surrogateescape")) - len(before))
    except RecursionError:
        return 0
    return None


def _readable_versions(text: str) -> Iterator[str]:
    """The text, then a repaired one: old profilers wrote bare N/A and nan, and single backslashes in names."""
    yield text
    if (repaired := _repair(text)) != text:
        yield repaired


def _repair(text: str) -> str:
    return _BAD_ESCAPE.sub(r"\\\\", _BARE_WORD.sub("null", text))


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

MISSING = -1  # an absent id in the integer columns

# MODULE and DRIVER are not in the plugin that mode `tb` reproduces.
Kind = IntEnum(
    "Kind",
    "OPERATOR PYTHON STEP ANNOTATION GPU_ANNOTATION GPU_STEP RUNTIME KERNEL MEMCPY MEMSET MODULE DRIVER",
    start=0,
)
DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
# The categories that the plugin knew, from PyTorch 1.8 to its removal, and Python frames; their spelling varies in
# case.
CATEGORY_KINDS: dict[str, Kind] = {
    "cpu_op": Kind.OPERATOR, "operator": Kind.OPERATOR, "python": Kind.PYTHON,
    "user_annotation": Kind.ANNOTATION, "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "runtime": Kind.RUNTIME, "cuda_runtime": Kind.RUNTIME, "mtia_runtime": Kind.RUNTIME, "glow_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME, "privateuse1_runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL, "memcpy": Kind.MEMCPY, "gpu_memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET, "gpu_memset": Kind.MEMSET,
    "python_function": Kind.MODULE,
}  # fmt: skip
_PYTHON_FRAME = Kind.MODULE  # compared for every event, and an attribute of an enum is slow to read in Python 3.11
_STEP_KINDS = {Kind.OPERATOR: Kind.STEP, Kind.ANNOTATION: Kind.STEP, Kind.GPU_ANNOTATION: Kind.GPU_STEP}
# `torch.autograd.profiler` without Kineto writes no category; the name of the process tells the kind.
_LEGACY_PROCESSES = {"CPU functions": Kind.OPERATOR, "CUDA functions": Kind.KERNEL}
# Microseconds since 1970 are near 2e15, nanoseconds near 2e18: a larger stamp is in nanoseconds.
_NANOSECOND_STAMPS = 1e17
_LAST_STAMP = 1e19  # nanoseconds of the year 2286
_FIRST_DATE = 1e9  # seconds since 1970: a trace from before 2001 counts from the start of its host
# Rows are collected as tuples and moved to the columns in small groups: the tuples of a whole batch take 8 MB.
ROWS_AT_ONCE = 500
# Columns that are collected while reading, with their type code (of `array` and of numpy).
_COLUMNS = {
    "kind": "B", "name": "i", "start": "d", "length": "d", "thread": "i", "external": "q", "correlation": "q",
    "device": "i", "blocks": "d", "occupancy": "d", "shape": "i",
}  # fmt: skip
_DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "half": 2, "bfloat16": 2, "short": 2,
    "float": 4, "int": 4, "double": 8, "long": 8,
}  # fmt: skip


@dataclass(frozen=True)
class CollectiveArguments:
    """What newer profilers write beside the kernel or operator of a collective."""

    name: str
    message_bytes: float | None
    group_size: int | None

    @classmethod
    def from_event(cls, args: dict[str, Any]) -> Self:
        """The larger side counts: an all-gather writes what all ranks put in, a reduce-scatter reads what all get."""
        counts = [n for key in ("In msg nelems", "Out msg nelems") if (n := _number(args.get(key))) is not None]
        element_bytes = _DTYPE_BYTES.get(str(args.get("dtype")).lower())
        group_size = _small_int(args.get("Group size"))
        return cls(
            name=str(args["Collective name"]),
            message_bytes=max(counts) * element_bytes if counts and element_bytes else None,
            group_size=group_size if group_size > 0 else None,
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One file: the window of one rank. Times are microseconds; rows are sorted by start time."""

    path: Path
    names: list[str]
    threads: list[tuple[str, str]]  # (pid, tid) of each thread or stream
    shapes: list[str]  # empty unless the shapes were read

    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    start: Floats
    end: Floats
    thread: NDArray[np.int32]
    external: Ints
    correlation: Ints
    device: NDArray[np.int32]
    blocks: Floats  # blocks per SM of a kernel; NaN where the trace has none
    occupancy: Floats
    shape: NDArray[np.int32]

    collectives: dict[int, CollectiveArguments]  # by row
    meta: dict[str, Any]
    peak_bytes: dict[int, float]  # highest allocated memory by device id, where the trace records memory
    incomplete: int  # events without a time or duration
    not_finite: int  # events whose time or duration is NaN, infinite or beyond any clock
    negative: int  # events with a negative duration
    notes: list[str]  # what was odd about the file
    base_seconds: float  # when the clock of the stamps was 0, in seconds since 1970

    def mask(self, *kinds: Kind) -> Mask:
        return np.isin(self.kind, kinds)

    def rows(self, *kinds: Kind) -> Ints:
        return np.flatnonzero(self.mask(*kinds))

    def name_of(self, row: int) -> str:
        return self.names[int(self.name[row])]

    def names_where(self, test: Callable[[str], bool]) -> Mask:
        """For each row, whether its name passes; the test runs once per distinct name."""
        return np.array([test(name) for name in self.names], dtype=bool)[self.name]

    @property
    def window(self) -> tuple[float, float] | None:
        """First start and last end in seconds since 1970; None when the stamps do not count from there."""
        window = tuple(self.base_seconds + at / 1e6 for at in (float(self.start[0]), float(self.end.max())))
        return window if window[0] > _FIRST_DATE else None  # type: ignore[return-value]

    @property
    def of_lightning(self) -> bool:
        return self.meta.get("Framework") == "pytorch-lightning"

    def distributed_info(self, key: str, expected_type: type) -> Any:
        """`rank`, `world_size` or `backend` of the process group; None where the trace does not have it."""
        info = self.meta.get("distributedInfo")
        value = info.get(key) if isinstance(info, dict) else None
        return value if isinstance(value, expected_type) else None

    @property
    def device_properties(self) -> list[dict[str, Any]]:
        value = self.meta.get("deviceProperties")
        return [p for p in value if isinstance(p, dict)] if isinstance(value, list) else []

    @property
    def device_name(self) -> str | None:
        """Name of the device that ran the kernels; the first in the metadata when the kernels name none."""
        ids = self.device[self.rows(Kind.KERNEL)][:1]
        used = [p for p in self.device_properties if p.get("id") in ids.tolist()]
        name = next((p.get("name") for p in used + self.device_properties), None)
        return str(name) if name else None


def read_trace(path: Path | str, *, shapes: bool = False, progress: Callable[[int], None] | None = None) -> Trace:
    """Read one trace file, whatever version of the profiler wrote it. `shapes` also keeps operator input shapes."""
    file = TraceFile(Path(path), progress)
    reader = _TraceReader(keep_shapes=shapes)
    for batch in file:
        for first in range(0, len(batch), ROWS_AT_ONCE):
            reader.add(batch[first : first + ROWS_AT_ONCE])
    if not reader.events:
        raise ProfileError(
            "profile.trace-no-events",
            f"{file.path} has no events",
            hint="check that the profiler's window was open during a step",
        )
    if not reader.columns["kind"]:
        categories = ", ".join(name for name, _ in reader.skipped_categories.most_common(5)) or "none"
        raise ProfileError(
            "profile.trace-not-pytorch",
            f"none of the {reader.events:,} events in {file.path} is an operator, a kernel or a copy "
            f"(categories: {categories})",
            hint="windlass reads traces of torch.profiler; this one may come from another tool",
        )
    per_us = 1e3 if reader.first_nanosecond else 1.0
    start, length = (np.frombuffer(reader.columns.pop(key), dtype=np.float64) / per_us for key in ("start", "length"))
    order = np.argsort(start, kind="stable")
    collective_rows = np.flatnonzero(np.isin(order, list(reader.collectives)))
    return Trace(
        path=file.path,
        names=list(reader.names),
        threads=list(reader.threads),
        shapes=list(reader.shapes),
        collectives={int(row): reader.collectives[int(order[row])] for row in collective_rows},
        meta=file.meta,
        peak_bytes=reader.peaks,
        incomplete=reader.incomplete,
        not_finite=reader.not_finite,
        negative=reader.negative,
        notes=file.notes,
        base_seconds=(reader.first_nanosecond or _number(file.meta.get("baseTimeNanoseconds"), 0.0)) / 1e9,
        start=start[order],
        end=(start + length)[order],
        # Each column leaves the reader before the next is copied, so that only one is in memory twice.
        **{key: np.frombuffer(reader.columns.pop(key), dtype=_COLUMNS[key])[order] for key in list(reader.columns)},
    )


@lru_cache(maxsize=1024)
def kind_of_event(category: Any, process: Any) -> Kind | None:
    """None for an event that no table needs."""
    if not isinstance(category, str):
        return _LEGACY_PROCESSES.get(process) if isinstance(process, str) else None
    category = category.lower()
    return CATEGORY_KINDS.get(category, Kind.DRIVER if category.endswith(("_runtime", "_driver")) else None)


class _TraceReader:
    """Collects rows in typed arrays: eight bytes per number where a list would need forty."""

    def __init__(self, *, keep_shapes: bool) -> None:
        self.columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        self.batch_rows: list[tuple[Any, ...]] = []
        self.keep_shapes = keep_shapes
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[str, str], int] = {}
        self.shapes: dict[str, int] = {}
        self.text_ids: dict[str, int] = {}
        self.begun: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        self.skipped_categories: Counter[str] = Counter()
        self.peaks: dict[int, float] = {}
        self.collectives: dict[int, CollectiveArguments] = {}
        self.first_nanosecond = 0  # 0 while no stamp was in nanoseconds since 1970
        self.events = self.incomplete = self.not_finite = self.negative = 0

    def add(self, batch: list[Any]) -> None:
        self.events += len(batch)
        for event in batch:
            if not isinstance(event, dict):
                continue
            phase = event.get("ph")
            if phase == "X":
                self.add_span(event)
            elif (
                phase in ("i", "I") and event.get("name") == "[memory]" and isinstance(args := event.get("args"), dict)
            ):
                device, allocated = args.get("Device Id"), _number(args.get("Total Allocated"))
                if args.get("Device Type") not in (None, 0) and isinstance(device, int) and allocated is not None:
                    self.peaks[device] = max(self.peaks.get(device, 0.0), allocated)
            elif phase == "B":
                self.begun.setdefault((event.get("pid"), event.get("tid")), []).append(event)
            elif phase == "E" and (open_events := self.begun.get((event.get("pid"), event.get("tid")))):
                begin = open_events.pop()
                start, end = _number(begin.get("ts")), _number(event.get("ts"))
                if start is not None and end is not None:
                    self.add_span({**begin, "dur": end - start})
        for column, values in zip(self.columns.values(), zip(*self.batch_rows, strict=True), strict=False):
            column.extend(values)
        self.batch_rows.clear()

    def add_span(self, event: dict[str, Any]) -> None:
        category, process = event.get("cat"), event.get("pid")
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        try:
            kind = kind_of_event(category, process if category is None else None)
        except TypeError:  # a category or process that is a list: not an event of a profiler
            return
        if kind is None:
            self.skipped_categories[category.lower() if isinstance(category, str) else "no category"] += 1
            return
        # Of the Python frames only those of modules are kept: they are parents in the tree of operators.
        if kind is _PYTHON_FRAME and args.get("Python module id") is None:
            return
        name = str(event.get("name"))
        if name.startswith("ProfilerStep#"):
            kind = _STEP_KINDS.get(kind, kind)
        start, length = event.get("ts"), event.get("dur")
        if type(start) is not float and type(start) is not int:
            start = _number(start)
            if start is None:
                self.incomplete += 1
                return
        if not -_LAST_STAMP < start < _LAST_STAMP:  # also NaN
            self.not_finite += 1
            return
        if start > _NANOSECOND_STAMPS:
            # A float cannot keep single nanoseconds of such a number, so they are counted from the first one.
            self.first_nanosecond = self.first_nanosecond or int(start)
            start -= self.first_nanosecond
        if type(length) is not float and type(length) is not int:
            length = _number(length)
            if length is None:
                self.incomplete += 1
                length = 0.0
        if not 0 <= length < _LAST_STAMP:
            self.not_finite += length >= 0 or length != length
            self.negative += length < 0
            length = 0.0
        if "Collective name" in args:
            self.collectives[len(self.columns["kind"]) + len(self.batch_rows)] = CollectiveArguments.from_event(args)
        external = args.get("external id")
        device, blocks, occupancy, shape = MISSING, math.nan, math.nan, 0
        if kind in DEVICE_KINDS:
            device = _small_int(args.get("device"))
            blocks = _number(args.get("blocks per SM"), math.nan)
            occupancy = _number(args.get("est. achieved occupancy %"), math.nan)
        if self.keep_shapes:
            dims = args.get("Input Dims", args.get("Input dims"))
            shape = self.shapes.setdefault("" if dims is None else str(dims), len(self.shapes))
        self.batch_rows.append((
            kind, self.names.setdefault(name, len(self.names)), start, length,
            self.threads.setdefault((str(process), str(event.get("tid"))), len(self.threads)),
            self.id_of(args.get("External id") if external is None else external), self.id_of(args.get("correlation")),
            device, blocks, occupancy, shape,
        ))  # fmt: skip

    def id_of(self, value: Any) -> int:
        if type(value) is int and -(2**63) < value < 2**63:
            return value
        if value is None:
            return MISSING
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if -(2**63) < (number := int(value)) < 2**63:
                return number
        # A text that is not a number gets a number of its own, far from the real ones.
        return -(2**62) + self.text_ids.setdefault(str(value), len(self.text_ids))


def _number(value: Any, default: Any = None) -> Any:
    """A finite float; some profilers write numbers as text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if math.isfinite(number) else default


def _small_int(value: Any) -> int:
    number = value if type(value) is int else _number(value, MISSING)
    return int(number) if -(2**31) < number < 2**31 else MISSING
