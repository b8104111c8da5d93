"""What is measured and where is it shown? The `[energy]`, `[profile]` and `[trackers]` tables."""

from __future__ import annotations

import re

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from windlass.config.base import Table


class EnergyConfig(Table):
    enabled: bool = True
    """Read the node's sensors and keep energy.jsonl."""
    interval_seconds: PositiveFloat = 1.0
    """How often the node's sampler reads power where only power, not energy, can be read."""
    pue: float | None = Field(default=None, ge=1.0)
    """Overrides the cluster's power usage effectiveness."""
    grid_g_per_kwh: float | None = Field(default=None, ge=0)
    """Overrides the location-based grid intensity."""
    market_g_per_kwh: float | None = Field(default=None, ge=0)
    """Overrides the market-based (contract) intensity."""


def window_of(text: str) -> tuple[int, int]:
    """`"20:23"` -> (20, 23): steps 20, 21 and 22, numbered as in the metrics; `"20"` is one step."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    if match is None:
        raise ValueError(f'{text!r} is no window of steps; write it like "20:23" for steps 20, 21 and 22')
    first = int(match.group(1))
    end = int(match.group(2)) if match.group(2) else first + 1
    if first < 1 or end <= first:
        raise ValueError(f"the window {text!r} holds no step: the first step is 1, and the end comes after the begin")
    return first, end


class ProfileConfig(Table):
    steps: str | None = None
    """"20:23" captures steps 20, 21 and 22."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Which ranks write a trace; an empty list means all."""
    shapes: bool = False
    """Also record the shapes of inputs."""
    stacks: bool = False
    """Also record Python stacks."""
    memory: bool = False
    """Also write a memory snapshot."""

    @field_validator("steps")
    @classmethod
    def _is_window(cls, value: str | None) -> str | None:
        if value is not None:
            window_of(value)
        return value


class TrackersConfig(Table):
    wandb: bool = False
    """Export to Weights & Biases."""
    tensorboard: bool = False
    """Export event files for TensorBoard."""
    mlflow: bool = False
    """Export to an MLflow store in the run folder."""
    project: str = "windlass"
    """Name of the project in W&B, and of the experiment in MLflow."""
    online: bool = False
    """W&B writes offline unless this is set; `windlass sync RUN` sends later."""
    every: PositiveInt = 1
    """Export each so-many-th metrics line."""
