"""Recomputation of a layer in the backward pass: nothing, every second product, or everything."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Carried = tuple[Tensor, Tensor]

_aten = torch.ops.aten
SAVED = {
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""Operators whose results selective recomputation keeps, beside every second matrix product."""


def selective() -> Any:
    """Save attention, collectives and every second matrix product; recompute the rest."""
    products = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in (_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default):
            products[context.is_recompute] += 1
            return (
                CheckpointPolicy.MUST_SAVE if products[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            )
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Recomputed(nn.Module):
    """A layer whose forward pass runs once, or again in the backward pass.

    The choice sits inside the module, so that neither parameter names nor the hooks of sharding around it change.
    """

    __call__: Callable[..., Tensor | Carried]

    def __init__(self) -> None:
        super().__init__()
        self.recompute = "none"
        self.carries = False
        """Return the last branch unadded, so that its addition and the next layer's norm become one compiled kernel."""

    def branches(self, x: Tensor, *args: Any) -> Carried:
        """The residual stream before the layer's last branch, and that branch."""
        raise NotImplementedError

    def run(self, x: Tensor, *args: Any) -> Tensor:
        return added(self.branches(x, *args))

    def forward(self, x: Tensor | Carried, *args: Any) -> Tensor | Carried:
        if self.carries:
            return self.branches(added(x), *args)
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.run(added(x), *args)
        extra: dict[str, Any] = {"context_fn": partial(selective)} if self.recompute == "selective" else {}
        out: Tensor = checkpoint(self.run, added(x), *args, use_reentrant=False, **extra)
        return out


def added(x: Tensor | Carried) -> Tensor:
    """The residual stream with the last branch added."""
    return x[0] + x[1] if isinstance(x, tuple) else x
