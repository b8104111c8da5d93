"""Which learning rate does a token position have? Pure functions of tokens, so that a resume or a new batch size keeps the curve."""

from __future__ import annotations

import math

from windlass.config import OptimConfig


def learning_rate(optim: OptimConfig, tokens: int, total: int) -> float:
    """The rate of the step that begins after `tokens` of `total`."""
    if tokens < optim.warmup:
        return optim.lr * max(tokens, 1) / optim.warmup
    return optim.lr * _after_warmup(optim, tokens, total)


def _after_warmup(optim: OptimConfig, tokens: int, total: int) -> float:
    low = optim.min_lr_ratio
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "wsd":
        decay = optim.decay if optim.decay is not None else total // 10
        share = _share(tokens, total - decay, total)
        return 1.0 - (1.0 - low) * share
    share = _share(tokens, optim.warmup, total)
    if optim.schedule == "linear":
        return 1.0 - (1.0 - low) * share
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * share))


def _share(position: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (position - start) / max(1, end - start)))
