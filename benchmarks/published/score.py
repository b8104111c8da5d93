"""Errors of the planner's predictions on a table of measured runs, each row predicted from its layout columns only.

Definitions (those of the published comparison):
- memory: rows with a torch-allocator peak (allocated or reserved), layout fully stated, not flagged.
- throughput: bf16 or fp16 rows on A100, H100, H200, MI250 class devices with a fully stated layout, not flagged.
- error = |predicted - measured| / measured; coverage = rows predicted / rows in the set: a refusal counts against coverage, never as a hit.
- all readings: every row with a value, also those whose layout is not fully stated, of other devices, in 8 bits, or flagged.
- experts: models with experts by size, all devices, 16 bits and narrower precisions apart; every row with a value that is not flagged.
- fit: a row with outcome "oom" must be predicted not to fit, a working row to fit.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.published.cells import YES, Row, gibibytes, lower_text, number, text_of
from benchmarks.published.rows import PublishedRun, Refusal, precision_of, read_run

from windlass.cost.memory import MemoryEstimate, memory
from windlass.cost.step import Constants, estimate_step
from windlass.errors import ConfigError, PlanError
from windlass.models.spec import ModelSpec
from windlass.units import GIB

REQUIRED = (
    "layers",
    "hidden",
    "seq_len",
    "gpu",
    "gpus",
    "micro_batch",
    "shard",
    "tp",
    "pp",
    "precision",
    "activation_ckpt",
)
"""Columns without which a layout is not fully stated."""
CLASSES = ("a100", "a800", "h100", "h800", "h200", "gh200", "mi250")
NEEDED_COLUMNS = ("layers", "hidden", "seq_len", "gpu", "gpus")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row: what was predicted, what was measured, and to which sets it belongs."""

    id: str
    source: str
    refused: str | None
    """Why the row, or only its time, is not predicted."""
    memory_gib: float | None
    """In the kind of the measurement: allocated, reserved, or with context."""
    measured_gib: float | None
    tokens_per_second_per_device: float | None
    measured_tps: float | None
    fits: bool | None
    outcome: str
    stated: bool
    """The layout is fully stated and the row is not flagged."""
    in_memory: bool
    in_throughput: bool
    assumed: tuple[str, ...]
    expert_group: str | None = None
    """The size of a model with experts, by the name of its best known one."""
    narrow: bool = False
    """Products in 8 or 4 bits."""
    flagged: bool = False

    @property
    def memory_error(self) -> float | None:
        return _error(self.memory_gib, self.measured_gib)

    @property
    def throughput_error(self) -> float | None:
        return _error(self.tokens_per_second_per_device, self.measured_tps)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1.0


TABLE_PAGE = "docs/concepts/predictions-table.md"


def read_rows(path: Path | str, needed: Sequence[str] = NEEDED_COLUMNS, page: str = TABLE_PAGE) -> list[dict[str, str]]:
    """The rows of a table of runs, whose columns `page` explains. ConfigError: unreadable, or columns missing."""
    return list(iterate_rows(path, needed, page))


def iterate_rows(
    path: Path | str, needed: Sequence[str] = NEEDED_COLUMNS, page: str = TABLE_PAGE
) -> Iterator[dict[str, str]]:
    """The same as a generator: a table may be larger than memory."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            delimiter = max(",;\t|", key=header.count)
            reader = csv.reader(file, delimiter=delimiter)
            names = [re.sub(r"[\s-]+", "_", n.strip().lower()) for n in next(reader, [])]
            _check_columns(path, names, needed, page)
            for row in reader:
                if any(cell.strip() for cell in row):
                    cells = row if delimiter == "," else [_with_decimal_point(cell) for cell in row]
                    yield dict(zip_longest(names, cells[: len(names)], fillvalue=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            "published.table-unreadable",
            f"cannot read {path}: {error}",
            hint="give a CSV file with one measured run per line, in UTF-8",
        ) from error


def _with_decimal_point(cell: str) -> str:
    """Where commas do not separate columns they are decimal commas: "52,125" is 52.125."""
    return cell.replace(",", ".") if re.fullmatch(r"\s*-?\d+,\d+\s*", cell) else cell


def _check_columns(path: Path | str, names: list[str], needed: Sequence[str], page: str) -> None:
    if missing := [c for c in needed if c not in names]:
        raise ConfigError(
            "published.column-missing",
            f"{path} has no column {', '.join(missing)} (it has: {', '.join(n for n in names[:12] if n) or 'none'})",
            hint=f"the columns are explained in {page}",
        )
    if twice := sorted({n for n in names if n and names.count(n) > 1}):
        raise ConfigError(
            "published.column-twice",
            f"{path} has more than one column {', '.join(twice)}",
            hint="remove or rename all but one of them",
        )


def predict_row(row: Row, constants: Constants | None = None) -> Prediction:
    run = read_run(row)
    kind = memory_kind(row)
    stated, measured_gib, measured_tps = is_stated(row), gibibytes(row, "peak_mem_gib"), rate_measured(row)
    shared: dict[str, Any] = {
        "id": row.get("id") or "",
        "source": row.get("source_group") or row.get("source") or "",
        "measured_gib": measured_gib,
        "measured_tps": measured_tps,
        "outcome": _outcome(row),
        "stated": stated,
        "in_memory": stated and kind in ("allocated", "reserved") and measured_gib is not None,
        "in_throughput": stated and _in_class(row) and measured_tps is not None,
        "narrow": precision_of(row) in ("fp8", "mxfp8", "nvfp4"),
        "flagged": lower_text(row, "quality") == "flagged",
    }
    if isinstance(run, Refusal):
        return _refused(run.reason, shared)
    try:
        estimated = memory(run.model, run.step, run.layout)
    except (PlanError, ZeroDivisionError, OverflowError) as error:
        return _refused(str(error), shared)
    rate, why = _rate(run, row, constants)
    return Prediction(
        refused=why,
        memory_gib=_in_kind(estimated, kind, run.capacity) / GIB,
        tokens_per_second_per_device=rate,
        fits=fits(estimated, run),
        assumed=run.assumed,
        expert_group=expert_group(run.model),
        **shared,
    )


def memory_kind(row: Row) -> str:
    """allocated or reserved, also by the names of torch's functions ("max_memory_reserved"), or the row's own text."""
    text = lower_text(row, "mem_kind")
    words = set(re.findall("[a-z]+", text)) - {"torch", "cuda", "peak", "max", "memory"}
    return words.pop() if words in ({"allocated"}, {"reserved"}) else text


def _rate(run: PublishedRun, row: Row, constants: Constants | None) -> tuple[float | None, str | None]:
    """Tokens/s of one device, or the reason why they cannot be predicted (memory needs no known device, time does)."""
    if run.machine is None:
        return None, f"time: unknown device {row.get('gpu')!r}"
    try:
        step = estimate_step(run.model, run.step, run.layout, run.machine, constants=constants)
    except (PlanError, ZeroDivisionError, OverflowError) as error:
        return None, f"time: {error}"
    return step.tokens_per_second_per_device * run.parts, None


OOM = re.compile(
    r"oom|out[\s_-]*of[\s_-]*(?:\w+[\s_-]*)?memory|(?:does not|doesn't|did not|didn't) fit|memory (?:error|exceeded)"
)
NO_OOM = re.compile(r"\b(?:no|not|without|never)\W+(?:an?\W+)?(?:oom|out)")
WORKS = (*YES, "ok", "okay", "works", "worked", "success", "pass", "passed", "fits", "completed")


def _outcome(row: Row) -> str:
    """ok, oom, or the row's own text. A blank outcome is oom if "OOM" stands in place of a measured value, ok if there is a measured
    value, else unknown."""
    text = lower_text(row, "outcome")
    if not text:
        cells = [lower_text(row, "tokens_per_s_per_gpu"), lower_text(row, "peak_mem_gib")]
        text = next((c for c in cells if OOM.search(c)), "ok" if any(cells) else "unknown")
    if OOM.search(text):
        return "ok" if NO_OOM.search(text) else "oom"
    return "ok" if text in WORKS else text


def _refused(reason: str, shared: dict[str, Any]) -> Prediction:
    return Prediction(
        refused=reason, memory_gib=None, tokens_per_second_per_device=None, fits=None, assumed=(), **shared
    )


def fits(estimated: MemoryEstimate, run: PublishedRun) -> bool | None:
    """Predicted fit; with a blank recompute column the row fits if any recompute policy fits. None: the device's memory is unknown."""
    usable = run.capacity
    if usable is None:
        return None
    if estimated.needed > usable and any(a.startswith("activation_ckpt") for a in run.assumed):
        estimated = memory(run.model, replace(run.step, recompute="full"), run.layout)
    return estimated.needed <= usable


def _in_kind(estimated: MemoryEstimate, kind: str, capacity: float | None) -> float:
    """The estimate in the kind and unit of the measurement (sources that print GB are compared in GB).

    The allocator's slack ends where the device's memory does."""
    limit = max(estimated.allocated, capacity or math.inf)
    scale = GIB / 1e9 if "gb" in kind.split() or "(gb" in kind else 1.0
    if kind.startswith("allocated"):
        return estimated.allocated * scale
    if any(mark in kind for mark in ("nvidia-smi", "rocm-smi", "driver", "device used", "device-used")):
        return min(estimated.total, limit) * scale
    return min(estimated.reserved, limit) * scale


EXPERT_GROUPS = (("small", 20e9), ("30B-A3B", 60e9), ("235B-A22B", 500e9), ("DeepSeek-V3", math.inf))
"""Names of groups and the parameters below which a model with experts belongs to them."""


def expert_group(model: ModelSpec) -> str | None:
    return next(name for name, end in EXPERT_GROUPS if model.params.total < end) if model.expert_params else None


def rate_measured(row: Row) -> float | None:
    value = None if lower_text(row, "quality") == "flagged_throughput" else number(row, "tokens_per_s_per_gpu")
    return value if value is not None and value > 0 else None


def is_stated(row: Row) -> bool:
    """Layout fully stated and not flagged."""
    quality = lower_text(row, "quality")
    return quality not in ("flagged", "incomplete") and all(text_of(row, c) for c in REQUIRED)


def _in_class(row: Row) -> bool:
    return precision_of(row) in ("bf16", "fp16", "bf16_pure") and any(c in lower_text(row, "gpu") for c in CLASSES)


@dataclass(frozen=True, slots=True)
class Score:
    predictions: list[Prediction]

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `planner_accuracy.py --rows FILE.csv --json`."""
        sources: dict[str, list[Prediction]] = {}
        for p in self.predictions:
            sources.setdefault(p.source, []).append(p)
        return {
            **_tables(self.predictions),
            "by_source": {name: _tables(sources[name]) for name in sorted(sources)},
            "all_readings": {
                "memory": _summary([p.memory_error for p in self.predictions if p.measured_gib is not None]),
                "throughput": _summary([p.throughput_error for p in self.predictions if p.measured_tps is not None]),
            },
            **_expert_tables(self.predictions),
            "refused": _tally(p.refused for p in self.predictions if p.refused),
            "assumed": _tally(a for p in self.predictions for a in p.assumed),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One line per row for `--rows-out`."""
        return [_line(p) for p in self.predictions]


def score_rows(rows: Iterable[Row], constants: Constants | None = None) -> Score:
    return Score([predict_row(row, constants) for row in rows])


def score_file(path: Path | str, constants: Constants | None = None) -> Score:
    return score_rows(iterate_rows(path), constants)


def write_rows(score: Score, path: Path | str) -> None:
    lines = score.rows()
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]) if lines else ["id"])
        writer.writeheader()
        writer.writerows(lines)


def _tally(texts: Iterable[str]) -> dict[str, int]:
    return dict(Counter(texts).most_common())


def _tables(predictions: list[Prediction]) -> dict[str, Any]:
    return {
        "memory": _summary([p.memory_error for p in predictions if p.in_memory]),
        "throughput": _summary([p.throughput_error for p in predictions if p.in_throughput]),
        "fit": _fit(predictions),
    }


def _expert_tables(predictions: list[Prediction]) -> dict[str, Any]:
    """Nothing for a table without experts."""
    scored = [p for p in predictions if p.expert_group is not None]
    if not scored:
        return {}

    def errors(rows: list[Prediction]) -> dict[str, Any]:
        rates = [p for p in rows if p.measured_tps is not None and not p.flagged]
        memory_rows = [p for p in rows if p.measured_gib is not None and not p.flagged]
        return {
            "throughput": _summary([p.throughput_error for p in rates]),
            "throughput_16_bit": _summary([p.throughput_error for p in rates if not p.narrow]),
            "throughput_narrow": _summary([p.throughput_error for p in rates if p.narrow]),
            "memory": _summary([p.memory_error for p in memory_rows]),
            "fit": _fit(rows),
        }

    groups = {name: [p for p in scored if p.expert_group == name] for name, _ in EXPERT_GROUPS}
    return {"experts": {"all": errors(scored), **{name: errors(rows) for name, rows in groups.items() if rows}}}


def _summary(errors: list[float | None]) -> dict[str, Any]:
    covered = sorted(abs(e) * 100 for e in errors if e is not None)
    return {
        "rows": len(errors),
        "covered": len(covered),
        "median_pct": quantile(covered, 0.5),
        "p90_pct": quantile(covered, 0.9),
    }


def quantile(ordered: list[float], share: float) -> float | None:
    """Linear interpolation as in numpy; None for an empty list."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _fit(predictions: list[Prediction]) -> dict[str, int]:
    oom = [p for p in predictions if p.outcome == "oom"]
    working = [p for p in predictions if p.outcome == "ok" and p.stated]
    return {
        "oom_rows": len(oom),
        "oom_caught": sum(p.fits is False for p in oom),
        "working_rows": len(working),
        "working_kept": sum(p.fits is True for p in working),
    }


def _line(p: Prediction) -> dict[str, Any]:
    def rounded(value: float | None, digits: int) -> float | str:
        return "" if value is None else round(value, digits)

    def percent(value: float | None) -> float | str:
        return "" if value is None else round(value * 100, 2)

    return {
        "id": p.id,
        "source": p.source,
        "refused": p.refused or "",
        "predicted_memory_gib": rounded(p.memory_gib, 3),
        "measured_memory_gib": rounded(p.measured_gib, 3),
        "memory_error_pct": percent(p.memory_error),
        "predicted_tokens_per_second_per_device": rounded(p.tokens_per_second_per_device, 2),
        "measured_tokens_per_second_per_device": rounded(p.measured_tps, 2),
        "throughput_error_pct": percent(p.throughput_error),
        "fits": "" if p.fits is None else ("yes" if p.fits else "no"),
        "outcome": p.outcome,
        "in_memory_set": int(p.in_memory),
        "in_throughput_set": int(p.in_throughput),
        "assumed": "; ".join(p.assumed),
    }
