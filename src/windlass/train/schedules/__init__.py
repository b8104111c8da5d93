"""Learning rate as a pure function of tokens, so that a resume or a new batch size keeps the curve.

Each schedule is one module with `lr_factor(optim, tokens, total) -> float`: the share of optim.lr after the warm-up.
`windlass.registry.SCHEDULES` finds them by module name, and those of other packages by the entry point group
"windlass.schedules", which names such a function.
"""

from windlass.config import OptimConfig
from windlass.registry import SCHEDULES
from windlass.units import print_share


def learning_rate(optim: OptimConfig, tokens: int, total: int) -> float:
    """The learning rate of the step that starts after `tokens` of `total`."""
    if tokens < optim.warmup:
        return optim.lr * max(tokens, 1) / optim.warmup
    return optim.lr * float(SCHEDULES.load(optim.schedule)(optim, tokens, total))


def share_between(position: int, start: int, end: int) -> float:
    """How much of the way from `start` to `end` is done: 0 to 1."""
    return min(1.0, max(0.0, (position - start) / max(1, end - start)))


def schedule_note(optim: OptimConfig, total: int) -> str:
    """A sentence for the log when the run is too short for its schedule; empty when everything fits."""
    if optim.warmup > total:
        return (
            f"learning rate: warm-up takes {optim.warmup:,} tokens and the run has {total:,}, "
            f"so it ends at {print_share(max(total, 1) / optim.warmup if optim.lr else 0.0, digits=0)} of optim.lr"
        )
    start = SCHEDULES.load(optim.schedule)(optim, optim.warmup, total)
    if start < 1.0:
        return (
            f"learning rate: warm-up ({optim.warmup:,} tokens) and schedule {optim.schedule} are longer than the run's "
            f"{total:,} tokens, so after the warm-up it continues at {print_share(start, digits=0)} of optim.lr"
        )
    return ""
