"""What must a checkpoint hold so that any other layout can go on from it? Weights and moments by their names, in fp32, plus a few counters."""

from __future__ import annotations

from typing import Any

from windlass.train.guard import Guard
from windlass.train.optimizers.base import Optimizer
from windlass.train.tie import Tie


def training_state(optimizer: Optimizer, guard: Guard | None = None) -> dict[str, Any]:
    """Tensors for torch.distributed.checkpoint, to be saved from or filled in place.

    Names are the model's own and do not depend on the layout; a DTensor knows its part of the whole, so that none, zero1,
    zero2, full, hybrid, tensor and pipeline parallel and a single process read each other's checkpoints. Where weights are
    computed in bf16, the fp32 master copy is what is saved.
    """
    state: dict[str, Any] = {
        "model": {slot.name: slot.weights.detach() for slot in optimizer.slots},
        "optim": {name: {slot.name: slot.moments[name] for slot in optimizer.slots} for name in optimizer.moment_names},
        "count": optimizer.count,
    }
    if guard is not None:
        state["guard"] = guard.memory
    return state


def after_restore(optimizer: Optimizer, tie: Tie | None = None) -> None:
    """What follows from the restored tensors and was not itself restored."""
    optimizer.refresh()
    if tie is not None:
        tie.spread()
