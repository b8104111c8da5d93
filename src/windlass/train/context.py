"""How do ranks share one long sequence? Each holds a stretch of positions; keys and values are gathered, queries stay.

torch's own context parallelism knows only CUDA's attention operators, so this is ours: it runs on any device and over gloo. The
stretches are contiguous, so the last rank attends to more keys than the first; the planner counts that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from windlass.errors import ConfigError
from windlass.models.attention import document_mask
from windlass.models.parts import Model
from windlass.train.mesh import World


def apply_context(module: Model, world: World) -> None:
    """Tell the model where its stretch begins, and its attention how to reach the rest."""
    rank, size = world.context_rank, world.axes.context
    module.whole_mask = False
    module.position_start = rank * (module.seq_len // size)
    for block in module.layers.values():
        if not hasattr(block, "attention") or not hasattr(block.attention, "core"):
            raise ConfigError(
                "layout.context > 1 works with attention only, not with this model family",
                hint="set layout.context = 1",
            )
        block.attention.core = partial(gathered_attention, group=world.context_group(), rank=rank)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, group: Any, rank: int) -> Tensor:
    """Causal attention of this rank's queries over the keys and values of all ranks up to it."""
    width = q.shape[2]
    end = (rank + 1) * width
    k, v = (collectives.all_gather_tensor_autograd(t.contiguous(), 2, group)[:, :, :end] for t in (k, v))
    numbers = documents if documents is not None else q.new_zeros((1, end), dtype=int)
    mask = document_mask(numbers[:, rank * width : end], numbers[:, :end], query_start=rank * width)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
