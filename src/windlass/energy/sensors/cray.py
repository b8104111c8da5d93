"""Cray EX nodes: /sys/cray/pm_counters with the node, its CPU, memory and accelerators, updated ten times a second.

Switches, cooling and cabinet conversion are not included. The accelerators are part of the node's figure.
"""

import re
from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing, read_text

# Reads in a row with the same `freshness` after which the counters count as stopped; at 1 Hz every read differs.
STALE_READS = 30


class CraySensor(Sensor):
    name = "cray"
    update_seconds: float | None = 0.1  # ten times a second, as documented

    def __init__(self, host: SensorHost) -> None:
        folder = host.cluster.energy.pm_counters if host.cluster is not None else None
        self._root = root = host.root / (folder or "/sys/cray/pm_counters").removeprefix("/")
        if not (root / "energy").is_file():
            raise SensorMissing(f"no {root}/energy: not a Cray EX node, or the folder is not bound into the container")
        parts: list[tuple[str, Scope, str]] = [
            ("node", "node", ""),
            ("cpu", "cpu", "cpu_"),
            ("memory", "memory", "memory_"),
        ]
        names = sorted(p.name.removesuffix("_energy") for p in root.glob("accel*_energy"))
        parts += [(name, "device", f"{name}_") for name in names if re.fullmatch(r"accel\d+", name)]
        self._parts = [p for p in parts if (root / f"{p[2]}energy").is_file()]
        self._freshness, self._same_reads = "", 0
        if not any(s.part == "node" for s in self.read()):
            raise SensorMissing(f"{root}/energy cannot be read as '<value> J'")

    def read(self) -> list[Sample]:
        """Nothing while the counters stand still: a stopped counter is not an idle node."""
        freshness = read_text(self._root / "freshness")
        self._same_reads = self._same_reads + 1 if freshness and freshness == self._freshness else 0
        self._freshness = freshness
        if self._same_reads >= STALE_READS:
            self.note = f"the counters did not change for {STALE_READS} reads"
            return []
        root, epoch = self._root, read_text(self._root / "startup")
        return [
            Sample(part, scope, joules, value(root / f"{prefix}power", "W"), epoch=epoch)
            for part, scope, prefix in self._parts
            if (joules := value(root / f"{prefix}energy", "J")) is not None
        ]


def value(path: Path, unit: str) -> float | None:
    """`3219 W 1697546843471129 us` -> 3219.0; None when the file is absent or has another unit."""
    match = re.match(rf"(\d+(?:\.\d+)?)\s+{unit}(?:\s|$)", read_text(path))
    return float(match[1]) if match else None
