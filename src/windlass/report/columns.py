"""How do a million metric lines become a curve? Read once into columns, then only what was appended; thin for drawing, extremes kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.runs.metrics import METRICS

Numbers = npt.NDArray[np.float64]
KEYS = tuple(METRICS)
QUICK_LINES = 3000
"""How many lines, evenly spread over the file, the first look at a long file takes."""
LONG_FILE = 8 << 20
"""Beyond this a first look is taken before the whole is read."""
BLOCK = 4 << 20
TAIL = 16384
MOST_EXTRA = 64
"""Metric names beyond our vocabulary that are kept; a run that invents thousands must not fill the memory."""


def _loads() -> Callable[[bytes], Any]:
    try:
        import orjson
    except ImportError:
        return json.loads
    return orjson.loads


class Columns:
    """A metrics file as growing columns. `refresh()` reads what is new; unknown is NaN. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sampled = False
        """True: lines from all over the file, not the whole of it."""
        self._lock = threading.Lock()
        self._parse = _loads()
        self._forget()

    def _forget(self) -> None:
        self._offset, self._inode = 0, -1
        self._rows = 0
        self._data: dict[str, list[Numbers]] = {}
        self.version = 0

    def refresh(self, most_bytes: int | None = None) -> bool:
        """Read what was appended (at most `most_bytes`); True when the end was reached. A replaced or shortened file is read again.

        A file that is not there, or that a file server lets nobody read just now, has nothing new; the next look tries again.
        """
        with self._lock:
            try:
                status = self.path.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._forget()
                    self._inode = status.st_ino
                with self.path.open("rb") as file:
                    file.seek(self._offset)
                    return self._read(file, status.st_size - self._offset, most_bytes)
            except OSError:
                return True

    def _read(self, file: Any, left: int, most_bytes: int | None) -> bool:
        taken = 0
        while left > 0 and (most_bytes is None or taken < most_bytes):
            block = file.read(min(BLOCK, left))
            end = block.rfind(b"\n") + 1
            if end == 0 and len(block) < left:  # one line longer than a block: take all of it
                block += file.readline(left - len(block))
                end = block.rfind(b"\n") + 1
            if end == 0:
                return True  # a line that is still being written waits for the next time
            self._take(block[:end].splitlines())
            self._offset += end
            left, taken = left - end, taken + end
            file.seek(self._offset)
        return left <= 0

    def _take(self, lines: Sequence[bytes]) -> None:
        rows = [row for row in self._objects(lines) if isinstance(row, dict) and _is_step(row.get("step"))]
        if not rows:
            return
        names = {key for row in rows for key in row} | set(self._data)
        for key in names:
            self._extend(key, [row.get(key) for row in rows])
        self._rows += len(rows)
        self.version += 1

    def _objects(self, lines: Sequence[bytes]) -> list[Any]:
        try:  # one call for the whole block is three times as fast; one torn line sends us the slow way
            return list(self._parse(b"[" + b",".join(lines) + b"]"))
        except ValueError:
            return [value for raw in lines if (value := self._object(raw)) is not None]

    def _object(self, raw: bytes) -> Any:
        try:
            return self._parse(raw)
        except ValueError:
            return None

    def _extend(self, key: str, values: list[Any]) -> None:
        try:
            made = np.array(values, dtype=np.float64)  # None becomes NaN
        except (TypeError, ValueError, OverflowError):
            made = np.array([v if _is_number(v) else None for v in values], dtype=np.float64)
        made[np.isinf(made)] = np.nan
        if key not in self._data:
            if np.isnan(made).all() or (key not in KEYS and len(self._data) >= len(KEYS) + MOST_EXTRA):
                return
            self._data[key] = [np.full(self._rows, np.nan)]
        self._data[key].append(made)

    def __len__(self) -> int:
        return self._rows

    def get(self, key: str) -> Numbers:
        """A column; all NaN when the file never had it."""
        with self._lock:
            parts = self._data.get(key)
            if parts is None:
                return np.full(self._rows, np.nan)
            if len(parts) > 1:
                parts[:] = [np.concatenate(parts)]
            return parts[0]

    def names(self) -> list[str]:
        """Columns that hold at least one number, our own vocabulary first."""
        with self._lock:
            return self._known()

    def _known(self) -> list[str]:
        return [key for key in KEYS if key in self._data] + sorted(key for key in self._data if key not in KEYS)


class Still(Columns):
    """The columns as they are at this moment: while another thread reads on, all of them keep one length."""

    def __init__(self, of: Columns) -> None:
        self.path, self.sampled, self._of = of.path, of.sampled, of
        with of._lock:
            self._rows, self.version, self._names = of._rows, of.version, of._known()

    def refresh(self, most_bytes: int | None = None) -> bool:
        return True

    def get(self, key: str) -> Numbers:
        found = self._of.get(key)[: self._rows]
        # Shorter than it was: the file was replaced meanwhile, and the next look sees the new one.
        return found if len(found) == self._rows else np.full(self._rows, np.nan)

    def names(self) -> list[str]:
        return self._names


MOST = 1e300
"""A larger figure comes from a damaged line, and some have no place in a column."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST


def _is_step(value: object) -> bool:
    """JSON lets NaN and infinity through; no line without a step belongs to the curve."""
    return _is_number(value) and -1 < value < 2**53  # type: ignore[operator]


def quick(path: Path, lines: int = QUICK_LINES) -> Columns:
    """A first look at a long file: lines evenly spread by position, found without reading what lies between."""
    made = Columns(path)
    made.sampled = True
    size = path.stat().st_size
    found: list[bytes] = []
    with path.open("rb") as file:
        for index in range(lines):
            file.seek(size * index // lines)
            if index:
                file.readline()
            found.append(file.readline())
        file.seek(max(0, size - TAIL))
        tail = file.read().splitlines()[1:]
    made._take([raw for raw in found if raw.endswith(b"\n")] + tail)
    return made


def thin(x: Numbers, y: Numbers, points: int = 1200) -> tuple[list[float | None], list[float | None]]:
    """At most about `points` pairs that keep every bucket's lowest and highest value; None breaks the line where x goes back."""
    known = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[known], y[known]
    if len(x) > points:
        keep = _extremes(y, max(1, points // 2))
        x, y = x[keep], y[keep]
    return _broken(x, y)


def _extremes(y: Numbers, buckets: int) -> npt.NDArray[np.int64]:
    edges = np.linspace(0, len(y), buckets + 1).astype(np.int64)
    found = {0, len(y) - 1}
    for low, high in pairwise(edges.tolist()):
        if high > low:
            part = y[low:high]
            found.update((int(low + part.argmin()), int(low + part.argmax())))
    return np.array(sorted(found), dtype=np.int64)


def _broken(x: Numbers, y: Numbers) -> tuple[list[float | None], list[float | None]]:
    xs: list[float | None] = []
    ys: list[float | None] = []
    before = -np.inf
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if a < before:  # a restart goes back to its checkpoint: draw the repeated part as a line of its own
            xs.append(before)
            ys.append(None)
        xs.append(a)
        ys.append(b)
        before = a
    return xs, ys


def axis(columns: Columns, name: str) -> Numbers:
    """The x axis by its name: step, tokens, time (hours since the first line) or kwh."""
    if name == "time":
        times = columns.get("time")
        return (times - first_known(times)) / 3600
    if name == "kwh":
        return columns.get("energy_joules") / 3.6e6
    return columns.get(name if name in ("step", "tokens") else "step")


AXES = {"step": "step", "tokens": "tokens", "time": "hours", "kwh": "kWh"}


def middle(values: Numbers | Sequence[float], last: int = 200, skip: int = 2) -> float | None:
    """The median of the last values, without the first lines (compilation); None when there are none."""
    found = np.asarray(values, dtype=np.float64)
    found = found[skip:] if len(found) > skip + 2 else found
    found = found[~np.isnan(found)][-last:]
    return float(np.median(found)) if len(found) else None


def last_known(values: Numbers) -> float | None:
    found = values[~np.isnan(values)]
    return float(found[-1]) if len(found) else None


def first_known(values: Numbers) -> float:
    """NaN when there is none."""
    found = values[~np.isnan(values)]
    return float(found[0]) if len(found) else float("nan")


def highest(values: Numbers) -> float | None:
    """The peak over the whole run: after a restart the counter of the devices begins anew."""
    found = values[~np.isnan(values)]
    return float(found.max()) if len(found) else None


def step_of(event: Mapping[str, Any], columns: Columns) -> float | None:
    """The event's own step, else the last step written before it: a fault does not know where the others were."""
    step = event.get("step")
    if isinstance(step, int):
        return step
    times, steps = columns.get("time"), columns.get("step")
    if event.get("time") is None or not len(times):
        return None
    before = np.nonzero(times <= event["time"])[0]
    return float(steps[before[-1]]) if len(before) else None
