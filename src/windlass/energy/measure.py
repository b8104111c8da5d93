"""What is one measurement, and which of several nested sources counts? Pure values: no sensors, no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Scope = Literal["node", "module", "device", "cpu", "memory"]
Method = Literal["counter", "power", "modelled"]

# What a scope contains: a node's counter has everything in it, a superchip's module has its GPU and CPU.
INSIDE: dict[str, tuple[str, ...]] = {
    "node": ("module", "device", "cpu", "memory"),
    "module": ("device", "cpu"),
    "device": (),
    "cpu": (),
    "memory": (),
}
SCOPES: tuple[Scope, ...] = ("node", "module", "device", "cpu", "memory")
# Where two sources see the same scope, the first of these counts: counters of the site before our own sums of power.
PREFERRED = ("ear", "cray", "slurm", "grace", "nvml", "amdsmi", "amd-sysfs", "rapl")


@dataclass(frozen=True, kw_only=True)
class SourceEnergy:
    """What one source says of one scope of one node over a span."""

    source: str
    scope: Scope
    method: Method
    joules: float
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Joules of each part: gpu0, package-0, ..."""
    resets: int = 0
    """How often a counter started again from 0 or went backwards; up to one sampling interval is lost each time."""
    note: str = ""
    resolution_joules: float | None = None
    """What a counter gathers between two updates: a span may be off by so much. None: not known (summed power, records of a site)."""
    nodes: int = 1
    """Nodes that the figure covers; more than one only in a record of a whole job."""

    @property
    def watts(self) -> float | None:
        return self.joules / self.seconds if self.seconds > 0 else None

    @property
    def label(self) -> str:
        return f"{self.source} {self.scope}" + (" (modelled)" if self.method == "modelled" else "")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A span on one node: `joules` counts nothing twice and is None when nothing was measured; models stand apart."""

    seconds: float
    joules: float | None
    modelled_joules: float | None
    counted: tuple[str, ...]
    """Labels of the sources that `joules` is the sum of."""
    sources: tuple[SourceEnergy, ...]
    missing: dict[str, str] = field(default_factory=dict)
    """Source -> why it gave nothing."""
    resolution_joules: float | None = None
    """Of `joules`: short spans are off by up to so much, because counters move in steps. None: not known."""

    @property
    def watts(self) -> float | None:
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds

    def as_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return {**asdict(self), "watts": self.watts}


SHORT = 0.9
"""A source that saw less than this share of what the others saw stopped on the way: another then counts."""


def reconcile(sources: Iterable[SourceEnergy]) -> list[SourceEnergy]:
    """The sources that may be added: for each scope the preferred one, and none that lies inside another."""
    measured = [s for s in sources if s.method != "modelled"]
    chosen: list[SourceEnergy] = []
    for scope in SCOPES:
        if any(scope in INSIDE[c.scope] for c in chosen):
            continue
        here = _ranked([s for s in measured if s.scope == scope])
        if scope == "node":
            here = [s for s in here if s.joules >= SHORT * _inner(measured)]
        chosen += here[:1]
    return chosen


def _inner(measured: Sequence[SourceEnergy]) -> float:
    """What the parts of a node used. A node's own figure below it is a record that was cut short, and the parts count instead."""
    return sum(s.joules for s in reconcile(s for s in measured if s.scope != "node"))


def _ranked(here: Sequence[SourceEnergy]) -> list[SourceEnergy]:
    longest = max((s.seconds for s in here), default=0.0)
    return sorted(here, key=lambda s: (s.seconds < SHORT * longest, _preference(s), -s.seconds))


def _preference(source: SourceEnergy) -> int:
    return PREFERRED.index(source.source) if source.source in PREFERRED else len(PREFERRED)


def total_resolution(sources: Iterable[SourceEnergy]) -> float | None:
    """Of several counters together, at worst; None when one of them is not known."""
    found = [s.resolution_joules for s in sources]
    known = [r for r in found if r is not None]
    return sum(known) if known and len(known) == len(found) else None


def measurement(sources: Sequence[SourceEnergy], seconds: float, missing: dict[str, str] | None = None) -> Measurement:
    """Reconciled: `joules` from measured sources only; a model never slips into it."""
    chosen = reconcile(sources)
    modelled = [s.joules for s in sources if s.method == "modelled"]
    return Measurement(
        seconds=seconds,
        joules=sum(s.joules for s in chosen) if chosen else None,
        modelled_joules=sum(modelled) if modelled else None,
        counted=tuple(s.label for s in chosen),
        sources=tuple(sources),
        missing=dict(missing or {}),
        resolution_joules=total_resolution(chosen),
    )


def share_text(sources: Iterable[SourceEnergy]) -> str | None:
    """ "GPUs are 78 % of the node", where both were measured."""
    found = list(sources)
    node = sum(s.joules for s in found if s.scope == "node" and s.method != "modelled")
    device = sum(s.joules for s in found if s.scope == "device" and s.method != "modelled")
    return f"devices are {100 * device / node:.0f} % of the node" if node > 0 and device > 0 else None
