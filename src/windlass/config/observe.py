"""What is measured and where is it shown? The `[energy]`, `[profile]` and `[trackers]` tables."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from windlass.config.base import Table


class EnergyConfig(Table):
    enabled: bool = True
    interval_seconds: PositiveFloat = 1.0
    """How often the node's sampler reads power where only power, not energy, can be read."""
    pue: float | None = Field(default=None, ge=1.0)
    """Overrides the cluster's power usage effectiveness."""
    grid_g_per_kwh: float | None = Field(default=None, ge=0)
    """Overrides the location-based grid intensity."""
    market_g_per_kwh: float | None = Field(default=None, ge=0)
    """Overrides the market-based (contract) intensity."""


class ProfileConfig(Table):
    steps: str | None = None
    """"20:23" captures steps 20, 21 and 22."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    """Also write a memory snapshot."""


class TrackersConfig(Table):
    wandb: bool = False
    tensorboard: bool = False
    mlflow: bool = False
    project: str = "windlass"
    online: bool = False
    """W&B writes offline unless this is set; `windlass sync RUN` sends later."""
    every: PositiveInt = 1
    """Export each so-many-th metrics line."""
