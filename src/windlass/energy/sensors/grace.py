"""What does a Grace-Hopper node report? ACPI power meters in hwmon: the module (GPU and CPU together) and the CPU, per socket."""

from __future__ import annotations

import re
from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import FileSensor, Sample, SensorMissing

_LABEL = re.compile(r"^(Module|Grace|CPU|SysIO) Power Socket (\d+)")


class GraceSensor(FileSensor):
    name = "grace"

    def __init__(self, root: Path = Path("/sys/class/hwmon")) -> None:
        self._meters: list[tuple[str, Scope, Path]] = []
        for meter in sorted(root.glob("hwmon*/device/power1_average")):
            match = _LABEL.match(_text(meter.parent / "power1_oem_info"))
            if match and match[1] in ("Module", "Grace"):  # CPU and SysIO lie inside Grace, Grace inside Module
                self._meters.append(
                    (f"{match[1].lower()}{match[2]}", "module" if match[1] == "Module" else "cpu", meter)
                )
        if not self.read():
            raise SensorMissing(f"no Grace power meter under {root}")
        self.note = "power only, read and summed"

    def read(self) -> list[Sample]:
        found = ((part, scope, _text(path)) for part, scope, path in self._meters)
        return [Sample(part, scope, watts=int(text) / 1e6) for part, scope, text in found if text.isdigit()]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
