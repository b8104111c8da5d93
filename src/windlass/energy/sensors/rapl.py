"""CPUs: RAPL counters of packages and DRAM (microjoules, wrapping); since 2020 mostly readable by root only."""

from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing, read_text


class RaplSensor(Sensor):
    name = "rapl"
    update_seconds: float | None = 0.001  # about a millisecond, by Intel's manual

    def __init__(self, host: SensorHost) -> None:
        self._zones: list[tuple[str, Scope, Path, float | None]] = []
        root, unreadable = host.root / "sys/class/powercap", 0
        for zone in sorted(root.glob("intel-rapl:*")):
            # Packages and DRAM are disjoint. Core and uncore lie inside the package and psys around everything.
            name = read_text(zone / "name")
            if not name.startswith("package") and name != "dram":
                continue
            if _joules(zone / "energy_uj") is None:
                unreadable += 1
                continue
            part = name if name != "dram" else f"dram-{zone.name.split(':')[1]}"
            scope: Scope = "memory" if name == "dram" else "cpu"
            self._zones.append((part, scope, zone / "energy_uj", _joules(zone / "max_energy_range_uj")))
        if not self._zones and unreadable:
            raise SensorMissing(
                f"{unreadable} RAPL zones exist but only root may read them: CPU energy is not measured"
            )
        if not self._zones:
            raise SensorMissing(f"no RAPL zone under {root}")

    def read(self) -> list[Sample]:
        readings = ((part, scope, _joules(path), wraps_at) for part, scope, path, wraps_at in self._zones)
        return [Sample(part, scope, j, wraps_at=wraps_at) for part, scope, j, wraps_at in readings if j is not None]


def _joules(path: Path) -> float | None:
    microjoules = read_text(path)
    return int(microjoules) / 1e6 if microjoules.isdigit() else None
