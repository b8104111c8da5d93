"""How do ranks share one long sequence? Each holds a stretch of positions.

Attention gathers keys and values, and queries stay. Retention needs only the state that each stretch leaves, a matrix per head,
however long the sequence is.

torch's own context parallelism knows only CUDA's attention operators, so this is ours: it runs on any device and over gloo. The
stretches are contiguous, so the last rank attends to more keys than the first; the planner counts that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from windlass.errors import ConfigError
from windlass.models.attention import document_mask, masked_attention
from windlass.models.parts import Model
from windlass.models.retnet import retain_state, state_left
from windlass.train.mesh import World

# The name before torch 2.13, which still works there and warns on every rank.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def apply_context(module: Model, world: World) -> None:
    """Tell the model where its stretch begins, and its blocks how to reach the rest."""
    rank, size = world.context_rank, world.axes.context
    module.whole_mask = False
    module.position_start = rank * (module.seq_len // size)
    for block in module.layers.values():
        _reach_out(block, world.context_group(), rank)


def _reach_out(block: nn.Module, group: Any, rank: int) -> None:
    if hasattr(block, "attention") and hasattr(block.attention, "core"):
        block.attention.core = partial(gathered_attention, group=group, rank=rank)
    elif hasattr(block, "retention") and hasattr(block.retention, "carried"):
        block.retention.carried = partial(carried_retention, group=group, rank=rank)
    else:
        raise ConfigError(
            "train.layout-context-works-our",
            "layout.context > 1 works with our own families, not with this one",
            hint="set layout.context = 1",
        )


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, group: Any, rank: int) -> Tensor:
    """Causal attention of this rank's queries over the keys and values of all ranks up to it."""
    width = q.shape[2]
    end = (rank + 1) * width
    k, v = (_gather(t.contiguous(), 2, group)[:, :, :end] for t in (k, v))
    numbers = documents if documents is not None else q.new_zeros((1, end), dtype=int)
    mask = document_mask(numbers[:, rank * width : end], numbers[:, :end], query_start=rank * width)
    return masked_attention(q, k, v, mask)


def carried_retention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, *, group: Any, rank: int) -> Tensor:
    """What all earlier ranks' positions add to this rank's. The first rank adds zeros: its part in the exchange goes both ways."""
    left = _gather(state_left(k, v, gamma).unsqueeze(0).contiguous(), 0, group)
    gap = rank - 1 - torch.arange(left.shape[0], device=q.device)
    decay = gamma[None] ** (gap.clamp(min=0)[:, None] * q.shape[-2])
    weight = torch.where(gap[:, None] >= 0, decay, 0.0).to(q.dtype)
    return retain_state(q, (left * weight[:, None, :, None, None]).sum(0), gamma)
