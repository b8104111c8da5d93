"""The `[optim]` table: optimizer, learning-rate schedule, clipping."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from windlass.config.base import Registered, Table, Tokens
from windlass.registry import OPTIMIZERS, SCHEDULES


class OptimConfig(Table):
    name: Annotated[str, Registered(OPTIMIZERS)] = "adamw"
    """adamw, sgd (with momentum), or an optimizer of an installed package."""
    lr: NonNegativeFloat = 3e-4
    """The highest learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The schedule ends at lr x this."""
    warmup: Tokens = 0
    """Tokens of linear warm-up."""
    schedule: Annotated[str, Registered(SCHEDULES)] = "cosine"
    """Learning rate after the warm-up. wsd: constant, then a decay at the end."""
    decay: Tokens | None = None
    """wsd: tokens of the final decay (default: a tenth of the run)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the denominator."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """SGD only."""
    weight_decay: NonNegativeFloat = 0.1
    """Applied to matrices, not to norms, biases or embeddings."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Precision of the optimizer's moments. bf16 uses stochastic rounding, so that small changes survive on average."""
