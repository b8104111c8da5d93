"""What does every sensor offer? Samples: an energy counter where there is one, else power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from windlass.energy.measure import Scope


class SensorMissing(Exception):  # noqa: N818 - it is an answer, not a fault
    """This node has no such sensor, or we may not read it; the text says why and is shown to the user."""


@dataclass(frozen=True)
class Sample:
    """One reading of one part."""

    part: str
    scope: Scope
    joules: float | None = None
    """A counter since some unknown moment; only differences mean something."""
    watts: float | None = None
    wraps_at: float | None = None
    """The counter starts again from 0 after this many joules."""
    epoch: str = ""
    """Changes when the counter was restarted (a reboot of the controller)."""
    modelled: bool = False


class Sensor(Protocol):
    """Something that can be read again and again, cheaply."""

    name: str
    note: str
    update_seconds: float | None
    """How often its counters move; None where nobody has said or measured it."""

    def read(self) -> list[Sample]: ...

    def utilization(self) -> float | None: ...

    def close(self) -> None: ...


class FileSensor:
    """Shared by sensors that read files: nothing to close, no utilisation."""

    note = ""
    update_seconds: float | None = None

    def utilization(self) -> float | None:
        return None

    def close(self) -> None:
        return None
