"""What changed between two profiles, and what did scaling out cost? Pure arithmetic on profiles that were read before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from windlass.profile.job import JobProfile
from windlass.profile.operators import OperatorRow
from windlass.profile.roles import CATEGORIES

SORTS = ("matters", "calls", "host", "self_host", "device", "self_device", "name")


@dataclass(frozen=True)
class Change:
    """One number on both sides. A side that lacks the row counts as 0, as in the plugin's diff view."""

    baseline: float
    experiment: float

    @property
    def delta(self) -> float:
        return self.experiment - self.baseline

    @property
    def percent(self) -> float | None:
        """delta / baseline x 100, two decimals; None ("N/A") when there is no baseline to relate to."""
        return round(self.delta / self.baseline * 100, 2) if self.baseline else None

    def to_json(self) -> dict[str, float | None]:
        return {"baseline": self.baseline, "experiment": self.experiment, "delta": self.delta, "percent": self.percent}


@dataclass(frozen=True, kw_only=True)
class OperatorChange:
    """One row of the operator diff."""

    name: str
    calls: Change
    host: Change
    self_host: Change
    device: Change
    self_device: Change

    def to_json(self) -> dict[str, Any]:
        columns = ("calls", "host", "self_host", "device", "self_device")
        return {"name": self.name, **{c: getattr(self, c).to_json() for c in columns}}


def diff_operators(
    baseline: Sequence[OperatorRow], experiment: Sequence[OperatorRow], *, sort: str = "matters"
) -> list[OperatorChange]:
    """Every operator of either side. "matters": by the larger change of its own time, on the device where there is one."""
    left, right = {o.name: o for o in baseline}, {o.name: o for o in experiment}
    rows = [change_of(name, left.get(name), right.get(name)) for name in {**left, **right}]
    if sort == "name":
        return sorted(rows, key=lambda r: r.name)
    if sort != "matters":
        return sorted(rows, key=lambda r: (-abs(getattr(r, sort).delta), r.name))
    on_device = any(r.self_device.baseline or r.self_device.experiment for r in rows)
    return sorted(
        rows, key=lambda r: (-abs((r.self_device if on_device else r.self_host).delta), -abs(r.self_host.delta), r.name)
    )


def change_of(name: str, left: OperatorRow | None, right: OperatorRow | None) -> OperatorChange:
    def column(key: str) -> Change:
        return Change(getattr(left, key) if left else 0, getattr(right, key) if right else 0)

    return OperatorChange(
        name=name, calls=column("calls"), host=column("host_us"), self_host=column("self_host_us"),
        device=column("device_us"), self_device=column("self_device_us"),
    )  # fmt: skip


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def total_us(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class KernelChange:
    name: str
    calls: Change
    total: Change


def diff_kernels(baseline: Sequence[_Named], experiment: Sequence[_Named]) -> list[KernelChange]:
    left, right = {k.name: k for k in baseline}, {k.name: k for k in experiment}

    def row(name: str) -> KernelChange:
        a, b = left.get(name), right.get(name)
        calls = Change(a.calls if a else 0, b.calls if b else 0)
        return KernelChange(name=name, calls=calls, total=Change(a.total_us if a else 0.0, b.total_us if b else 0.0))

    return sorted((row(name) for name in {**left, **right}), key=lambda r: (-abs(r.total.delta), r.name))


def per_step(rows: Sequence[OperatorRow], steps: int) -> list[OperatorRow]:
    """The same table for one mean step, so that windows of different length can be compared."""
    if steps <= 1:
        return list(rows)
    keys = ("calls", "host_us", "self_host_us", "device_us", "self_device_us")
    return [OperatorRow(**{**asdict(r), **{k: getattr(r, k) / steps for k in keys}}) for r in rows]


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One point of a scaling series, against the first one."""

    label: str
    devices: int | None
    step_us: float
    work_per_device: float | None
    """Tokens of a step per device; None when no run folder says."""
    efficiency: float
    """Work per device and second, relative to the first row. Without known work it is taken as equal on all rows."""
    lost_us: float
    """How much longer the step takes than that of the first row."""
    lost_to: dict[str, float]
    """The same, by category; the parts add up to lost_us."""

    @property
    def main_loss(self) -> str | None:
        """The category that lost most; None when the step is no longer than the first row's."""
        if self.lost_us <= 0:
            return None
        name = max(self.lost_to, key=lambda k: self.lost_to[k])
        return name if self.lost_to[name] > 0 else None


@dataclass(frozen=True, kw_only=True)
class Point:
    """What scaling needs of a run or of a published table."""

    label: str
    step_us: float
    categories_us: dict[str, float]
    devices: int | None = None
    work_per_device: float | None = None


def point_of(job: JobProfile, *, devices: int | None = None, work_per_device: float | None = None) -> Point:
    known = next((r.world_size for r in job.ranks if r.world_size is not None), None)
    return Point(
        label=job.label,
        step_us=job.step_us,
        categories_us=job.categories_us,
        devices=devices or known or len(job.ranks),
        work_per_device=work_per_device,
    )


def scaling(points: Sequence[Point]) -> list[ScalingRow]:
    """Efficiency against the first point, and the categories in which the additional time went."""
    base = points[0]
    known = all(p.work_per_device for p in points)
    rows = []
    for point in points:
        work = (point.work_per_device or 1.0) / (base.work_per_device or 1.0) if known else 1.0
        rows.append(
            ScalingRow(
                label=point.label,
                devices=point.devices,
                step_us=point.step_us,
                work_per_device=point.work_per_device,
                efficiency=work * base.step_us / point.step_us if point.step_us > 0 else 0.0,
                lost_us=point.step_us - base.step_us,
                lost_to={c: point.categories_us.get(c, 0.0) - base.categories_us.get(c, 0.0) for c in CATEGORIES},
            )
        )
    return rows


def percentages(categories_us: dict[str, float], step_us: float) -> dict[str, float]:
    """Per cent of the step, two decimals, as the execution summary shows them."""
    return {name: round(value / step_us * 100, 2) for name, value in categories_us.items()}
