"""A straight line from the peak down to min_lr_ratio."""

from windlass.config import OptimConfig
from windlass.train.schedules import share_between


def lr_factor(optim: OptimConfig, tokens: int, total: int) -> float:
    return 1.0 - (1.0 - optim.min_lr_ratio) * share_between(tokens, optim.warmup, total)
