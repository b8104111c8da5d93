"""The interface of an energy sensor: samples with an energy counter where there is one, else with power."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.energy.measure import Scope

if TYPE_CHECKING:
    from windlass.clusters.model import Cluster


class SensorMissing(Exception):  # noqa: N818 - an answer, not a fault
    """This node has no such sensor, or we may not read it; the message says why and is shown to the user."""


@dataclass(frozen=True)
class SensorHost:
    """The node on which sensors are opened. Tests replace the root folder, the environment and the driver's package."""

    cluster: Cluster | None = None
    devices: Sequence[int] | None = None  # local numbers of the job's devices; None: all that are visible
    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    library: Any = None


@dataclass(frozen=True)
class Sample:
    part: str
    scope: Scope
    joules: float | None = None  # a counter that started at an unknown time: only differences have a meaning
    watts: float | None = None
    wraps_at: float | None = None  # the counter restarts from 0 after this many joules
    epoch: str = ""  # changes when the counter was restarted (a reboot of the controller)
    modelled: bool = False


class Sensor:
    """A source of energy readings that is cheap to read again and again; the constructor may raise SensorMissing."""

    name: str
    note: str = ""
    update_seconds: float | None = None  # how often its counters move; None: unknown
    fallback_for: str = ""  # opened only where this other sensor is missing; "any": where all others are

    def __init__(self, host: SensorHost) -> None: ...

    def read(self) -> list[Sample]:
        raise NotImplementedError

    def utilization(self) -> float | None:
        """Mean utilisation of the job's devices, 0 to 1."""
        return None

    def close(self) -> None: ...


def read_text(path: Path) -> str:
    """The stripped content of a driver's file; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
