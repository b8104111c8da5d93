"""What does one line of eval.jsonl say? One number of one group, with its interval: the same shape for every kind of evaluation. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.errors import DataError
from windlass.files import append_line
from windlass.runs.folder import Run

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number. The report shows these fields in this order."""

    task: str
    group: str
    """"all", or what it is the number of: "source code", "language nl"."""
    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    """The 95 % interval; None where it cannot be known (a single document, say)."""
    count: int
    """Independent items behind it: documents, questions, sentences."""
    detail: dict[str, Any] = field(default_factory=dict)

    def line(self, **where: Any) -> dict[str, Any]:
        plain = {key: getattr(self, key) for key in ("task", "group", "metric", "value", "low", "high", "count")}
        return {**plain, **where, "detail": self.detail}


def read_utf8(path: Path, what: str) -> str:
    """The text of a file that somebody made; one that is no text is named."""
    if not path.exists() or path.is_dir():
        raise DataError(
            "evaluate.failed", f"there is no {what} {path}", hint="check the name; it is looked for from this folder"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            "evaluate.utf-text-byte-place",
            f"the {what} {path} is not UTF-8 text: byte {error.object[error.start]:#04x} at place {error.start:,}",
            hint="convert it, for example with iconv -f LATIN1 -t UTF-8",
        ) from None


def append(run: Run, scores: Iterable[Score], *, step: int | None, tokens: int | None, **more: Any) -> None:
    """Add scores to the run's eval.jsonl, with the checkpoint they belong to."""
    now = time.time()
    for score in scores:
        append_line(run.eval_file, score.line(step=step, tokens=tokens, time=now, **more))


def ratio_interval(above: Floats, below: Floats, seed: int = 0) -> tuple[float | None, float | None]:
    """Interval of sum(above) / sum(below), resampling whole items: tokens of one document do not vary independently."""
    if len(above) < 2:
        return None, None
    random, shares = np.random.default_rng(seed), []
    for start in range(0, RESAMPLES, 100):  # in parts, so that many items need little memory
        weights = random.multinomial(len(above), np.full(len(above), 1 / len(above)), size=min(100, RESAMPLES - start))
        shares.append((weights @ above) / np.maximum(weights @ below, 1e-300))
    edge = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(shares), (edge, 1 - edge))
    return float(low), float(high)


def wilson_interval(right: int, count: int) -> tuple[float | None, float | None]:
    """Interval of a share, good for few items and near 0 and 1."""
    if count == 0:
        return None, None
    z, share = 1.959964, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    # Exactly 0 and 1 at the ends, where rounding leaves a trace.
    return (max(0.0, middle - half) if right else 0.0), (min(1.0, middle + half) if right < count else 1.0)
