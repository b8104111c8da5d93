"""The `[energy]`, `[profile]` and `[trackers]` tables: what is measured and where it is shown."""

import re
from typing import Any

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator

from windlass.config.base import Table
from windlass.registry import TRACKERS


class EnergyConfig(Table):
    enabled: bool = True
    """Read the node's sensors and write energy.jsonl."""
    interval_seconds: PositiveFloat = 1.0
    """Seconds between two samples of power, for sensors that report power but no energy."""
    pue: float | None = Field(default=None, ge=1.0)
    """Overrides the cluster's power usage effectiveness (PUE)."""
    grid_g_per_kwh: float | None = Field(default=None, ge=0)
    """Overrides the location-based grid intensity."""
    market_g_per_kwh: float | None = Field(default=None, ge=0)
    """Overrides the market-based (contract) intensity."""


def parse_step_range(text: str) -> tuple[int, int]:
    """`"20:23"` -> (20, 23): steps 20, 21 and 22, numbered as in the metrics; `"20"` is one step."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    if match is None:
        raise ValueError(f'{text!r} is not a range of steps; write it like "20:23" for steps 20, 21 and 22')
    first = int(match.group(1))
    end = int(match.group(2)) if match.group(2) else first + 1
    if first < 1 or end <= first:
        raise ValueError(
            f"the range {text!r} contains no step: steps start at 1, and the end comes after the first step"
        )
    return first, end


class ProfileConfig(Table):
    steps: str | None = None
    """"20:23" captures steps 20, 21 and 22."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks that write a trace; an empty list means all."""
    shapes: bool = False
    """Also record the shapes of inputs."""
    stacks: bool = False
    """Also record Python stacks."""
    memory: bool = False
    """Also write a memory snapshot."""

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, value: str | None) -> str | None:
        if value is not None:
            parse_step_range(value)
        return value


class TrackersConfig(Table):
    """A tracker of an installed package is one more key: its name = true."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool] = Field(init=False)

    wandb: bool = False
    """Export to Weights & Biases."""
    tensorboard: bool = False
    """Export event files for TensorBoard."""
    mlflow: bool = False
    """Export to an MLflow store in the run folder."""
    project: str = "windlass"
    """Project in W&B, experiment in MLflow."""
    online: bool = False
    """Upload to W&B during training. Without it W&B writes offline files, which `windlass sync RUN` uploads later."""
    every: PositiveInt = 1
    """Export every n-th line of metrics.jsonl."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        extra = [key for key in values if key not in cls.model_fields] if isinstance(values, dict) else []
        unknown = set(extra).difference(TRACKERS.names()) if extra else ()
        if unknown:
            errors: Any = [{"type": "extra_forbidden", "loc": (key,), "input": values[key]} for key in sorted(unknown)]
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return values

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of the trackers to export to."""
        return tuple(name for name, value in self if value is True and name != "online")
