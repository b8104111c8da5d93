"""Metrics files as columns of numbers: read once, then only what was appended; thinned for drawing."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.files import READ_BLOCK_BYTES, open_file
from windlass.runs.events import Event
from windlass.runs.measured import Numbers, known, last_known
from windlass.runs.metrics import METRICS

parse_json: Callable[[bytes], Any] = json.loads
with contextlib.suppress(ImportError):
    import orjson

    parse_json = orjson.loads  # three times as fast
# The first look at a long file takes so many lines, evenly spread, and its last bytes completely: more than the 200
# lines that the medians of the newest values need.
SAMPLE_LINES = 3000
TAIL_BYTES = 256 << 10
# Files beyond this are sampled before they are read completely.
LONG_FILE_BYTES = 8 << 20
# Keys beyond METRICS that are kept: a run that invents thousands must not fill the memory.
MAX_EXTRA_KEYS = 64
# A larger number comes from a damaged line, and some have no place in a column.
MAX_VALUE = 1e300
# A sum of all lines that holds one larger number has lost the digits of the others.
MAX_SMOOTHED = 1e12


class Columns:
    """A metrics file as growing columns. `refresh()` reads what is new; unknown is NaN. Safe with several threads."""

    def __init__(self, path: Path, *, keys: Sequence[str] | None = None) -> None:
        self.path, self._keys = path, keys  # the only columns that are kept; None: all
        self.is_sample = False  # lines from all over the file, not all of them
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._offset, self._inode, self._rows, self.version = 0, -1, 0, 0
        self._data: dict[str, list[Numbers]] = {}

    @classmethod
    def sample(
        cls,
        path: Path,
        lines: int,
        *,
        times: Sequence[float] = (),
        tail_bytes: int | None = None,
        keys: Sequence[str] | None = None,
    ) -> Columns:
        """A first look at a long file: lines evenly spread by position, its tail, and those on both sides of `times`.

        The times are those of starts and rollbacks. The lines beside them say how many steps were lost, and how much
        memory the processes before had reached: both are then exact.
        """
        columns = cls(path, keys=keys)
        columns.is_sample = True
        raw: dict[int, bytes] = {}  # by position
        with open_file(path) as file:

            def read_line(offset: int) -> bytes:
                """The first line that begins at the offset or after it; it becomes part of the sample."""
                file.seek(max(0, offset - 1))
                if offset:
                    file.readline()
                position = file.tell()
                return raw.setdefault(position, file.readline())

            def time_at(offset: int) -> float:
                """Time of the first line from the offset on that has one; infinite at the end of the file."""
                while line := read_line(offset):
                    with contextlib.suppress(ValueError, TypeError, KeyError):
                        return float(parse_json(line)["time"])
                    offset = file.tell()
                return float("inf")

            tail_at = max(0, file.seek(0, os.SEEK_END) - (tail_bytes or TAIL_BYTES))
            for index in range(lines):
                read_line(tail_at * index // lines)
            for moment in times:
                bisect_left(range(tail_at), moment, key=time_at)  # its last probes are the lines on both sides
            file.seek(max(0, tail_at - 1))
            if tail_at:
                file.readline()
            tail_at = file.tell()
            tail = file.read().splitlines()
        columns._add([line.rstrip() for position, line in sorted(raw.items()) if position < tail_at] + tail)
        return columns

    def refresh(self, max_bytes: int | None = None) -> bool:
        """Read what was appended (at most about `max_bytes`); True when the end was reached.

        A replaced or shortened file is read again. A file that cannot be read just now has nothing new.
        """
        with self._lock:
            try:
                status = self.path.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._reset()
                    self._inode = status.st_ino
                size = status.st_size
                stop = size if max_bytes is None else min(size, self._offset + max_bytes)
                with open_file(self.path) as file:
                    while self._offset < stop:
                        file.seek(self._offset)
                        left = size - self._offset
                        block = file.read(min(READ_BLOCK_BYTES, left))
                        if b"\n" not in block and len(block) < left:  # one line longer than a block: take all of it
                            block += file.readline(left - len(block))
                        end = block.rfind(b"\n") + 1
                        if end == 0:
                            return True  # a line that is still being written is read the next time
                        self._add(block[:end].splitlines())
                        self._offset += end
                return self._offset >= size
            except OSError:
                return True

    def _add(self, lines: Sequence[bytes]) -> None:
        try:  # one call for the whole block is three times as fast; one damaged line makes it fail
            complete = [line for line in lines if line.endswith(b"}")]  # without a line that was torn
            values = list(parse_json(b"[" + b",".join(complete) + b"]"))
        except ValueError:
            values = []
            for line in lines:
                with contextlib.suppress(ValueError):
                    values.append(parse_json(line))
        rows = [
            v for v in values if isinstance(v, dict) and type(v.get("step")) in (int, float) and -1 < v["step"] < 2**53
        ]
        if not rows:
            return
        keys = list(set(self._data).union(*rows) if self._keys is None else self._keys)
        try:
            table = zip(*map(itemgetter(*keys, "step"), rows), strict=True)
        except KeyError:
            table = zip(*([row.get(key) for key in keys] for row in rows), strict=True)
        for key, column in zip(keys, table, strict=False):
            try:
                numbers = np.array(column, dtype=np.float64)  # None becomes NaN
            except (TypeError, ValueError, OverflowError):
                numbers = np.array([v if is_number(v) else None for v in column], dtype=np.float64)
            numbers[np.isinf(numbers)] = np.nan
            has_room = key in METRICS or len(self._data) < len(METRICS) + MAX_EXTRA_KEYS
            if key in self._data or (has_room and not np.isnan(numbers).all()):
                self._data.setdefault(key, [np.full(self._rows, np.nan)]).append(numbers)
        self._rows += len(rows)
        self.version += 1

    def __len__(self) -> int:
        return self._rows

    def get(self, key: str) -> Numbers:
        """A column; all NaN when the file never had it."""
        with self._lock:
            parts = self._data.get(key) or [np.full(self._rows, np.nan)]
            if len(parts) > 1:
                parts[:] = [np.concatenate(parts)]
            return parts[0]

    def names(self) -> list[str]:
        """Columns that hold at least one number, those of METRICS first."""
        with self._lock:
            return [k for k in METRICS if k in self._data] + sorted(k for k in self._data if k not in METRICS)

    def snapshot(self) -> Columns:
        """The columns of this moment, all of one length, while another thread continues to read."""
        copy = Columns(self.path)
        with self._lock:
            copy._data = {key: [self.get(key)] for key in self._data}
            copy._rows, copy.version, copy.is_sample = self._rows, self.version, self.is_sample
        return copy


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_VALUE


def thin(x: Numbers, y: Numbers, points: int = 1200) -> tuple[list[float], list[float | None]]:
    """At most about `points` pairs that keep each bucket's lowest and highest y.

    Where x goes back (a resume repeats steps) a y of None interrupts the line.
    """
    is_known = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[is_known], y[is_known]
    if len(x) > points:
        buckets = max(1, points // 2)
        size, longer = divmod(len(y), buckets)
        kept = [np.array([0, len(y) - 1])]
        # The first `longer` buckets have a line more than the others: two tables, each with a row per bucket.
        for first, count, width in ((0, longer, size + 1), (longer * (size + 1), buckets - longer, size)):
            table = y[first : first + count * width].reshape(count, width)
            starts = first + width * np.arange(count)
            kept += [starts + table.argmin(1), starts + table.argmax(1)]
        order = np.unique(np.concatenate(kept))
        x, y = x[order], y[order]
    backwards = np.nonzero(np.diff(x) < 0)[0] + 1
    x, y = np.insert(x, backwards, x[backwards - 1]), np.insert(y, backwards, np.nan)
    return x.tolist(), [None if value != value else value for value in y.tolist()]


def superseded(steps: Numbers) -> npt.NDArray[np.bool_]:
    """Lines whose step a later line does again after a resume. Two consecutive lines of one step do not count as
    such."""
    this, later, lowest_later = steps[:-1], steps[1:], np.minimum.accumulate(steps[::-1])[::-1][1:]
    is_repeated = np.zeros(len(steps), bool)
    at = np.nonzero((lowest_later < this) | ((lowest_later == this) & (later != this)))[0]
    if len(at):  # only where steps go back: a run without a resume is not sorted
        values, from_end = np.unique(steps[at[0] :][::-1], return_index=True)
        is_repeated[at] = len(steps) - 1 - from_end[np.searchsorted(values, steps[at])] > at
    return is_repeated


def moving_mean(values: Numbers, lines: int) -> Numbers:
    """The mean of `lines` lines around each line; fewer near both ends, but always as many before as after it."""
    sums = np.insert(np.cumsum(np.where(np.abs(values) < MAX_SMOOTHED, values, 0.0)), 0, 0.0)
    at = np.arange(len(values))
    half = np.minimum(np.minimum(at, at[::-1]), lines // 2)
    return np.asarray((sums[at + half + 1] - sums[at - half]) / (2 * half + 1))


X_AXES = {"step": "step", "tokens": "tokens", "time": "hours", "kwh": "kWh"}


def axis(columns: Columns, name: str) -> Numbers:
    """The x axis by its name in X_AXES; time is hours since the first line."""
    if name == "time":
        return (columns.get("time") - first_known(columns.get("time"))) / 3600
    return columns.get("energy_joules") / 3.6e6 if name == "kwh" else columns.get(name)


def first_known(values: Numbers) -> float:
    """NaN when there is none."""
    return next(iter(known(values)[:1].tolist()), float("nan"))


def step_of(event: Event, columns: Columns) -> float | None:
    """The event's own step, else the last step logged before it: a fault does not know where the others were."""
    step = getattr(event, "step", None)
    if step is None and event.time is not None:
        step = last_known(columns.get("step")[columns.get("time") <= event.time])
    return None if step is None else float(step)
