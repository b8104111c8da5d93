"""When are checkpoints written and which are kept? The `[save]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from windlass.config.base import Bytes, Seconds, Table
from windlass.errors import WindlassError
from windlass.units import parse_seconds, parse_tokens


class SaveConfig(Table):
    every: int | str = "auto"
    """"auto" (from measured start-up and save time), a number of steps, tokens ("2B tokens") or time ("30m")."""
    keep_last: PositiveInt = 3
    keep_best: NonNegativeInt = 0
    """Also keep this many with the best `metric`."""
    metric: str = "val_loss"
    keep_every: str | int | None = None
    """Also keep one every so many steps (1000) or tokens ("50B tokens") for ever."""
    asynchronous: bool = True
    """Training goes on while the checkpoint is written."""
    at_end: bool = True
    quota: Bytes | None = None
    """Disk space the run may use; the forecast is checked against it before the run starts."""
    verify: bool = True
    """Check every file's checksum before a checkpoint is loaded."""
    load: str | None = None
    """Warm start: a checkpoint, run or Hugging Face folder whose weights (only) the run begins from."""
    failures_per_day: float = Field(default=0.5, ge=0)
    """Expected interruptions a day of the whole job, for the optimum of every = "auto"."""
    lead: Seconds | Literal["auto"] = "auto"
    """How long before the wall-time limit to stop and save; auto: from the measured save time."""

    @field_validator("every", "keep_every")
    @classmethod
    def _readable(cls, value: int | str | None) -> int | str | None:
        if value is None or value == "auto":
            return value
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"{value} steps is not an interval; write a number of at least 1")
            return value
        try:
            interval(value)
        except WindlassError as error:
            raise ValueError(f"{error.message} ({error.hint})" if error.hint else error.message) from None
        return value


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
