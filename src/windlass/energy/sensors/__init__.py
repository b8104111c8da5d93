"""Where can energy be read on this node? One file per kind of counter, all behind one Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass.energy.sensors.base import Sample, Sensor, SensorMissing

if TYPE_CHECKING:
    from windlass.clusters.model import Cluster


def open_sensors(
    cluster: Cluster | None, devices: Sequence[int] | None = None, *, model: bool = True
) -> tuple[list[Sensor], dict[str, str]]:
    """The sensors that answer here, and source -> reason for the others; see `probe`, which is read on use: it needs the cluster files."""
    from windlass.energy.sensors.probe import open_sensors as probe

    return probe(cluster, devices, model=model)


__all__ = ["Sample", "Sensor", "SensorMissing", "open_sensors"]
