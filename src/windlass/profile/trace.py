"""What does windlass keep of a trace? One row per event in plain columns, so that a million events are a few dozen megabytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

MISSING = -1
"""Stands for an absent id in the integer columns."""


class Kind(IntEnum):
    """What an event is. The last ones are known to windlass, not to the plugin that mode `tb` reproduces."""

    OPERATOR = 0
    PYTHON = 1
    STEP = 2
    ANNOTATION = 3
    GPU_ANNOTATION = 4
    GPU_STEP = 5
    RUNTIME = 6
    KERNEL = 7
    MEMCPY = 8
    MEMSET = 9
    MODULE = 10
    DRIVER = 11


@dataclass(frozen=True)
class Collective:
    """What newer profilers write beside a collective's kernel or operator."""

    name: str
    message_bytes: float | None
    group: int | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One file: one rank's window. Times are microseconds; rows stand in order of time."""

    path: Path
    names: list[str]
    threads: list[tuple[str, str]]
    """(pid, tid) of each thread or stream, as text."""
    shapes: list[str]

    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    start: Floats
    end: Floats
    thread: NDArray[np.int32]
    external: Ints
    correlation: Ints
    device: NDArray[np.int32]
    stream: NDArray[np.int32]
    blocks: Floats
    """`blocks per SM` of a kernel; not-a-number where the trace has none."""
    occupancy: Floats
    shape: NDArray[np.int32]

    collectives: dict[int, Collective] = field(default_factory=dict)
    """Row -> what the trace says of its collective."""
    meta: dict[str, Any] = field(default_factory=dict)
    peak_bytes: dict[int, float] = field(default_factory=dict)
    """Highest allocated memory by device id, where the trace records memory."""
    events_read: int = 0
    incomplete: int = 0
    """Events without a duration; they count as zero long."""
    python_functions: int = 0

    def rows(self, *kinds: Kind) -> Ints:
        mask = np.zeros(len(self.kind), dtype=bool)
        for kind in kinds:
            mask |= self.kind == kind
        return np.flatnonzero(mask)

    def has(self, kind: Kind) -> bool:
        return bool((self.kind == kind).any())

    def name_of(self, row: int) -> str:
        return self.names[int(self.name[row])]

    def names_where(self, test: Any) -> Mask:
        """For each row: does its name pass? The test runs once per distinct name."""
        passed = np.fromiter((bool(test(n)) for n in self.names), dtype=bool, count=len(self.names))
        return passed[self.name] if len(self.names) else np.zeros(0, dtype=bool)

    @property
    def of_lightning(self) -> bool:
        return self.meta.get("Framework") == "pytorch-lightning"

    @property
    def rank(self) -> int | None:
        info = self.meta.get("distributedInfo")
        value = info.get("rank") if isinstance(info, dict) else None
        return value if isinstance(value, int) else None

    @property
    def world_size(self) -> int | None:
        info = self.meta.get("distributedInfo")
        value = info.get("world_size") if isinstance(info, dict) else None
        return value if isinstance(value, int) else None

    @property
    def backend(self) -> str | None:
        info = self.meta.get("distributedInfo")
        value = info.get("backend") if isinstance(info, dict) else None
        return value if isinstance(value, str) else None

    @property
    def device_properties(self) -> list[dict[str, Any]]:
        value = self.meta.get("deviceProperties")
        return [p for p in value if isinstance(p, dict)] if isinstance(value, list) else []

    @property
    def device_name(self) -> str | None:
        """Of the device the kernels ran on; the first listed when no kernel says."""
        used = self.device[self.rows(Kind.KERNEL)]
        props = {p.get("id"): p for p in self.device_properties}
        chosen = props.get(int(used[0])) if len(used) else None
        found = chosen or next(iter(self.device_properties), None)
        return str(found["name"]) if found and found.get("name") else None
