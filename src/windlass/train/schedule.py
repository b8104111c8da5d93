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


def schedule_note(optim: OptimConfig, total: int) -> str:
    """What the schedule does that its author may not expect: the run is shorter than its parts. Empty when all fits."""
    if optim.warmup > total:
        reached = learning_rate(optim, total, total) / optim.lr if optim.lr else 0.0
        return f"learning rate: warm-up takes {optim.warmup:,} tokens and the run has {total:,}, so it ends at {reached:.0%} of optim.lr"
    decay = optim.decay if optim.schedule == "wsd" and optim.decay is not None else 0
    if optim.warmup + decay > total:
        start = _after_warmup(optim, optim.warmup, total)
        return f"learning rate: warm-up ({optim.warmup:,}) and decay ({decay:,} tokens) are more than the run's {total:,}, so after warm-up it goes on at {start:.0%} of optim.lr"
    return ""
