"""Are two runs the same but for what we meant to change? Config, packages, machine, throughput, energy and the loss curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from windlass.config.load import flatten
from windlass.files import read_json
from windlass.profile.trace import Floats
from windlass.runs import Run

LOSS_TOLERANCE = 0.05
"""Nats per token. Two seeds of one small model differ by about this much; a fault in a kernel or in the data differs by more."""
LOSS_BINS = 20
_PACKAGE_KEYS = ("windlass", "commit", "python")
_MACHINE_KEYS = (
    "host",
    "system",
    "cpu",
    "cpu_count",
    "memory_bytes",
    "device",
    "nodes",
    "devices_per_node",
    "world_size",
)


@dataclass(frozen=True)
class Difference:
    key: str
    values: list[Any]
    """One per run; None where a run does not have the key."""


@dataclass(frozen=True, kw_only=True)
class Performance:
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
class LossTest:
    """Is the result the same? Both curves in equal bins of tokens; the second half of what they share is judged."""

    same: bool | None
    """None when the curves share too little to tell."""
    tolerance: float
    largest_difference: float | None
    at_tokens: float | None
    baseline_final: float | None
    experiment_final: float | None
    tokens: list[float]
    baseline: list[float | None]
    experiment: list[float | None]
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    labels: list[str]
    config: list[Difference]
    packages: list[Difference]
    machine: list[Difference]
    performance: list[Performance]
    loss: list[LossTest]
    """Each further run against the first."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(runs: Sequence[Run], *, tolerance: float = LOSS_TOLERANCE) -> RunComparison:
    manifests = [run.manifest() for run in runs]
    metrics = [[line.as_dict() for line in run.metrics_lines()] for run in runs]
    return RunComparison(
        labels=[run.name for run in runs],
        config=differences([_config(run) for run in runs]),
        packages=differences([_packages(m) for m in manifests]),
        machine=differences([{k: m.get(k) for k in _MACHINE_KEYS} for m in manifests]),
        performance=[performance(run.name, lines, m) for run, lines, m in zip(runs, metrics, manifests, strict=True)],
        loss=[compare_loss(metrics[0], lines, tolerance=tolerance) for lines in metrics[1:]],
    )


def differences(sides: Sequence[dict[str, Any]]) -> list[Difference]:
    """Keys whose values are not all equal, in the order of the first side."""
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = [Difference(key, [side.get(key) for side in sides]) for key in keys]
    return [row for row in rows if any(value != row.values[0] for value in row.values[1:])]


def _config(run: Run) -> dict[str, Any]:
    return dict(flatten(read_json(run.config_file) or {}))


def _packages(manifest: dict[str, Any]) -> dict[str, Any]:
    listed = manifest.get("packages")
    return {**{k: manifest.get(k) for k in _PACKAGE_KEYS}, **(listed if isinstance(listed, dict) else {})}


def performance(label: str, lines: Sequence[dict[str, Any]], manifest: dict[str, Any]) -> Performance:
    """Medians over the second half of the run, so that start-up and compilation do not count."""
    late = lines[len(lines) // 2 :]
    last = lines[-1] if lines else {}
    devices = manifest.get("world_size")
    speed = _median(line.get("tokens_per_second") for line in late)
    energy, tokens = last.get("energy_joules"), last.get("tokens")
    return Performance(
        label=label,
        devices=devices,
        steps=last.get("step"),
        tokens=tokens,
        tokens_per_second=speed,
        tokens_per_second_per_device=speed / devices if speed and devices else None,
        step_seconds=_median(line.get("step_seconds") for line in late),
        mfu=_median(line.get("mfu") for line in late),
        memory_bytes=max(
            (line["memory_bytes"] for line in lines if line.get("memory_bytes") is not None), default=None
        ),
        energy_joules=energy,
        joules_per_token=energy / tokens if energy is not None and tokens else None,
        watts=_median(line.get("watts") for line in late),
        final_loss=last.get("loss"),
    )


def _median(values: Iterable[Any]) -> float | None:
    known = [float(v) for v in values if isinstance(v, (int, float))]
    return median(known) if known else None


def compare_loss(
    baseline: Sequence[dict[str, Any]], experiment: Sequence[dict[str, Any]], *, tolerance: float = LOSS_TOLERANCE
) -> LossTest:
    """The test behind "result quality is the same": in no bin of the second half do the mean losses differ by more."""
    a, b = _curve(baseline), _curve(experiment)
    finals = {
        "baseline_final": float(a[1][-1]) if len(a[1]) else None,
        "experiment_final": float(b[1][-1]) if len(b[1]) else None,
    }
    if len(a[0]) < 2 or len(b[0]) < 2:
        return _untested(tolerance, f"too few loss values to compare ({len(a[0])} and {len(b[0])})", finals)
    low, high = max(a[0][0], b[0][0]), min(a[0][-1], b[0][-1])
    if high <= low:
        return _untested(tolerance, "the runs share no range of tokens", finals)
    edges = np.linspace(low, high, min(LOSS_BINS, len(a[0]), len(b[0])) + 1)
    left, right = _binned(a, edges), _binned(b, edges)
    return _judge(edges, left, right, tolerance, finals)


def _judge(edges: Floats, left: Floats, right: Floats, tolerance: float, finals: dict[str, float | None]) -> LossTest:
    apart = np.abs(left - right)
    half = len(apart) // 2
    judged = apart[half:]
    middle = (edges[:-1] + edges[1:]) / 2
    if np.isnan(judged).all():
        return _untested(tolerance, "the runs share no bin of tokens in the second half", finals)
    worst = half + int(np.nanargmax(judged))
    gap = float(apart[worst])
    same = gap <= tolerance
    verdict = "as expected, the loss is the same" if same else "the losses differ"
    return LossTest(
        same=same,
        tolerance=tolerance,
        largest_difference=gap,
        at_tokens=float(middle[worst]),
        tokens=[float(v) for v in middle],
        baseline=_known(left),
        experiment=_known(right),
        reason=f"{verdict}: at most {gap:.4f} nats apart in the second half of the shared range, tolerance {tolerance:g}",
        **finals,
    )


def _untested(tolerance: float, reason: str, finals: dict[str, float | None]) -> LossTest:
    return LossTest(
        same=None, tolerance=tolerance, largest_difference=None, at_tokens=None, tokens=[], baseline=[], experiment=[], reason=reason, **finals
    )  # fmt: skip


def _curve(lines: Sequence[dict[str, Any]]) -> tuple[Floats, Floats]:
    """Tokens and loss, the newest line of each step: after a restart some steps are written twice."""
    points = {
        int(line["tokens"]): float(line["loss"])
        for line in lines
        if _is_number(line.get("tokens")) and _is_number(line.get("loss"))
    }
    tokens = np.array(sorted(points), dtype=np.float64)
    return tokens, np.array([points[int(t)] for t in tokens], dtype=np.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _binned(curve: tuple[Floats, Floats], edges: Floats) -> Floats:
    """Mean loss in each bin; not-a-number where a run logged nothing."""
    place = np.clip(np.searchsorted(edges, curve[0], side="right") - 1, -1, len(edges) - 1)
    place = np.where(curve[0] == edges[-1], len(edges) - 2, place)
    inside = (place >= 0) & (place < len(edges) - 1)
    total = np.bincount(place[inside], weights=curve[1][inside], minlength=len(edges) - 1)
    count = np.bincount(place[inside], minlength=len(edges) - 1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _known(values: Floats) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values]
