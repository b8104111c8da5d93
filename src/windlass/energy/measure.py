"""Energy of a span, and which of several nested sources counts. Pure values: no sensors, no files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Scope = Literal["node", "module", "device", "cpu", "memory"]
Method = Literal["counter", "power", "modelled"]

# A node's counter contains everything, a superchip's module its GPU and CPU. The widest scope comes first.
INSIDE: dict[Scope, tuple[Scope, ...]] = {
    "node": ("module", "device", "cpu", "memory"),
    "module": ("device", "cpu"),
    "device": (),
    "cpu": (),
    "memory": (),
}
SCOPES: tuple[Scope, ...] = tuple(INSIDE)
# Where two sources measure the same scope, the first of these counts: the site's counters before our own sums of power.
# Sources that are not listed come last.
PREFERRED = ("ear", "cray", "slurm", "grace", "nvml", "amdsmi", "amd-sysfs", "rapl")
# A source that measured less than this share of what the others measured stopped early: another one counts.
COMPLETE_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class SourceEnergy:
    """Energy of one scope of one node over a span, by one source."""

    source: str
    scope: Scope
    method: Method
    joules: float
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)  # joules of each part: gpu0, package-0
    # How often a counter restarted from 0 or went backwards; each time up to one sampling interval is lost.
    resets: int = 0
    note: str = ""
    # Energy between two updates of the counter: the error of any span. None: unknown (summed power, site records).
    resolution_joules: float | None = None
    nodes: int = 1  # nodes that the figure covers; more than one only in a record of a whole job

    @property
    def watts(self) -> float | None:
        return self.joules / self.seconds if self.seconds > 0 else None

    @property
    def label(self) -> str:
        return f"{self.source} {self.scope}" + (" (modelled)" if self.method == "modelled" else "")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Energy of a span on one node."""

    seconds: float
    joules: float | None  # measured, nothing counted twice; None when nothing was measured
    modelled_joules: float | None  # estimate of the power model; never part of `joules`
    counted: tuple[str, ...]  # labels of the sources that `joules` is the sum of
    sources: tuple[SourceEnergy, ...]
    missing: dict[str, str] = field(default_factory=dict)  # source -> reason why it measured nothing
    resolution_joules: float | None = None  # largest error of `joules` because counters move in steps. None: unknown.

    @property
    def watts(self) -> float | None:
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


def reconcile(sources: Iterable[SourceEnergy]) -> list[SourceEnergy]:
    """The measured sources that may be added: the preferred one of each scope, and none that lies inside another."""
    measured = [s for s in sources if s.method != "modelled"]
    chosen: list[SourceEnergy] = []
    for scope in SCOPES:
        if any(scope in INSIDE[c.scope] for c in chosen):
            continue
        candidates = [s for s in measured if s.scope == scope]
        longest_seconds = max((s.seconds for s in candidates), default=0.0)
        if scope == "node" and candidates:  # a figure below the sum of the node's parts was cut short: the parts count
            parts_joules = sum(s.joules for s in reconcile(s for s in measured if s.scope != "node"))
            candidates = [s for s in candidates if s.joules >= COMPLETE_SHARE * parts_joules]

        def rank(s: SourceEnergy, longest_seconds: float = longest_seconds) -> tuple[bool, int, float]:
            preference = PREFERRED.index(s.source) if s.source in PREFERRED else len(PREFERRED)
            return s.seconds < COMPLETE_SHARE * longest_seconds, preference, -s.seconds

        chosen += sorted(candidates, key=rank)[:1]
    return chosen


def sum_or_unknown(values: Iterable[float | None]) -> float | None:
    """The sum; None when there are no values or one of them is unknown."""
    numbers = list(values)
    return None if not numbers or None in numbers else sum(n for n in numbers if n is not None)


def measurement(sources: Sequence[SourceEnergy], seconds: float, missing: dict[str, str] | None = None) -> Measurement:
    chosen = reconcile(sources)
    return Measurement(
        seconds=seconds,
        joules=sum_or_unknown(s.joules for s in chosen),
        modelled_joules=sum_or_unknown(s.joules for s in sources if s.method == "modelled"),
        counted=tuple(s.label for s in chosen),
        sources=tuple(sources),
        missing=dict(missing or {}),
        resolution_joules=sum_or_unknown(s.resolution_joules for s in chosen),
    )
