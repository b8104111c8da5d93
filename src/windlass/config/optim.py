"""How do weights move? The `[optim]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from windlass.config.base import Table, Tokens


class OptimConfig(Table):
    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum."""
    lr: NonNegativeFloat = 3e-4
    """The highest learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The schedule ends at lr x this."""
    warmup: Tokens = 0
    """Tokens of linear warm-up."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """After the warm-up. wsd: constant, then a decay at the end."""
    decay: Tokens | None = None
    """wsd: tokens of the final decay; a tenth of the run when left out."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd only."""
    weight_decay: NonNegativeFloat = 0.1
    """Applied to matrices, not to norms, biases or embeddings."""
    clip: NonNegativeFloat = 1.0
    """Global gradient norm; 0 switches clipping off."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Precision of AdamW's two moments, or of SGD's momentum; bf16 is rounded at random, so that small changes survive."""
