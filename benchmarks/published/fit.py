"""Fits of the planner's constants to published runs, with each group of rows left out in turn."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from benchmarks.published.rows import PublishedRun, Refusal, read_run, shard_of
from benchmarks.published.score import Prediction, Score, memory_kind, predict_row, quantile

from windlass.cost.memory import SHARDED_SLACK
from windlass.cost.step import DEFAULTS, Constants, estimate_step

FITTED = ("matmul", "tflops_per_watt", "misaligned", "memory", "eager", "network", "contention")
"""Constants that the rows decide; the others are held at measured or textbook values (see their docstrings). Of memory only the
allocator's slack under full sharding is fitted (`refit_slack`): its terms are counted."""
EXPERT_FITTED = ("expert_edge", "exchange", "imbalance", "expert_kernels")
"""Those that only models with experts decide; fitted to such rows of every precision, with all others held."""
BOUNDS = {
    "expert_edge": (0.0, 1500.0), "exchange": (0.1, 1.2), "imbalance": (1.0, 2.0), "expert_kernels": (0.0, 600.0),
    "matmul": (0.5, 0.92), "tflops_per_watt": (0.6, 1.4), "misaligned": (1.0, 2.2), "memory": (0.5, 0.92),
    "eager": (1.2, 4), "network": (0.3, 0.95), "contention": (0.0, 1.5),
}  # fmt: skip
Grouping = Callable[[dict[str, str]], str]


def source_of(row: dict[str, str]) -> str:
    return row.get("source_group") or row.get("source") or ""


def publisher_of(row: dict[str, str]) -> str:
    """Sources of one publisher share machines and people: `oellm-30b-titan` and `oellm-moe-small` are both `oellm`."""
    return source_of(row).partition("-")[0]


class Fit:
    """Rows that are read once, so that a fit costs a few seconds of CPU."""

    def __init__(
        self, rows: list[dict[str, str]], group: Grouping | None = None, fitted: tuple[str, ...] = FITTED
    ) -> None:
        """`group` gives the group of a row, which is left out together (default: its source)."""
        self.fitted = fitted
        self.items: list[tuple[str, str, PublishedRun, float]] = []
        for row in rows:
            run, shown = read_run(row), predict_row(row)
            if isinstance(run, Refusal) or not shown.tokens_per_second_per_device or not shown.measured_tps:
                continue
            wide = run.step.precision in ("bf16", "fp16", "bf16_pure")
            if (wide or fitted == EXPERT_FITTED) and (row.get("quality") or "") != "flagged":
                self.items.append((shown.source, (group or source_of)(row), run, shown.measured_tps))

    def errors(self, constants: Constants, without: str | None = None) -> tuple[np.ndarray, list[str]]:
        kept = [(s, c, t) for s, group, c, t in self.items if group != without]
        logs = [math.log(_tps(run, constants) / tps) for _, run, tps in kept]
        return np.array(logs), [s for s, _, _ in kept]

    def loss(self, constants: Constants, without: str | None = None) -> float:
        """Mean over sources (by the square root of their size) of the absolute log error, capped so that odd rows do not steer."""
        errors, sources = self.errors(constants, without)
        capped = np.minimum(np.abs(errors), 0.5)
        total = weight = 0.0
        for name in set(sources):
            mine = capped[np.array([s == name for s in sources])]
            w = math.sqrt(len(mine))
            total, weight = total + w * float(mine.mean()), weight + w
        return total / weight + PRIOR * _distance(constants, self.fitted)

    def run(self, start: Constants, without: str | None = None, rounds: int = 6) -> Constants:
        """Coordinate descent: try each constant a little higher and lower, halve the step when nothing helps."""
        best, value, step = start, self.loss(start, without), 0.12
        for _ in range(rounds):
            before = value
            for name in self.fitted:
                best, value = self._along(best, value, name, step, without)
            if before - value < 1e-4:
                step /= 2
        return best

    def _along(
        self, best: Constants, value: float, name: str, step: float, without: str | None
    ) -> tuple[Constants, float]:
        low, high = BOUNDS[name]
        for sign in (1, -1):
            for _ in range(4):
                value_now = getattr(best, name)
                moved = min(high, max(low, value_now + sign * step * max(abs(value_now), 0.1 * (high - low))))
                trial = replace(best, **{name: moved})
                loss = self.loss(trial, without)
                if loss >= value - 1e-6:
                    break
                best, value = trial, loss
        return best, value


PRIOR = 0.02
"""How strongly a fit is held to textbook values: enough to keep constants in place that the remaining sources do not decide."""


def _distance(constants: Constants, fitted: tuple[str, ...]) -> float:
    """Sum of squares of how far constants moved from their start, in units of 30 % (or of a tenth of their range near zero)."""
    total = 0.0
    for name in fitted:
        value, textbook, (low, high) = getattr(constants, name), TEXTBOOK[name], BOUNDS[name]
        total += ((value - textbook) / (0.3 * max(abs(textbook), 0.2 * (high - low)))) ** 2
    return total


def _tps(run: PublishedRun, constants: Constants) -> float:
    assert run.machine is not None  # rows without a known device have no predicted time
    step = estimate_step(run.model, run.step, run.layout, run.machine, constants=constants)
    return step.tokens_per_second_per_device


def leave_out(
    rows: list[dict[str, str]], rounds: int, group: Grouping, fitted: tuple[str, ...] = FITTED
) -> tuple[Score, dict[str, Constants]]:
    """Each group of rows predicted with constants fitted on the others."""
    fit, constants = Fit(rows, group, fitted), {}
    for name in sorted({g for _, g, _, _ in fit.items}):
        constants[name] = fit.run(neutral(fitted), without=name, rounds=rounds)
        print(f"  without {name}: loss {fit.loss(constants[name], name):.3f}", file=sys.stderr)
    return Score([predict_row(row, constants.get(group(row), DEFAULTS)) for row in rows]), constants


def refit_slack(score: Score, rows: list[dict[str, str]], group: Grouping) -> tuple[Score, dict[str, float]]:
    """Reserved readings under full sharding with the allocator slack (0.05 to 0.4) that fits the other groups best.

    It is the only memory constant that these rows can decide."""
    kinds = {i for i, row in enumerate(rows) if _reserved(row) and score.predictions[i].in_memory}
    slacks: dict[str, float] = {}
    shown = list(score.predictions)
    for i in kinds:
        mine = group(rows[i])
        if mine not in slacks:
            errors = [_log_error(shown[j]) for j in kinds if group(rows[j]) != mine]
            slacks[mine] = min(SLACKS, key=lambda s: _spread(errors, s)) if errors else SHARDED_SLACK
    for i in kinds:
        scale = (1 + slacks[group(rows[i])]) / (1 + SHARDED_SLACK)
        memory_gib = shown[i].memory_gib
        shown[i] = replace(shown[i], memory_gib=None if memory_gib is None else memory_gib * scale)
    return Score(shown), slacks


SLACKS = [round(0.05 + 0.01 * i, 2) for i in range(36)]


def _reserved(row: dict[str, str]) -> bool:
    return memory_kind(row) == "reserved" and shard_of(row) in ("full", "hybrid")


def _log_error(p: Prediction) -> float:
    assert p.memory_gib and p.measured_gib
    return math.log(p.memory_gib / p.measured_gib / (1 + SHARDED_SLACK))


def _spread(errors: list[float], slack: float) -> float:
    return sum(abs(e + math.log(1 + slack)) for e in errors)


def device_of(row: dict[str, str]) -> str:
    run = read_run(row)
    return run.machine.device.name if not isinstance(run, Refusal) and run.machine else "unknown"


def half_of(row: dict[str, str]) -> str:
    """One of two halves by the checksum of the row's id: the same on every machine."""
    return f"half {zlib.crc32((row.get('id') or '').encode()) % 2}"


def _split(rows: list[dict[str, str]], rounds: int, group: Grouping) -> Score:
    return refit_slack(leave_out(rows, rounds, group)[0], rows, group)[0]


SPLITS: dict[str, Grouping] = {"device left out": device_of, "random half left out": half_of}
"""Other ways to divide the rows, to check that the result does not depend on the choice of sources."""


TEXTBOOK = {
    "matmul": 0.78, "tflops_per_watt": 1.0, "misaligned": 1.4, "memory": 0.8, "eager": 2.2, "network": 0.8, "contention": 0.5,
    "expert_edge": 500.0, "exchange": 0.5, "imbalance": 1.25, "expert_kernels": 150.0,
}  # fmt: skip
"""Where every fit starts, instead of the shipped values, so that a left-out fit has not seen its source.

matmul: nine tenths of the highest rate measured on an A100 (271 of 312 TFLOP/s). tflops_per_watt: 690 W and 670 TFLOP/s on an H200.
Those of experts are round numbers; for none of them a measurement was at hand."""


def neutral(fitted: tuple[str, ...] = FITTED) -> Constants:
    return replace(DEFAULTS, **{name: TEXTBOOK[name] for name in fitted})


def term_shares(rows: list[dict[str, str]], score: Score) -> dict[str, dict[str, float]]:
    """For each term of the step time: errors of the rows in which its share is in the upper quarter."""
    table: dict[str, list[tuple[float, float]]] = {}
    for row, shown in zip(rows, score.predictions, strict=True):
        run = read_run(row)
        if not shown.in_throughput or shown.throughput_error is None or isinstance(run, Refusal) or run.machine is None:
            continue
        step = estimate_step(run.model, run.step, run.layout, run.machine)
        for name, seconds in step.terms.items():
            table.setdefault(name, []).append((seconds / step.seconds, shown.throughput_error))
    result = {}
    for name, pairs in table.items():
        shares = np.array([p[0] for p in pairs])
        errors = np.array([p[1] for p in pairs])
        large = shares > max(0.05, float(np.quantile(shares, 0.75)))
        if large.sum() >= 5:
            result[name] = {
                "rows": int(large.sum()),
                "mean_share_pct": round(float(shares[large].mean()) * 100, 1),
                "median_error_pct": round(float(np.median(np.abs(errors[large]))) * 100, 1),
                "bias_pct": round(float(np.median(errors[large])) * 100, 1),
            }
    return dict(sorted(result.items(), key=lambda item: -item[1]["median_error_pct"]))


def eight_bit_errors(predictions: list[Prediction], rows: list[dict[str, str]]) -> dict[str, Any]:
    """Throughput errors of 8-bit rows, which are outside the scored set."""
    errors = sorted(
        abs(p.throughput_error) * 100
        for p, r in zip(predictions, rows, strict=True)
        if p.throughput_error is not None
        and (r.get("precision") or "") in ("fp8", "mxfp8", "nvfp4")
        and (r.get("quality") or "") != "flagged"
    )
    return {"rows": len(errors), "median_pct": quantile(errors, 0.5), "p90_pct": quantile(errors, 0.9)}
