"""What does a Cray EX node count? /sys/cray/pm_counters: the whole node, its CPU, memory and accelerators, ten times a second.

Switches, cooling and cabinet conversion are not in it. The accelerators are inside the node's figure.
"""

from __future__ import annotations

import re
from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import FileSensor, Sample, SensorMissing

DEFAULT = Path("/sys/cray/pm_counters")
_PARTS: tuple[tuple[str, Scope, str], ...] = (
    ("node", "node", ""),
    ("cpu", "cpu", "cpu_"),
    ("memory", "memory", "memory_"),
)
STALE_READS = 30
"""Reads in a row with the same `freshness` after which the counters are taken for stopped; at 1 Hz the files change every read."""


class CraySensor(FileSensor):
    name = "cray"
    update_seconds: float | None = 0.1  # ten times a second, as documented

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or DEFAULT
        if not (self._root / "energy").is_file():
            raise SensorMissing(
                f"no {self._root}/energy: this is no Cray EX node, or the folder is not bound into the container"
            )
        accelerators = sorted(p.name.removesuffix("_energy") for p in self._root.glob("accel*_energy"))
        self._parts = [p for p in _PARTS if (self._root / f"{p[2]}energy").is_file()]
        self._parts += [(name, "device", f"{name}_") for name in accelerators if re.fullmatch(r"accel\d+", name)]
        self._freshness, self._same = "", 0
        if not any(s.part == "node" for s in self.read()):
            raise SensorMissing(f"{self._root}/energy cannot be read as '<value> J'")

    def read(self) -> list[Sample]:
        """Nothing while the counters stand still: a stopped counter is not an idle node."""
        if self._stale():
            self.note = f"the counters stood still for {STALE_READS} reads"
            return []
        epoch = _text(self._root / "startup")
        samples = []
        for part, scope, prefix in self._parts:
            joules, watts = value(self._root / f"{prefix}energy", "J"), value(self._root / f"{prefix}power", "W")
            if joules is not None:
                samples.append(Sample(part, scope, joules, watts, epoch=epoch))
        return samples

    def _stale(self) -> bool:
        now = _text(self._root / "freshness")
        self._same = self._same + 1 if now and now == self._freshness else 0
        self._freshness = now
        return self._same >= STALE_READS


def value(path: Path, unit: str) -> float | None:
    """`3219 W 1697546843471129 us` -> 3219.0; None when the file is absent or in another unit."""
    words = _text(path).split()
    if len(words) < 2 or words[1] != unit:
        return None
    try:
        return float(words[0])
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
