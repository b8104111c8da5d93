"""Differences between profiles, and the cost of scaling out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from windlass.profile.categories import CATEGORIES
from windlass.profile.job_profile import JobProfile
from windlass.profile.operators import KernelRow, OperatorRow
from windlass.profile.run_comparison import RunComparison

SORT_KEYS = ("matters", "calls", "host", "self_host", "device", "self_device", "name")
# Columns of the diffs: the attribute of the row, and its value on a side that does not have the row.
_OPERATOR_COLUMNS = {
    "calls": ("calls", 0), "host": ("host_us", 0), "self_host": ("self_host_us", 0),
    "device": ("device_us", 0), "self_device": ("self_device_us", 0),
}  # fmt: skip
_KERNEL_COLUMNS = {"calls": ("calls", 0), "total_us": ("total_us", 0.0)}


@dataclass(frozen=True)
class Change:
    """One number of the baseline and of the experiment."""

    baseline: float
    experiment: float
    delta: float
    percent: float | None  # delta / baseline x 100, two decimals; None when the baseline is 0


@dataclass(frozen=True)
class RowChange:
    """One operator or kernel on both sides."""

    name: str
    columns: dict[str, Change]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **{column: asdict(change) for column, change in self.columns.items()}}


@dataclass(frozen=True, kw_only=True)
class ScalingInput:
    """What the scaling table needs of a profile or of a published table."""

    label: str
    step_us: float
    categories_us: dict[str, float]
    devices: int | None = None
    work_per_device: float | None = None  # tokens of a step per device; None when no run folder has it


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One point of a scaling series, relative to the first one."""

    label: str
    devices: int | None
    step_us: float
    work_per_device: float | None
    efficiency: float  # work per device and second; without known work, equal work is assumed on all rows
    lost_us: float  # how much longer the step takes
    lost_to: dict[str, float]  # lost_us by category
    main_loss: str | None  # the category that lost most; None when the step is not longer


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two or more runs or sets of traces."""

    labels: list[str]
    jobs: list[JobProfile]  # empty without traces
    runs: RunComparison | None  # None without run folders
    operators: list[RowChange]  # only for two jobs
    kernels: list[RowChange]
    scaling: list[ScalingRow]

    def to_json(self) -> dict[str, Any]:
        summary = []
        for category in ("step", *CATEGORIES) if self.jobs else ():
            values = [j.step_us if category == "step" else j.categories_us[category] for j in self.jobs]
            change = change_between(values[0], values[-1])
            summary.append(
                {"category": category, "values_us": values, "delta_us": change.delta, "delta_pct": change.percent}
            )
        return {
            "labels": self.labels,
            "mode": self.jobs[0].mode if self.jobs else None,
            "profiles": [job.to_json(tables=False) for job in self.jobs],
            "summary": summary,
            "operators": [row.to_json() for row in self.operators],
            "kernels": [row.to_json() for row in self.kernels],
            "scaling": [asdict(row) for row in self.scaling],
            "runs": asdict(self.runs) if self.runs else None,
        }


def compare_jobs(
    labels: list[str],
    jobs: list[JobProfile],
    runs: RunComparison | None,
    *,
    manifests: Sequence[Mapping[str, Any]] = (),
    sort: str = "matters",
    per_step: bool = False,
) -> Comparison:
    """`manifests` of the run folders tell devices and tokens per step; empty when there are no run folders."""
    points = []
    for job, manifest in zip(jobs, manifests or [{}] * len(jobs), strict=False):  # runs may have no traces
        devices, tokens = manifest.get("world_size"), manifest.get("tokens_per_step")
        in_trace = next((r.world_size for r in job.ranks if r.world_size is not None), None)
        points.append(
            ScalingInput(
                label=job.label,
                step_us=job.step_us,
                categories_us=job.categories_us,
                devices=devices or in_trace or len(job.ranks),
                work_per_device=tokens / devices if tokens and devices else None,
            )
        )
    first_ranks = [job.ranks[0] for job in jobs] if len(jobs) == 2 else []
    operators = [mean_step(r.operators, r.steps) if per_step else r.operators for r in first_ranks]
    return Comparison(
        labels=labels,
        jobs=jobs,
        runs=runs,
        operators=diff_operators(*operators, sort=sort) if operators else [],
        kernels=diff_kernels(*(r.kernels for r in first_ranks)) if first_ranks else [],
        scaling=scaling_rows(points),
    )


def change_between(baseline: float, experiment: float) -> Change:
    delta = experiment - baseline
    return Change(baseline, experiment, delta, round(delta / baseline * 100, 2) if baseline else None)


def diff_operators(
    baseline: Sequence[OperatorRow], experiment: Sequence[OperatorRow], *, sort: str = "matters"
) -> list[RowChange]:
    """Every operator of either side; a side without it counts as 0, as in the plugin.

    "matters" sorts by the change of the operator's own time: on the device if there is one, else on the host.
    """
    rows = _diff_rows(baseline, experiment, _OPERATOR_COLUMNS)
    if sort == "name":
        return sorted(rows, key=lambda r: r.name)
    if sort != "matters":
        return sorted(rows, key=lambda r: (-abs(r.columns[sort].delta), r.name))
    on_device = any(r.columns["self_device"].baseline or r.columns["self_device"].experiment for r in rows)
    keys = ("self_device" if on_device else "self_host", "self_host")
    return sorted(rows, key=lambda r: (*(-abs(r.columns[key].delta) for key in keys), r.name))


def diff_kernels(baseline: Sequence[KernelRow], experiment: Sequence[KernelRow]) -> list[RowChange]:
    """Every kernel of either side by name, the largest change of time first."""
    rows = _diff_rows(baseline, experiment, _KERNEL_COLUMNS)
    return sorted(rows, key=lambda r: (-abs(r.columns["total_us"].delta), r.name))


def _diff_rows(
    baseline: Sequence[OperatorRow] | Sequence[KernelRow],
    experiment: Sequence[OperatorRow] | Sequence[KernelRow],
    columns: Mapping[str, tuple[str, float]],
) -> list[RowChange]:
    left, right = ({row.name: row for row in side} for side in (baseline, experiment))
    return [
        RowChange(
            name,
            {
                column: change_between(getattr(left.get(name), key, missing), getattr(right.get(name), key, missing))
                for column, (key, missing) in columns.items()
            },
        )
        for name in {**left, **right}
    ]


def mean_step(rows: Sequence[OperatorRow], steps: int) -> list[OperatorRow]:
    """The same table for one mean step, so that windows of different length can be compared."""
    if steps <= 1:
        return list(rows)
    keys = [key for key, _ in _OPERATOR_COLUMNS.values()]
    return [replace(row, **{key: getattr(row, key) / steps for key in keys}) for row in rows]


def scaling_rows(points: Sequence[ScalingInput]) -> list[ScalingRow]:
    """Efficiency relative to the first point, and the categories in which the additional time went."""
    rows = []
    work_known = all(p.work_per_device for p in points)
    for point in points:
        base = points[0]
        work = (point.work_per_device or 1.0) / (base.work_per_device or 1.0) if work_known else 1.0
        lost_us = point.step_us - base.step_us
        lost_to = {c: point.categories_us.get(c, 0.0) - base.categories_us.get(c, 0.0) for c in CATEGORIES}
        largest = max(lost_to, key=lambda c: lost_to[c])
        rows.append(
            ScalingRow(
                label=point.label,
                devices=point.devices,
                step_us=point.step_us,
                work_per_device=point.work_per_device,
                efficiency=work * base.step_us / point.step_us if point.step_us > 0 else 0.0,
                lost_us=lost_us,
                lost_to=lost_to,
                main_loss=largest if lost_us > 0 and lost_to[largest] > 0 else None,
            )
        )
    return rows
