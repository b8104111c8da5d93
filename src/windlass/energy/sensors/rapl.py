"""CPUs: RAPL counters of packages and DRAM (microjoules, wrapping); since 2020 mostly readable by root only."""

from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing, read_text


class RaplSensor(Sensor):
    name = "rapl"
    update_seconds: float | None = 0.001  # about a millisecond, by Intel's manual

    def __init__(self, host: SensorHost) -> None:
        root = host.root / "sys/class/powercap"
        names = {zone: read_text(zone / "name") for zone in sorted(root.glob("intel-rapl:*"))}
        # Packages and DRAM are disjoint. Core and uncore lie inside the package and psys around everything.
        wanted = {zone: name for zone, name in names.items() if name.startswith("package") or name == "dram"}
        self._zones: list[tuple[str, Scope, Path, float | None]] = [
            (
                f"dram-{zone.name.split(':')[1]}" if name == "dram" else name,
                "memory" if name == "dram" else "cpu",
                zone / "energy_uj",
                _joules(zone / "max_energy_range_uj"),
            )
            for zone, name in wanted.items()
            if _joules(zone / "energy_uj") is not None
        ]
        if not self._zones:
            unreadable = f"{len(wanted)} RAPL zones exist but only root may read them: CPU energy is not measured"
            raise SensorMissing(unreadable if wanted else f"no RAPL zone under {root}")

    def read(self) -> list[Sample]:
        readings = ((part, scope, _joules(path), wraps_at) for part, scope, path, wraps_at in self._zones)
        return [Sample(part, scope, j, wraps_at=wraps_at) for part, scope, j, wraps_at in readings if j is not None]


def _joules(path: Path) -> float | None:
    microjoules = read_text(path)
    return int(microjoules) / 1e6 if microjoules.isdigit() else None
