"""Half a cosine from the peak down to min_lr_ratio."""

import math

from windlass.config import OptimConfig
from windlass.train.schedules import share_between


def lr_factor(optim: OptimConfig, tokens: int, total: int) -> float:
    low = optim.min_lr_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * share_between(tokens, optim.warmup, total)))
