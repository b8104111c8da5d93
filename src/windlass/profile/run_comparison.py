"""Differences between run folders: config, packages, machine, throughput, energy and loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from windlass.config.load import flatten
from windlass.files import read_json
from windlass.profile.trace import Floats
from windlass.runs import Run

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
    watts: float | None
    final_loss: float | None


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
    metrics = [[line.as_dict() for line in run.metrics_lines()] for run in runs]
    packages = []
    for manifest in manifests:
        listed = manifest.get("packages")
        own = {k: manifest.get(k) for k in _PACKAGE_KEYS}
        packages.append({**own, **listed} if isinstance(listed, dict) else own)
    return RunComparison(
        labels=[run.name for run in runs],
        config=find_differences([dict(flatten(read_json(run.config_file) or {})) for run in runs]),
        packages=find_differences(packages),
        machine=find_differences([{k: m.get(k) for k in _MACHINE_KEYS} for m in manifests]),
        performance=[
            measure_performance(run.name, lines, manifest)
            for run, lines, manifest in zip(runs, metrics, manifests, strict=True)
        ],
        loss=[compare_loss(metrics[0], lines, tolerance=tolerance) for lines in metrics[1:]],
    )


def find_differences(sides: Sequence[dict[str, Any]]) -> list[KeyDifference]:
    """Keys whose values are not all equal, in the order of the first side."""
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = [KeyDifference(key, [side.get(key) for side in sides]) for key in keys]
    return [row for row in rows if any(value != row.values[0] for value in row.values[1:])]


def measure_performance(label: str, lines: Sequence[dict[str, Any]], manifest: dict[str, Any]) -> RunPerformance:
    """Medians over the second half of the run, so that start-up and compilation do not count."""

    def median_of(key: str) -> float | None:
        values = [float(v) for line in lines[len(lines) // 2 :] if isinstance(v := line.get(key), (int, float))]
        return median(values) if values else None

    last = lines[-1] if lines else {}
    devices, speed = manifest.get("world_size"), median_of("tokens_per_second")
    energy, tokens = last.get("energy_joules"), last.get("tokens")
    return RunPerformance(
        label=label,
        devices=devices,
        steps=last.get("step"),
        tokens=tokens,
        tokens_per_second=speed,
        tokens_per_second_per_device=speed / devices if speed and devices else None,
        step_seconds=median_of("step_seconds"),
        mfu=median_of("mfu"),
        memory_bytes=max((b for line in lines if (b := line.get("memory_bytes")) is not None), default=None),
        energy_joules=energy,
        joules_per_token=energy / tokens if energy is not None and tokens else None,
        watts=median_of("watts"),
        final_loss=last.get("loss"),
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
    place = np.searchsorted(edges, tokens, side="right") - 1
    place = np.where(tokens == edges[-1], bins - 1, place)
    inside = (place >= 0) & (place < bins)
    total = np.bincount(place[inside], weights=loss[inside], minlength=bins)
    count = np.bincount(place[inside], minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
