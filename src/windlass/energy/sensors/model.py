"""Power by the data sheet, a fallback where nothing can be read. Everything it reports is labelled "modelled"."""

import contextlib
import os
from pathlib import Path

from windlass.clusters.load import load_device
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing, read_text
from windlass.errors import WindlassError

# Our assumption for a CPU without a stated power: package power divided by cores under load.
WATTS_PER_BUSY_CORE = 10.0


class ModelSensor(Sensor):
    """Devices at TDP while the run lasts (an upper estimate), CPUs in proportion to their load."""

    name = "model"
    fallback_for = "any"

    def __init__(self, host: SensorHost) -> None:
        cluster, terms = host.cluster, []
        self._stat = host.root / "proc/stat"
        self._jiffies, self._fixed_watts = _jiffies(self._stat), 0.0
        with contextlib.suppress(WindlassError):  # a device that no file describes has no known power
            device = load_device(cluster.device) if cluster else None
            if cluster and device and device.vendor != "cpu" and device.tdp_watts:
                count = cluster.node.devices if host.devices is None else len(host.devices)
                self._fixed_watts += count * device.tdp_watts
                terms.append(f"{count} x {device.tdp_watts:g} W ({device.name} at TDP)")
            if cluster and cluster.node.other_watts:
                self._fixed_watts += cluster.node.other_watts
                terms.append(f"other parts of the node {cluster.node.other_watts:g} W")
        cpu_watts = None if cluster is None else cluster.node.cpu_watts
        self._cpu_watts = cpu_watts or WATTS_PER_BUSY_CORE * (os.cpu_count() or 1)
        assumed = f"{WATTS_PER_BUSY_CORE:g} W per busy core (assumed)"
        terms.append(f"CPUs {cpu_watts:g} W x load" if cpu_watts else assumed)
        if self._jiffies is None and self._fixed_watts == 0:
            raise SensorMissing("no power model: the cluster file names no power and the CPU's load cannot be read")
        self.note = "modelled: " + " + ".join(terms)

    def read(self) -> list[Sample]:
        before, self._jiffies = self._jiffies, _jiffies(self._stat)
        load = 1.0
        if self._jiffies is not None:
            busy, total = (now - then for now, then in zip(self._jiffies, before or self._jiffies, strict=True))
            load = busy / total if total > 0 else 0.0
        return [Sample("node", "node", watts=self._fixed_watts + self._cpu_watts * load, modelled=True)]


def _jiffies(stat: Path) -> tuple[int, int] | None:
    """(busy, total) processor time of the machine since boot."""
    try:
        fields = [int(field) for field in read_text(stat).splitlines()[0].split()[1:9]]
        idle = fields[3] + fields[4]
    except (ValueError, IndexError):
        return None
    return sum(fields) - idle, sum(fields)
