"""Differences between runs or traces: config, packages, machine, throughput, energy, loss curves, kernels, scaling."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from windlass.config.load import flatten
from windlass.energy.ledger import read_ledger
from windlass.energy.totals import RunEnergy, run_energy
from windlass.errors import WindlassError
from windlass.files import read_json
from windlass.profile.event_names import kernel_group
from windlass.profile.job_profile import JobProfile
from windlass.profile.tables import KernelGroupRow, KernelRow, OperatorRow
from windlass.profile.timeline import CATEGORIES
from windlass.profile.trace import Floats
from windlass.runs import Run
from windlass.runs.events import ProcessStart, Started
from windlass.runs.history import read_history
from windlass.runs.measured import columns_of, measure
from windlass.runs.metrics import MetricsLine

# Nats per token. Two seeds of one small model differ by about this much; a fault in a kernel or in the data by more.
LOSS_TOLERANCE = 0.05
LOSS_BINS = 20
_PACKAGE_KEYS = ("windlass", "commit", "python")
_MACHINE_KEYS = (
    "host", "system", "cpu", "cpu_count", "memory_bytes", "device", "nodes", "devices_per_node", "world_size",
)  # fmt: skip


@dataclass(frozen=True)
class KeyDifference:
    key: str
    values: list[Any]  # one per run; None where a run does not have the key


@dataclass(frozen=True, kw_only=True)
class RunPerformance:
    """What a run achieved; None is not measured."""

    label: str
    devices: int | None
    steps: int | None
    tokens: int | None
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    step_seconds: float | None
    mfu: float | None
    memory_bytes: float | None
    energy_joules: float | None
    joules_per_token: float | None
    watts: float | None  # mean of the measured nodes together
    final_loss: float | None
    goodput: float | None
    node_hours: float | None
    energy: RunEnergy  # measured or modelled


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """Two loss curves in equal bins of tokens; the second half of the range that both cover decides."""

    same: bool | None = None  # None when the curves share too little to tell
    tolerance: float
    largest_difference: float | None = None
    at_tokens: float | None = None
    baseline_final: float | None
    experiment_final: float | None
    tokens: list[float] = field(default_factory=list)  # centres of the bins
    baseline: list[float | None] = field(default_factory=list)
    experiment: list[float | None] = field(default_factory=list)
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    labels: list[str]
    config: list[KeyDifference]
    packages: list[KeyDifference]
    machine: list[KeyDifference]
    performance: list[RunPerformance]
    loss: list[LossComparison]  # each further run against the first


def compare_runs(runs: Sequence[Run], *, tolerance: float = LOSS_TOLERANCE) -> RunComparison:
    manifests = [run.manifest() for run in runs]
    lines = [list(run.metrics_lines()) for run in runs]
    metrics = [[line.as_dict() for line in own] for own in lines]
    own_packages = [{k: m.get(k) for k in _PACKAGE_KEYS} for m in manifests]
    installed = [listed if isinstance(listed := m.get("packages"), dict) else {} for m in manifests]
    return RunComparison(
        labels=[run.name for run in runs],
        config=find_differences([dict(flatten(read_json(run.config_file) or {})) for run in runs]),
        packages=find_differences([{**own, **listed} for own, listed in zip(own_packages, installed, strict=True)]),
        machine=find_differences([{k: m.get(k) for k in _MACHINE_KEYS} for m in manifests]),
        performance=[
            measure_performance(run, own, manifest) for run, own, manifest in zip(runs, lines, manifests, strict=True)
        ],
        loss=[compare_loss(metrics[0], own, tolerance=tolerance) for own in metrics[1:]],
    )


def find_differences(sides: Sequence[dict[str, Any]]) -> list[KeyDifference]:
    """Keys whose values are not all equal, in the order of the first side."""
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = [KeyDifference(key, [side.get(key) for side in sides]) for key in keys]
    return [row for row in rows if any(value != row.values[0] for value in row.values[1:])]


def measure_performance(run: Run, lines: Sequence[MetricsLine], manifest: Mapping[str, Any]) -> RunPerformance:
    """The figures of the run's report."""
    try:
        recipe = run.recipe()
    except WindlassError:
        recipe = None
    events = list(run.events())
    start = next((e for e in reversed(events) if isinstance(e, ProcessStart)), Started())
    devices = start.world_size or manifest.get("world_size")
    column = columns_of(lines)
    measured = measure(column, devices)
    energy = run_energy(read_ledger(run), recipe, measured.tokens, measured.step)
    history = read_history(events, column)
    return RunPerformance(
        label=run.name,
        devices=devices,
        steps=measured.step,
        tokens=None if measured.tokens is None else int(measured.tokens),
        tokens_per_second=measured.tokens_per_second,
        tokens_per_second_per_device=measured.tokens_per_second_per_device,
        step_seconds=measured.step_seconds,
        mfu=measured.mfu,
        memory_bytes=measured.memory_bytes,
        energy_joules=energy.joules,
        joules_per_token=energy.joules_per_token,
        watts=energy.mean_watts,
        final_loss=measured.loss,
        goodput=history.goodput,
        node_hours=history.node_hours,
        energy=energy,
    )


def compare_loss(
    baseline: Sequence[dict[str, Any]], experiment: Sequence[dict[str, Any]], *, tolerance: float = LOSS_TOLERANCE
) -> LossComparison:
    """The losses are the same when in no bin of the second half the means differ by more than the tolerance."""
    (tokens_a, loss_a), (tokens_b, loss_b) = _loss_curve(baseline), _loss_curve(experiment)
    result = partial(
        LossComparison,
        tolerance=tolerance,
        baseline_final=float(loss_a[-1]) if len(loss_a) else None,
        experiment_final=float(loss_b[-1]) if len(loss_b) else None,
    )
    if len(tokens_a) < 2 or len(tokens_b) < 2:
        return result(reason=f"too few loss values to compare ({len(tokens_a)} and {len(tokens_b)})")
    low, high = max(tokens_a[0], tokens_b[0]), min(tokens_a[-1], tokens_b[-1])
    if high <= low:
        return result(reason="the runs share no range of tokens")
    edges = np.linspace(low, high, min(LOSS_BINS, len(tokens_a), len(tokens_b)) + 1)
    left, right = _bin_means(tokens_a, loss_a, edges), _bin_means(tokens_b, loss_b, edges)
    difference = np.abs(left - right)
    half = len(difference) // 2
    if np.isnan(difference[half:]).all():
        return result(reason="the runs share no bin of tokens in the second half")
    worst = half + int(np.nanargmax(difference[half:]))
    largest = float(difference[worst])
    centres = (edges[:-1] + edges[1:]) / 2
    verdict = "as expected, the loss is the same" if largest <= tolerance else "the losses differ"
    return result(
        same=largest <= tolerance,
        largest_difference=largest,
        at_tokens=float(centres[worst]),
        tokens=centres.tolist(),
        baseline=[None if np.isnan(v) else float(v) for v in left],
        experiment=[None if np.isnan(v) else float(v) for v in right],
        reason=f"{verdict}: at most {largest:.4f} nats apart in the second half of the shared range, "
        f"tolerance {tolerance:g}",
    )


def _loss_curve(lines: Sequence[dict[str, Any]]) -> tuple[Floats, Floats]:
    """Tokens and loss, the newest line of each step: after a restart some steps are written twice."""
    points = {
        int(line["tokens"]): float(line["loss"])
        for line in lines
        if all(isinstance(v := line.get(key), (int, float)) and v == v for key in ("tokens", "loss"))
    }
    ordered = sorted(points)
    return np.array(ordered, dtype=np.float64), np.array([points[t] for t in ordered], dtype=np.float64)


def _bin_means(tokens: Floats, loss: Floats, edges: Floats) -> Floats:
    """Mean loss in each bin; NaN where a run logged nothing."""
    bins = len(edges) - 1
    inside = (tokens >= edges[0]) & (tokens <= edges[-1])
    place = np.minimum(np.searchsorted(edges, tokens[inside], side="right") - 1, bins - 1)
    total, count = np.bincount(place, weights=loss[inside], minlength=bins), np.bincount(place, minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


SORT_KEYS = ("impact", "calls", "host", "self_host", "device", "self_device", "name")
# Columns of the diffs: the attribute of the row, and its value on a side that does not have the row.
_OPERATOR_COLUMNS = {
    "calls": ("calls", 0), "host": ("host_us", 0), "self_host": ("self_host_us", 0),
    "device": ("device_us", 0), "self_device": ("self_device_us", 0),
}  # fmt: skip
_KERNEL_COLUMNS = {"calls": ("calls", 0), "total_us": ("total_us", 0.0)}
_GROUP_COLUMNS = {**_KERNEL_COLUMNS, "share_pct": ("share_pct", 0.0)}
# Columns that are sums over the window.
_SUMS = {key for key, _ in (*_OPERATOR_COLUMNS.values(), *_KERNEL_COLUMNS.values())}

TableRow = TypeVar("TableRow", OperatorRow, KernelRow, KernelGroupRow)


@dataclass(frozen=True)
class Change:
    baseline: float
    experiment: float
    delta: float
    percent: float | None  # delta / baseline x 100, two decimals; None when the baseline is 0


@dataclass(frozen=True)
class RowChange:
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
    labels: list[str]
    jobs: list[JobProfile]  # empty without traces
    runs: RunComparison | None  # None without run folders
    operators: list[RowChange]  # only for two jobs
    kernel_groups: list[RowChange]  # kernels by what they do, the only match between two vendors
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
            "kernel_groups": [row.to_json() for row in self.kernel_groups],
            "kernels": [{**row.to_json(), "group": kernel_group(row.name)} for row in self.kernels],
            "scaling": [asdict(row) for row in self.scaling],
            "runs": asdict(self.runs) if self.runs else None,
        }


def compare_jobs(
    labels: list[str],
    jobs: list[JobProfile],
    runs: RunComparison | None,
    *,
    manifests: Sequence[Mapping[str, Any]] = (),
    sort: str = "impact",
    per_step: bool = False,
) -> Comparison:
    """`manifests` of the run folders tell devices and tokens per step; empty when there are no run folders."""
    run_manifests = manifests or [{}] * len(jobs)
    devices_by_run, tokens_by_run = ([m.get(key) for m in run_manifests] for key in ("world_size", "tokens_per_step"))
    points = [
        ScalingInput(
            label=job.label,
            step_us=job.step_us,
            categories_us=job.categories_us,
            devices=devices or next((r.world_size for r in job.ranks if r.world_size), len(job.ranks)),
            work_per_device=tokens / devices if tokens and devices else None,
        )
        for job, devices, tokens in zip(jobs, devices_by_run, tokens_by_run, strict=False)  # runs may have no traces
    ]
    first_ranks = [job.ranks[0] for job in jobs] if len(jobs) == 2 else []
    steps = [r.steps if per_step else 1 for r in first_ranks]
    operators = [mean_step(r.operators, count) for r, count in zip(first_ranks, steps, strict=True)]
    kernels = [mean_step(r.kernels, count) for r, count in zip(first_ranks, steps, strict=True)]
    groups = [mean_step(r.kernel_groups, count) for r, count in zip(first_ranks, steps, strict=True)]
    return Comparison(
        labels=labels,
        jobs=jobs,
        runs=runs,
        operators=diff_operators(*operators, sort=sort) if operators else [],
        kernel_groups=_diff_rows(groups[0], groups[1], _GROUP_COLUMNS, ("total_us",)) if groups else [],
        kernels=diff_kernels(*kernels) if kernels else [],
        scaling=scaling_rows(points),
    )


def change_between(baseline: float, experiment: float) -> Change:
    delta = experiment - baseline
    return Change(baseline, experiment, delta, round(delta / baseline * 100, 2) if baseline else None)


def diff_operators(
    baseline: Sequence[OperatorRow], experiment: Sequence[OperatorRow], *, sort: str = "impact"
) -> list[RowChange]:
    """Every operator of either side; a side without it counts as 0, as in the plugin.

    "impact" sorts by the change of the operator's own time: on the device if there is one, else on the host.
    """
    on_device = any(row.self_device_us for row in (*baseline, *experiment))
    orders = {"name": (), "impact": ("self_device" if on_device else "self_host", "self_host")}
    return _diff_rows(baseline, experiment, _OPERATOR_COLUMNS, orders.get(sort, (sort,)))


def diff_kernels(baseline: Sequence[KernelRow], experiment: Sequence[KernelRow]) -> list[RowChange]:
    """Every kernel of either side by name, the largest change of time first."""
    return _diff_rows(baseline, experiment, _KERNEL_COLUMNS, ("total_us",))


def _diff_rows(
    baseline: Sequence[TableRow],
    experiment: Sequence[TableRow],
    columns: Mapping[str, tuple[str, float]],
    order: Sequence[str],
) -> list[RowChange]:
    """`order`: columns by whose change the rows are sorted, the largest first; equal ones by name."""
    left, right = ({row.name: row for row in side} for side in (baseline, experiment))
    rows = [
        RowChange(
            name,
            {
                column: change_between(getattr(left.get(name), key, missing), getattr(right.get(name), key, missing))
                for column, (key, missing) in columns.items()
            },
        )
        for name in {**left, **right}
    ]
    return sorted(rows, key=lambda r: (*(-abs(r.columns[key].delta) for key in order), r.name))


def mean_step(rows: Sequence[TableRow], steps: int) -> list[TableRow]:
    """The same table for one mean step, so that windows of different length can be compared."""
    if steps <= 1:
        return list(rows)
    return [replace(row, **{k: v / steps for k, v in vars(row).items() if k in _SUMS}) for row in rows]


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
