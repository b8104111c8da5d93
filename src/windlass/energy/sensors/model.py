"""What would the node draw by its data sheet? A fallback where nothing can be read; everything it says is labelled "modelled"."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.clusters.load import load_device
from windlass.clusters.model import Cluster
from windlass.energy.sensors.base import FileSensor, Sample, SensorMissing
from windlass.errors import WindlassError

WATTS_PER_BUSY_CORE = 10.0
"""Our assumption for a server or desktop CPU whose power nobody states: package power divided by cores under load."""


class ModelSensor(FileSensor):
    """Devices at TDP while the run lasts (an upper estimate), CPUs in proportion to their load."""

    name = "model"

    def __init__(self, cluster: Cluster | None, devices: int | None = None, *, stat: Path = Path("/proc/stat")) -> None:
        self._stat, self._busy = stat, _jiffies(stat)
        self._cores = os.cpu_count() or 1
        words: list[str] = []
        self._fixed, self._cpu_watts = 0.0, None
        if cluster is not None:
            self._cpu_watts = cluster.node.cpu_watts
            self._fixed, words = _fixed_watts(cluster, devices)
        if self._cpu_watts is None:
            self._cpu_watts = WATTS_PER_BUSY_CORE * self._cores
            words.append(f"{WATTS_PER_BUSY_CORE:g} W per busy core (assumed)")
        else:
            words.append(f"CPUs {self._cpu_watts:g} W x load")
        if self._busy is None and self._fixed == 0:
            raise SensorMissing("no power model: the cluster file names no power and the CPU's load cannot be read")
        self.note = "modelled: " + " + ".join(words)

    def read(self) -> list[Sample]:
        now, share = _jiffies(self._stat), 1.0
        if now is not None and self._busy is not None and now[1] > self._busy[1]:
            share = (now[0] - self._busy[0]) / (now[1] - self._busy[1])
        elif now is not None:
            share = 0.0
        self._busy = now
        return [Sample("node", "node", watts=self._fixed + (self._cpu_watts or 0.0) * share, modelled=True)]


def _fixed_watts(cluster: Cluster, devices: int | None) -> tuple[float, list[str]]:
    try:
        device = load_device(cluster.device)
    except WindlassError:
        return 0.0, []
    count = cluster.node.devices if devices is None else devices
    words, watts = [], 0.0
    if device.vendor != "cpu" and device.tdp_watts:
        watts += count * device.tdp_watts
        words.append(f"{count} x {device.tdp_watts:g} W ({device.name} at TDP)")
    if cluster.node.other_watts:
        watts += cluster.node.other_watts
        words.append(f"rest of the node {cluster.node.other_watts:g} W")
    return watts, words


def _jiffies(stat: Path) -> tuple[int, int] | None:
    """(busy, all) processor time of the machine since boot."""
    try:
        fields = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
