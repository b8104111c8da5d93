"""Warm-up, stable, decay: constant, then a straight line over the last optim.decay tokens."""

from windlass.config import OptimConfig
from windlass.train.schedules import share_between


def lr_factor(optim: OptimConfig, tokens: int, total: int) -> float:
    decay = optim.decay if optim.decay is not None else total // 10
    return 1.0 - (1.0 - optim.min_lr_ratio) * share_between(tokens, total - decay, total)
