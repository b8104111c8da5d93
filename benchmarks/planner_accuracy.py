"""How far are windlass's predictions from published runs? Fit the few constants with each source left out in turn, and score what was left out.

    python benchmarks/planner_accuracy.py --rows published_runs_dev.csv             # the table, with the shipped constants and left-out fits
    python benchmarks/planner_accuracy.py --rows published_runs_dev.csv --fit       # also print constants fitted to all rows

The table goes to benchmarks/results/planner_accuracy.md and .json with the command, commit and date beside it.
"""

from __future__ import annotations

import sys

sys.path.pop(
    0
)  # this folder: a script here that is named like a module of the standard library must not stand in its place

import argparse
import json
import math
import platform
import subprocess
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from windlass.cost.memory import SHARDED_SLACK
from windlass.cost.step import DEFAULTS, Constants, estimate
from windlass.planner.rows import Case, Refusal, shard_of, understand
from windlass.planner.score import Prediction, Score, predict_row, quantile, read_rows, score_rows

RESULTS = Path(__file__).parent / "results"
OUTSIDE = Path(__file__).parent / "outside_runs.csv"
"""Runs of other publications, written down by hand with their sources; no constant was ever fitted to them."""
FITTED = ("matmul", "tflops_per_watt", "misaligned", "memory", "eager", "network", "contention")
"""Constants that the rows decide; the others are held at measured or textbook values (see their docstrings). Of memory only the
allocator's slack under full sharding is fitted (`refit_slack`): its terms are counted."""
BOUNDS = {
    "matmul": (0.5, 0.92), "tflops_per_watt": (0.6, 1.4), "misaligned": (1.0, 2.2), "memory": (0.5, 0.92),
    "eager": (1.2, 4), "network": (0.3, 0.95), "contention": (0.0, 1.5),
}  # fmt: skip
PEERS = {
    "memory (allocator readings)": "llm-analysis 14 / 103 on these rows, 30 / 81 held out; Megatron-LM's formula 29 / 47; cookbook 71 and more",
    "throughput": "llm-analysis at efficiency 0.5: 20 / 80; tuned per GPU on these very rows 15 / 68, held out 17 / 60; constant MFU per GPU 17 / 64",
    "out-of-memory rows caught": "llm-analysis 14 of 35 (held out)",
}
"""Published comparison on the same rows (median / p90 of the absolute error in %)."""


Grouping = Callable[[dict[str, str]], str]


def source_of(row: dict[str, str]) -> str:
    return row.get("source_group") or row.get("source") or ""


class Fit:
    """Rows understood once, so that a fit costs a few seconds of CPU."""

    def __init__(self, rows: list[dict[str, str]], group: Grouping | None = None) -> None:
        """`group` names the part of the rows that a row belongs to and is left out with; else its source."""
        self.items: list[tuple[str, str, Case, float]] = []
        for row in rows:
            case, shown = understand(row), predict_row(row)
            if isinstance(case, Refusal) or not shown.tokens_per_second_per_device or not shown.measured_tps:
                continue
            if case.work.precision in ("bf16", "fp16", "bf16_pure") and (row.get("quality") or "") != "flagged":
                self.items.append((shown.source, (group or source_of)(row), case, shown.measured_tps))

    def errors(self, constants: Constants, without: str | None = None) -> tuple[np.ndarray, list[str]]:
        kept = [(s, c, t) for s, group, c, t in self.items if group != without]
        logs = [math.log(_tps(case, constants) / tps) for _, case, tps in kept]
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
        return total / weight + PRIOR * _distance(constants)

    def run(self, start: Constants, without: str | None = None, rounds: int = 6) -> Constants:
        """Coordinate descent: try each constant a little higher and lower, halve the step when nothing helps."""
        best, value, step = start, self.loss(start, without), 0.12
        for _ in range(rounds):
            before = value
            for name in FITTED:
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
                here = getattr(best, name)
                moved = min(high, max(low, here + sign * step * max(abs(here), 0.1 * (high - low))))
                trial = replace(best, **{name: moved})
                loss = self.loss(trial, without)
                if loss >= value - 1e-6:
                    break
                best, value = trial, loss
        return best, value


PRIOR = 0.02
"""How strongly a fit is held to textbook values: enough to keep constants in place that the remaining sources do not decide."""


def _distance(constants: Constants) -> float:
    """Sum of squares of how far constants moved from their start, in units of 30 % (or of a tenth of their range near zero)."""
    start, total = neutral(), 0.0
    for name in FITTED:
        here, there, (low, high) = getattr(constants, name), getattr(start, name), BOUNDS[name]
        total += ((here - there) / (0.3 * max(abs(there), 0.2 * (high - low)))) ** 2
    return total


def _tps(case: Case, constants: Constants) -> float:
    step = estimate(
        case.shape, case.work, case.layout, case.device, case.links, case.devices_per_node, constants=constants
    )
    return step.tokens_per_second_per_device


def leave_out(rows: list[dict[str, str]], rounds: int, group: Grouping) -> tuple[Score, dict[str, Constants]]:
    """Each group of rows predicted with constants fitted on the others."""
    fit, found = Fit(rows, group), {}
    for name in sorted({g for _, g, _, _ in fit.items}):
        found[name] = fit.run(neutral(), without=name, rounds=rounds)
        print(f"  without {name}: loss {fit.loss(found[name], name):.3f}", file=sys.stderr)
    return Score([predict_row(row, found.get(group(row), DEFAULTS)) for row in rows]), found


def refit_slack(score: Score, rows: list[dict[str, str]], group: Grouping) -> tuple[Score, dict[str, float]]:
    """The allocator's slack under full sharding is the one constant of memory that these rows can decide: each group's reserved readings
    with the slack that suits the others best, between a twentieth and two fifths."""
    kinds = {i for i, row in enumerate(rows) if _reserved(row) and score.predictions[i].in_memory}
    found: dict[str, float] = {}
    shown = list(score.predictions)
    for i in kinds:
        mine = group(rows[i])
        if mine not in found:
            errors = [_log_error(shown[j]) for j in kinds if group(rows[j]) != mine]
            found[mine] = min(SLACKS, key=lambda s: _spread(errors, s)) if errors else SHARDED_SLACK
    for i in kinds:
        scale = (1 + found[group(rows[i])]) / (1 + SHARDED_SLACK)
        held = shown[i].memory_gib
        shown[i] = replace(shown[i], memory_gib=None if held is None else held * scale)
    return Score(shown), found


SLACKS = [round(0.05 + 0.01 * i, 2) for i in range(36)]


def _reserved(row: dict[str, str]) -> bool:
    return (row.get("mem_kind") or "").strip().lower() == "reserved" and shard_of(row) in ("full", "hybrid")


def _log_error(p: Prediction) -> float:
    assert p.memory_gib and p.measured_gib
    return math.log(p.memory_gib / p.measured_gib / (1 + SHARDED_SLACK))


def _spread(errors: list[float], slack: float) -> float:
    return sum(abs(e + math.log(1 + slack)) for e in errors)


def device_of(row: dict[str, str]) -> str:
    case = understand(row)
    return case.device.name if not isinstance(case, Refusal) and case.device else "unknown"


def half_of(row: dict[str, str]) -> str:
    """One of two halves, by a sum over the row's id: the same on every machine."""
    return f"half {zlib.crc32((row.get('id') or '').encode()) % 2}"


def _split(rows: list[dict[str, str]], rounds: int, group: Grouping) -> Score:
    return refit_slack(leave_out(rows, rounds, group)[0], rows, group)[0]


SPLITS: dict[str, Grouping] = {"device left out": device_of, "random half left out": half_of}
"""Other ways to divide the rows, as a check that the figure does not hang on the choice of sources."""


def neutral() -> Constants:
    """Where every fit starts: textbook values, not the shipped ones, so that a left-out fit has not seen its source.

    matmul: nine tenths of the highest rate measured on an A100 (271 of 312 TFLOP/s). tflops_per_watt: 690 W and 670 TFLOP/s on an H200.
    """
    return replace(
        DEFAULTS, matmul=0.78, tflops_per_watt=1.0, misaligned=1.4, memory=0.8, eager=2.2, network=0.8, contention=0.5
    )  # fmt: skip


def term_shares(rows: list[dict[str, str]], score: Score) -> dict[str, dict[str, float]]:
    """Which terms go with the error: mean signed error of the rows in which a term is large, against the rest."""
    table: dict[str, list[tuple[float, float]]] = {}
    for row, shown in zip(rows, score.predictions, strict=True):
        case = understand(row)
        if not shown.in_throughput or shown.throughput_error is None or isinstance(case, Refusal):
            continue
        step = estimate(case.shape, case.work, case.layout, case.device, case.links, case.devices_per_node)
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


def fp8_note(predictions: list[Prediction], rows: list[dict[str, str]]) -> dict[str, Any]:
    """Rows outside the core: 8-bit precision and other devices, given as a hint of what to expect there."""
    errors = sorted(
        abs(p.throughput_error) * 100
        for p, r in zip(predictions, rows, strict=True)
        if p.throughput_error is not None
        and (r.get("precision") or "") in ("fp8", "mxfp8", "nvfp4")
        and (r.get("quality") or "") != "flagged"
    )
    return {"rows": len(errors), "median_pct": quantile(errors, 0.5), "p90_pct": quantile(errors, 0.9)}


def table_text(result: dict[str, Any]) -> str:
    def cell(part: dict[str, Any]) -> str:
        if part["median_pct"] is None:
            return "not measured"
        return f"{part['median_pct']:.1f} / {part['p90_pct']:.1f} ({part['covered']} of {part['rows']})"

    out, left = result["shipped"], result["left_out"]
    lines = [
        "# Planner accuracy",
        "",
        f"Command: `{result['command']}`; commit {result['commit']}; {result['date']}; Python {result['python']}; {result['rows']} rows.",
        "",
        "Median / 90th percentile of the absolute error in %, rows covered of rows in the set.",
        "",
        "| | left out (honest) | shipped constants | goal | peers |",
        "|---|---|---|---|---|",
        f"| memory, allocator readings | {cell(left['memory'])} | {cell(out['memory'])} | 8 / 25 | {PEERS['memory (allocator readings)']} |",
        f"| throughput, stated bf16 and fp16 | {cell(left['throughput'])} | {cell(out['throughput'])} | 10 / 30 | {PEERS['throughput']} |",
        f"| out-of-memory rows caught | {left['fit']['oom_caught']} of {left['fit']['oom_rows']} | {out['fit']['oom_caught']} of {out['fit']['oom_rows']} | 90 % | {PEERS['out-of-memory rows caught']} |",
        f"| working rows kept | {left['fit']['working_kept']} of {left['fit']['working_rows']} | {out['fit']['working_kept']} of {out['fit']['working_rows']} | 97 % | |",
        "",
        "The rows divided in other ways: "
        + "; ".join(
            f"{name}: memory {cell(part['memory'])}, throughput {cell(part['throughput'])}"
            for name, part in result["splits"].items()
        )
        + ".",
        "",
        *outside_lines(result["outside"], cell),
        "## By source (left out)",
        "",
        "| source | memory | throughput | out of memory caught | working kept |",
        "|---|---|---|---|---|",
    ]
    for name, part in left["by_source"].items():
        fit = part["fit"]
        lines.append(
            f"| {name} | {cell(part['memory'])} | {cell(part['throughput'])} | {fit['oom_caught']} of {fit['oom_rows']} | {fit['working_kept']} of {fit['working_rows']} |"
        )
    lines += [
        "",
        "## Where the throughput error sits",
        "",
        "Rows in which a term is large (upper quarter), left-out predictions.",
        "",
    ]
    lines += ["| term | rows | its mean share % | median error % | bias % |", "|---|---|---|---|---|"]
    lines += [
        f"| {n} | {t['rows']} | {t['mean_share_pct']} | {t['median_error_pct']} | {t['bias_pct']:+} |"
        for n, t in result["terms"].items()
    ]
    eight = result["eight_bit"]
    if eight["median_pct"] is not None:
        lines += [
            "",
            f"8-bit rows (outside the goal): {eight['median_pct']:.1f} / {eight['p90_pct']:.1f} over {eight['rows']} rows.",
        ]
    lines += ["", "## Constants", "", "| constant | shipped | range over the left-out fits |", "|---|---|---|"]
    lines += [
        f"| {n} | {v:.4g} | {result['ranges'][n][0]:.4g} to {result['ranges'][n][1]:.4g} |"
        for n, v in result["constants"].items()
    ]
    slacks = list(result["slack"]["left_out"].values())
    span = f"{min(slacks):.4g} to {max(slacks):.4g}" if slacks else "no reserved readings"
    lines.append(f"| slack of memory under full sharding | {result['slack']['shipped']:.4g} | {span} |")
    return "\n".join(lines) + "\n"


def outside_lines(found: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    by_source = "; ".join(f"{name} {cell(part['throughput'])}" for name, part in found["by_source"].items())
    fit = found["fit"]
    return [
        f"Runs of other publications (`benchmarks/{OUTSIDE.name}`, written down by hand, never fitted to): throughput "
        f"{cell(found['throughput'])}, called fitting {fit['working_kept']} of {fit['working_rows']}; {by_source}.",
        "",
    ]


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=Path, required=True, help="CSV of measured runs (see docs/concepts/predictions.md)"
    )
    parser.add_argument("--fit", action="store_true", help="fit to all rows and print the constants")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    if arguments.fit:
        best = Fit(rows).run(neutral(), rounds=arguments.rounds * 2)
        print(json.dumps({k: round(v, 4) for k, v in asdict(best).items()}, indent=1))
        print(json.dumps({k: v for k, v in score_rows(rows, best).as_dict().items() if k != "by_source"}))
        return
    started = time.process_time()
    score, found = leave_out(rows, arguments.rounds, source_of)
    score, slacks = refit_slack(score, rows, source_of)
    result = {
        "command": f"python benchmarks/planner_accuracy.py --rows {arguments.rows.name}",
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "rows": len(rows),
        "shipped": score_rows(rows).as_dict(),
        "left_out": score.as_dict(),
        "splits": {
            name: {k: v for k, v in _split(rows, arguments.rounds, group).as_dict().items() if k != "by_source"}
            for name, group in SPLITS.items()
        },
        "outside": score_rows(read_rows(OUTSIDE)).as_dict(),
        "slack": {"shipped": SHARDED_SLACK, "left_out": slacks},
        "terms": term_shares(rows, score),
        "eight_bit": fp8_note(score.predictions, rows),
        "constants": asdict(DEFAULTS),
        "ranges": {
            n: [min(getattr(c, n) for c in found.values()), max(getattr(c, n) for c in found.values())]
            for n in asdict(DEFAULTS)
        },
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "planner_accuracy.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table_text(result)
    (arguments.out / "planner_accuracy.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
