"""When are checkpoints written and which are kept? The `[save]` table."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from windlass.config.base import Bytes, SecondsOrAuto, Table
from windlass.errors import WindlassError
from windlass.units import parse_seconds, parse_tokens


class SaveConfig(Table):
    every: int | str = "auto"
    """"auto" (from measured start-up and save time), a number of steps, tokens ("2B tokens") or time ("30m")."""
    keep_last: PositiveInt = 3
    """The newest so many are kept."""
    keep_best: NonNegativeInt = 0
    """Also keep this many with the best `metric`."""
    metric: str = "val_loss"
    """What "best" means, the lowest first: val_loss, val_loss/NAME of a source, or loss (of the training step)."""
    keep_every: str | int | None = None
    """Also keep one every so many steps (1000) or tokens ("50B tokens") for ever."""
    asynchronous: bool = True
    """Training goes on while the checkpoint is written."""
    at_end: bool = True
    """Also save when the run is finished."""
    quota: Bytes | None = None
    """Disk space the run may use; the forecast is checked against it before the run starts."""
    verify: bool = True
    """Check every file's checksum before a checkpoint is loaded."""
    load: str | None = None
    """Warm start: a checkpoint, run or Hugging Face folder whose weights (only) the run begins from."""
    failures_per_day: float = Field(default=0.5, ge=0)
    """Expected interruptions a day of the whole job, for the optimum of every = "auto"."""
    lead: SecondsOrAuto = "auto"
    """How long before the wall-time limit to stop and save; auto: from the measured save time."""

    @field_validator("every", "keep_every", mode="before")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or (value == "auto" and info.field_name == "every"):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"{value!r} is not an interval; {_EXAMPLES[info.field_name or 'every']}")
        _check_interval(value, info.field_name or "every")
        return value

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        if value not in ("val_loss", "loss") and not value.startswith("val_loss/"):
            raise ValueError(
                f"{value!r} cannot judge a checkpoint; write val_loss, val_loss/NAME of a source, or loss (of training)"
            )
        return value


_EXAMPLES = {
    "every": 'write steps (500), tokens ("2B tokens"), a time ("30m") or "auto"',
    "keep_every": 'write steps (1000) or tokens ("50B tokens")',
}


def _check_interval(value: int | str, key: str) -> None:
    try:
        kind, size = interval(value)
    except WindlassError as error:
        raise ValueError(f"{error.message}; {_EXAMPLES[key]}") from None
    if size <= 0:
        raise ValueError(f"{value!r} is not an interval: it must be more than 0; {_EXAMPLES[key]}")
    if kind == "seconds" and key == "keep_every":
        raise ValueError(f"{value!r} is a time; {_EXAMPLES[key]}")


def interval(text: int | str) -> tuple[Literal["steps", "tokens", "seconds"], float]:
    """`1000` -> steps, `"2B tokens"` -> tokens, `"30m"` -> seconds."""
    if isinstance(text, int):
        return "steps", float(text)
    words = text.strip()
    if words.endswith("tokens"):
        return "tokens", float(parse_tokens(words.removesuffix("tokens")))
    if words.endswith("steps"):
        return "steps", float(parse_tokens(words.removesuffix("steps")))
    if words.isdigit():
        return "steps", float(words)
    return "seconds", parse_seconds(words)
