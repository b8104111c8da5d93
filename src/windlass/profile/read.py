"""What happened in this file? Reads one trace into columns, whatever version of the profiler wrote it."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.errors import ProfileError
from windlass.profile.stream import EventStream, Progress
from windlass.profile.trace import MISSING, Collective, Kind, Trace

KINDS: dict[str, Kind] = {
    "cpu_op": Kind.OPERATOR, "operator": Kind.OPERATOR, "python": Kind.PYTHON,
    "user_annotation": Kind.ANNOTATION, "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "runtime": Kind.RUNTIME, "cuda_runtime": Kind.RUNTIME, "mtia_runtime": Kind.RUNTIME, "glow_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME, "privateuse1_runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL, "memcpy": Kind.MEMCPY, "gpu_memcpy": Kind.MEMCPY, "memset": Kind.MEMSET, "gpu_memset": Kind.MEMSET,
}  # fmt: skip
"""The categories that the plugin knew, from PyTorch 1.8 to its removal; their spelling varies in case."""

# `torch.autograd.profiler` without Kineto writes no category, but names the process so.
_LEGACY_PROCESSES = {"CPU functions": Kind.OPERATOR, "CUDA functions": Kind.KERNEL}
_NANOSECOND_STAMPS = 1e17
"""Microseconds since 1970 are near 2e15, nanoseconds near 2e18: nothing else is that large."""
_DEVICE_KINDS = frozenset((Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))
_INT64 = 2**63 - 1


def read_trace(path: Path | str, *, shapes: bool = False, progress: Progress | None = None) -> Trace:
    """One trace file as columns, in bounded memory. `shapes` also keeps the operators' input shapes."""
    stream = EventStream(Path(path), progress)
    columns = _Columns(shapes)
    for batch in stream:
        columns.add(batch)
    return columns.finish(stream)


def kind_of(category: Any, pid: Any) -> Kind | None:
    """None: an event that no table needs."""
    if not isinstance(category, str):
        return _LEGACY_PROCESSES.get(pid) if isinstance(pid, str) else None
    lower = category.lower()
    if lower in KINDS:
        return KINDS[lower]
    return Kind.DRIVER if lower.endswith(("_runtime", "_driver")) else None


class _Columns:
    """Growing columns; `array` keeps a number in eight bytes where a list would need forty."""

    def __init__(self, shapes: bool) -> None:
        self.kind, self.name, self.thread, self.shape = array("B"), array("i"), array("i"), array("i")
        self.start, self.length, self.blocks, self.occupancy = array("d"), array("d"), array("d"), array("d")
        self.external, self.correlation = array("q"), array("q")
        self.device, self.stream = array("i"), array("i")
        self.keep_shapes = shapes
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[str, str], int] = {}
        self.shapes: dict[str, int] = {}
        self.other_ids: dict[Any, int] = {}
        self.kinds: dict[tuple[Any, Any], Kind | None] = {}
        self.open: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        self.categories: Counter[str] = Counter()
        self.peaks: dict[int, float] = {}
        self.collectives: dict[int, Collective] = {}
        self.base = 0
        """The first stamp, when stamps are nanoseconds since 1970."""
        self.events = self.incomplete = self.python_functions = 0

    def add(self, batch: list[Any]) -> None:
        self.events += len(batch)
        for event in batch:
            if not isinstance(event, dict):
                continue
            phase = event.get("ph")
            if phase == "X":
                self.add_span(event)
            elif phase == "i" or phase == "I":
                if event.get("name") == "[memory]":
                    self.add_memory(event.get("args"))
            elif phase == "B" or phase == "E":
                self.pair(event, phase)

    def pair(self, event: dict[str, Any], phase: str) -> None:
        """Begin and end events of one thread become one span."""
        stack = self.open.setdefault((event.get("pid"), event.get("tid")), [])
        if phase == "B":
            stack.append(event)
        elif stack:
            begun = stack.pop()
            start, end = _number(begun.get("ts")), _number(event.get("ts"))
            if start is not None and end is not None:
                self.add_span({**begun, "dur": end - start})

    def add_span(self, event: dict[str, Any]) -> None:
        category, pid = event.get("cat"), event.get("pid")
        key = (category, pid if category is None else None)
        try:
            kind = self.kinds[key]
        except KeyError:
            kind = self.kinds[key] = kind_of(*key)
        except TypeError:  # a category or process that is a list: no profiler's event
            return
        args = event.get("args")
        if not isinstance(args, dict):
            args = {}
        name = event.get("name")
        if kind is None:
            kind = self.unknown(category, args)
            if kind is None:
                return
        if not isinstance(name, str):
            name = str(name)
        if (kind is Kind.OPERATOR or kind is Kind.ANNOTATION or kind is Kind.GPU_ANNOTATION) and name.startswith(
            "ProfilerStep#"
        ):
            kind = Kind.GPU_STEP if kind is Kind.GPU_ANNOTATION else Kind.STEP
        start = event.get("ts")
        length = event.get("dur")
        if type(start) is not float and type(start) is not int:
            start = _number(start)
            if start is None:
                self.incomplete += 1
                return
        if start > _NANOSECOND_STAMPS:
            # Too large for a float to keep single nanoseconds, so they are counted from the first one.
            self.base = self.base or int(start)
            start -= self.base
        if type(length) is not float and type(length) is not int:
            length = _number(length)
            if length is None:
                self.incomplete += 1
                length = 0.0
        self.kind.append(kind)
        self.start.append(start)
        self.length.append(length)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.thread.append(self.threads.setdefault((str(pid), str(event.get("tid"))), len(self.threads)))
        self.add_args(kind, args)

    def add_args(self, kind: Kind, args: dict[str, Any]) -> None:
        external = args.get("external id")
        self.external.append(self.id_of(args.get("External id") if external is None else external))
        self.correlation.append(self.id_of(args.get("correlation")))
        if "Collective name" in args:
            self.collectives[len(self.kind) - 1] = _collective(args)
        on_device = kind in _DEVICE_KINDS
        self.device.append(_small(args.get("device")) if on_device else MISSING)
        self.stream.append(_small(args.get("stream")) if on_device else MISSING)
        self.blocks.append(_measure(args.get("blocks per SM")) if on_device else math.nan)
        self.occupancy.append(_measure(args.get("est. achieved occupancy %")) if on_device else math.nan)
        if self.keep_shapes:
            dims = args.get("Input Dims", args.get("Input dims"))
            text = "" if dims is None else str(dims)
            self.shape.append(self.shapes.setdefault(text, len(self.shapes)))

    def unknown(self, category: Any, args: dict[str, Any]) -> Kind | None:
        """Python frames are counted only, except those of modules, which are parents in the tree of operators."""
        lower = category.lower() if isinstance(category, str) else "no category"
        if lower == "python_function":
            self.python_functions += 1
            return Kind.MODULE if args.get("Python module id") is not None else None
        self.categories[lower] += 1
        return None

    def add_memory(self, args: Any) -> None:
        if not isinstance(args, dict) or args.get("Device Type") in (None, 0):
            return
        device, allocated = args.get("Device Id"), _number(args.get("Total Allocated"))
        if isinstance(device, int) and allocated is not None:
            self.peaks[device] = max(self.peaks.get(device, 0.0), allocated)

    def id_of(self, value: Any) -> int:
        if type(value) is int and -_INT64 <= value <= _INT64:
            return value
        if value is None:
            return MISSING
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            # Any other text gets a number of its own, far from the real ones.
            return -(2**62) + self.other_ids.setdefault(str(value), len(self.other_ids))

    def finish(self, stream: EventStream) -> Trace:
        if not len(self.kind):
            raise self.nothing(stream.path)
        start, length = np.frombuffer(self.start, dtype=np.float64), np.frombuffer(self.length, dtype=np.float64)
        if self.base:
            start, length = start / 1e3, length / 1e3
        end = start + length
        order = np.argsort(start, kind="stable")
        shape = np.frombuffer(self.shape, dtype=np.int32)[order] if self.keep_shapes else np.zeros(0, dtype=np.int32)
        return Trace(
            path=stream.path,
            names=list(self.names),
            threads=list(self.threads),
            shapes=list(self.shapes),
            kind=np.frombuffer(self.kind, dtype=np.uint8)[order],
            name=np.frombuffer(self.name, dtype=np.int32)[order],
            start=start[order],
            end=end[order],
            thread=np.frombuffer(self.thread, dtype=np.int32)[order],
            external=np.frombuffer(self.external, dtype=np.int64)[order],
            correlation=np.frombuffer(self.correlation, dtype=np.int64)[order],
            device=np.frombuffer(self.device, dtype=np.int32)[order],
            stream=np.frombuffer(self.stream, dtype=np.int32)[order],
            blocks=np.frombuffer(self.blocks, dtype=np.float64)[order],
            occupancy=np.frombuffer(self.occupancy, dtype=np.float64)[order],
            shape=shape,
            collectives=self.placed(order),
            meta=stream.meta,
            peak_bytes=self.peaks,
            events_read=self.events,
            incomplete=self.incomplete,
            python_functions=self.python_functions,
        )

    def placed(self, order: NDArray[np.intp]) -> dict[int, Collective]:
        """By the row's place in the sorted trace."""
        if not self.collectives:
            return {}
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return {int(place[row]): said for row, said in self.collectives.items()}

    def nothing(self, path: Path) -> ProfileError:
        if not self.events:
            return ProfileError(
                "profile.holds-events",
                f"{path} holds no events",
                hint="was the profiler's window open during any step?",
            )
        found = ", ".join(name for name, _ in self.categories.most_common(5)) or "none"
        return ProfileError(
            "profile.none-events-operator-kernel",
            f"none of the {self.events:,} events in {path} is an operator, a kernel or a copy (categories found: {found})",
            hint="a trace of another tool? windlass reads what torch.profiler writes",
        )


_DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "half": 2, "bfloat16": 2, "short": 2, "float": 4, "int": 4,
    "double": 8, "long": 8,
}  # fmt: skip


def _collective(args: dict[str, Any]) -> Collective:
    """The larger side counts: an all-gather puts out what all put in, a reduce-scatter takes in what all take out."""
    elements = [n for key in ("In msg nelems", "Out msg nelems") if (n := _number(args.get(key))) is not None]
    width = _DTYPE_BYTES.get(str(args.get("dtype")).lower())
    group = _small(args.get("Group size"))
    return Collective(
        name=str(args["Collective name"]),
        message_bytes=max(elements) * width if elements and width else None,
        group=group if group > 0 else None,
    )


def _number(value: Any) -> float | None:
    """Stamps are sometimes written as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _measure(value: Any) -> float:
    number = _number(value)
    return math.nan if number is None else number


def _small(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return MISSING
    return number if -(2**31) < number < 2**31 else MISSING
