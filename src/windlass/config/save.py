"""The `[save]` table: when checkpoints are written and which are kept."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from windlass.config.base import Bytes, SecondsOrAuto, Table
from windlass.config.tune import SCORES
from windlass.errors import WindlassError
from windlass.units import parse_seconds, parse_tokens

_EXAMPLES = {
    "every": 'write steps (500), tokens ("2B tokens"), a time ("30m") or "auto"',
    "keep_every": 'write steps (1000) or tokens ("50B tokens")',
}


class SaveConfig(Table):
    every: int | str = "auto"
    """"auto" (from measured start-up and save time), a number of steps, tokens ("2B tokens") or time ("30m")."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints with the best `metric` to keep as well."""
    metric: str = "val_loss"
    """What keep_best compares: val_loss, val_loss/NAME (one source) or loss (of the training step). Fine-tuning on
    examples uses tune.metric."""
    keep_every: str | int | None = None
    """Interval at which one checkpoint is kept forever: steps (1000) or tokens ("50B tokens")."""
    asynchronous: bool = True
    """Training continues while the checkpoint is written."""
    at_end: bool = True
    """Also save when the run is finished."""
    quota: Bytes | None = None
    """Disk space that the run may use; the predicted size of its checkpoints is compared with it before the run
    starts."""
    verify: bool = True
    """Verify every file's checksum before a checkpoint is loaded."""
    load: str | None = None
    """Warm start: checkpoint, run or Hugging Face folder from which the run takes its initial weights, and nothing
    else."""
    failures_per_day: float = Field(default=0.5, ge=0)
    """Expected number of interruptions of the job per day; every = "auto" uses it."""
    lead: SecondsOrAuto = "auto"
    """How long before the wall-time limit to stop and save; auto: from the measured save time."""

    @field_validator("every", "keep_every", mode="before")
    @classmethod
    def _check_interval(cls, value: Any, info: ValidationInfo) -> Any:
        key = info.field_name or "every"
        if value is None or (value == "auto" and key == "every"):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"{value!r} is not an interval; {_EXAMPLES[key]}")
        try:
            unit, size = parse_interval(value)
        except WindlassError as error:  # pydantic collects ValueErrors
            raise ValueError(f"{error.message}; {_EXAMPLES[key]}") from None
        if size <= 0:
            raise ValueError(f"{value!r} is not an interval: it must be more than 0; {_EXAMPLES[key]}")
        if unit == "seconds" and key == "keep_every":
            raise ValueError(f"{value!r} is a time; {_EXAMPLES[key]}")
        return value

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, value: str) -> str:
        scores = {f"val_{score}" for names in SCORES.values() for score in names}
        if value not in {"val_loss", "loss", *scores} and not value.startswith("val_loss/"):
            raise ValueError(
                f"unknown metric {value!r}; write val_loss, val_loss/NAME (one source) or loss (of training)"
            )
        return value


def parse_interval(value: int | str) -> tuple[Literal["steps", "tokens", "seconds"], float]:
    """`1000` -> steps, `"2B tokens"` -> tokens, `"30m"` -> seconds."""
    text = str(value).strip()
    if text.endswith("tokens"):
        return "tokens", float(parse_tokens(text.removesuffix("tokens")))
    if text.endswith("steps"):
        return "steps", float(parse_tokens(text.removesuffix("steps")))
    if isinstance(value, int) or text.isdigit():
        return "steps", float(value)
    return "seconds", parse_seconds(text)
