"""Grace-Hopper nodes: ACPI power meters of each socket's module (GPU and CPU together) and of its CPU."""

import re
from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing, read_text


class GraceSensor(Sensor):
    name = "grace"
    note = "power only, read and summed"

    def __init__(self, host: SensorHost) -> None:
        root = host.root / "sys/class/hwmon"
        self._meters: list[tuple[str, Scope, Path]] = []
        for meter in sorted(root.glob("hwmon*/device/power1_average")):
            # The meters "CPU" and "SysIO" are part of Grace, and Grace is part of Module.
            match = re.match(r"(Module|Grace) Power Socket (\d+)", read_text(meter.parent / "power1_oem_info"))
            if match:
                scope: Scope = "module" if match[1] == "Module" else "cpu"
                self._meters.append((f"{match[1].lower()}{match[2]}", scope, meter))
        if not self.read():
            raise SensorMissing(f"no Grace power meter under {root}")

    def read(self) -> list[Sample]:
        readings = ((part, scope, read_text(path)) for part, scope, path in self._meters)
        return [Sample(part, scope, watts=int(text) / 1e6) for part, scope, text in readings if text.isdigit()]
