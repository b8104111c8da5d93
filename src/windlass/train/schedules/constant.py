"""The peak learning rate until the end."""

from windlass.config import OptimConfig


def lr_factor(optim: OptimConfig, tokens: int, total: int) -> float:
    return 1.0
