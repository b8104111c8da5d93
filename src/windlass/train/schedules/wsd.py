"""Warm-up, stable, decay: constant, then down over the last optim.decay tokens in the form of optim.decay_shape."""

import math

from windlass.config import OptimConfig
from windlass.train.schedules import share_between


def lr_factor(optim: OptimConfig, tokens: int, total: int) -> float:
    decay = optim.decay if optim.decay is not None else total // 10
    share = share_between(tokens, total - decay, total)
    if optim.decay_shape == "1-sqrt":
        share = math.sqrt(share)
    elif optim.decay_shape == "cosine":
        share = 0.5 * (1.0 - math.cos(math.pi * share))
    return 1.0 - (1.0 - optim.min_lr_ratio) * share
