"""Energy sensors: one file per sensor, opened through a registry that other packages extend.

A file `shelf_meter.py` in this folder with a class `ShelfMeterSensor` is the sensor "shelf-meter"; nothing else names it.
Other packages register a class with an entry point in the group "windlass.sensors".
"""

import pkgutil

from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing
from windlass.registry import Registry

__all__ = ["SENSORS", "Sample", "Sensor", "SensorHost", "SensorMissing", "open_sensors"]

SENSORS = Registry(
    "windlass.sensors",
    {
        module.name.replace("_", "-"): f"{__name__}.{module.name}:{module.name.title().replace('_', '')}Sensor"
        for module in pkgutil.iter_modules(__path__)
        if module.name != "base"
    },
)


def open_sensors(host: SensorHost) -> tuple[list[Sensor], dict[str, str]]:
    """The sensors of this node, and name -> reason for those that are missing. The power model opens only where all are."""
    opened: dict[str, Sensor] = {}
    missing: dict[str, str] = {}
    for stage in range(3):
        for name in SENSORS.names():
            try:
                sensor_class: type[Sensor] = SENSORS.load(name)
                other = sensor_class.fallback_for
                is_needed = not (opened if other == "any" else other in opened)
                if is_needed and stage == {"": 0, "any": 2}.get(other, 1):
                    opened[name] = sensor_class(host)
            except SensorMissing as reason:
                missing[name] = str(reason)
            except Exception as error:  # a broken driver or package must not stop training
                missing[name] = f"{type(error).__name__}: {error}"
    return list(opened.values()), missing
