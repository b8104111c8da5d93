"""What do the CPUs count? RAPL package and DRAM zones (microjoules, wrapping); root-only on most machines since 2020."""

from __future__ import annotations

from pathlib import Path

from windlass.energy.measure import Scope
from windlass.energy.sensors.base import FileSensor, Sample, SensorMissing


class RaplSensor(FileSensor):
    name = "rapl"
    update_seconds: float | None = 0.001  # about a millisecond, by Intel's manual

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        zones = [z for z in sorted(root.glob("intel-rapl:*")) if _scope(z) is not None]
        if not zones:
            raise SensorMissing(f"no RAPL zone under {root}")
        self._zones: list[tuple[str, Scope, Path, float | None]] = []
        refused = 0
        for zone in zones:
            scope = _scope(zone)
            try:
                _number(zone / "energy_uj")
            except (OSError, ValueError):
                refused += 1
                continue
            if scope is not None:
                self._zones.append((_part(zone), scope, zone / "energy_uj", _range(zone)))
        if not self._zones:
            raise SensorMissing(f"{refused} RAPL zones exist but only root may read them: CPU energy is not measured")

    def read(self) -> list[Sample]:
        samples = []
        for part, scope, file, wraps_at in self._zones:
            try:
                samples.append(Sample(part, scope, joules=_number(file) / 1e6, wraps_at=wraps_at))
            except (OSError, ValueError):
                continue
        return samples


def _scope(zone: Path) -> Scope | None:
    """Packages and DRAM are disjoint; core and uncore lie inside the package, psys around everything, so they are left out."""
    try:
        name = (zone / "name").read_text().strip()
    except OSError:
        return None
    return "cpu" if name.startswith("package") else "memory" if name == "dram" else None


def _part(zone: Path) -> str:
    name = (zone / "name").read_text().strip()
    return name if name.startswith("package") else f"{name}-{zone.name.split(':')[1]}"


def _range(zone: Path) -> float | None:
    try:
        return _number(zone / "max_energy_range_uj") / 1e6
    except (OSError, ValueError):
        return None


def _number(path: Path) -> float:
    return float(path.read_text())
