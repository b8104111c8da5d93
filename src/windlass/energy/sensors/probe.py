"""Which sensors does this node have? All are tried; each that is absent leaves its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.clusters.load import load_device
from windlass.clusters.model import Cluster
from windlass.energy.sensors.amd import AmdSensor, AmdSysfsSensor
from windlass.energy.sensors.base import Sensor, SensorMissing
from windlass.energy.sensors.cray import CraySensor
from windlass.energy.sensors.grace import GraceSensor
from windlass.energy.sensors.model import ModelSensor
from windlass.energy.sensors.nvml import NvmlSensor
from windlass.energy.sensors.rapl import RaplSensor
from windlass.errors import WindlassError

Opener = Callable[[], Sensor]


def open_sensors(
    cluster: Cluster | None, devices: Sequence[int] | None = None, *, model: bool = True
) -> tuple[list[Sensor], dict[str, str]]:
    """The sensors that answer, and source -> reason for the others. Only where none answers does the power model stand in."""
    found, missing = open_each(_openers(cluster, devices))
    if "amdsmi" not in missing:
        missing.pop("amd-sysfs", None)
        found = [s for s in found if s.name != "amd-sysfs"]  # both read the same modules
    if not found and model:
        extra, why = open_each({"model": lambda: ModelSensor(cluster, None if devices is None else len(devices))})
        found, missing = extra, {**missing, **why}
    return found, missing


def _openers(cluster: Cluster | None, devices: Sequence[int] | None) -> dict[str, Opener]:
    counters = cluster.energy.pm_counters if cluster is not None else None
    return {
        "nvml": lambda: NvmlSensor(devices),
        "amdsmi": lambda: AmdSensor(devices, per_module=_per_module(cluster)),
        "amd-sysfs": lambda: AmdSysfsSensor(devices),
        "cray": lambda: CraySensor(Path(counters) if counters else None),
        "grace": GraceSensor,
        "rapl": RaplSensor,
    }


def open_each(openers: dict[str, Opener]) -> tuple[list[Sensor], dict[str, str]]:
    found: list[Sensor] = []
    missing: dict[str, str] = {}
    for name, opener in openers.items():
        try:
            found.append(opener())
        except SensorMissing as reason:
            missing[name] = str(reason)
        except Exception as error:  # a broken driver must not stop training
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _per_module(cluster: Cluster | None) -> int:
    if cluster is None:
        return 1
    try:
        return load_device(cluster.device).per_module
    except WindlassError:
        return 1
