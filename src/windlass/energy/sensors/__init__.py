"""Where can energy be read on this node? One file per kind of counter, all behind one Protocol."""

from windlass.energy.sensors.base import Sample, Sensor, SensorMissing
from windlass.energy.sensors.probe import open_sensors

__all__ = ["Sample", "Sensor", "SensorMissing", "open_sensors"]
