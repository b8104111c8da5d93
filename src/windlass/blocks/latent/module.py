"""Multi-head latent attention; logits equal to those of transformers' DeepSeek V2 and V3.

Decoding keeps the narrow vectors instead of keys and values, and makes keys and values again for each token."""

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.blocks.attention.kernels import (
    AttentionCore,
    Scores,
    block_masked_attention,
    causal_attention,
    weighted_values,
)
from windlass.blocks.attention.module import rope_table
from windlass.blocks.base import Block, BlockContext, Table
from windlass.blocks.divide import own_copy, own_part
from windlass.blocks.latent.spec import LatentSpec
from windlass.blocks.linear import Linear
from windlass.blocks.norm.module import Norm


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring numbers are a pair. The turned pairs come out as halves: the same order in queries and keys does not
    change their products."""
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = (part[..., : part.shape[-1] // 2] for part in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class LatentAttention(Block):
    last_weight = "wo.weight"
    table_key: str  # it always turns some numbers

    def __init__(self, spec: LatentSpec) -> None:
        super().__init__()
        assert spec.rope is not None
        self.rope, self.table_key = spec.rope, repr(spec.rope)
        self.sizes = (spec.head_dim - spec.rope_dim, spec.rope_dim, spec.value_dim)
        self.kv_rank, self.head_dim = spec.kv_rank, spec.head_dim
        self.window: int | None = 0
        self.scores = Scores(scale=spec.scale, softcap=spec.softcap)
        self.needs_mask = spec.softcap > 0
        kv_norm, q_norm = spec.norms
        self.wq = Linear(spec.width, spec.query_width) if q_norm is None else None
        self.wq_down = None if q_norm is None else Linear(spec.width, spec.q_rank)
        self.q_norm = None if q_norm is None else Norm(q_norm)
        self.wq_up = None if q_norm is None else Linear(spec.q_rank, spec.query_width)
        self.wkv_down = Linear(spec.width, spec.kv_rank + spec.rope_dim)
        self.kv_norm = Norm(kv_norm)
        self.wkv = Linear(spec.kv_rank, spec.expanded_width)
        self.wo = Linear(spec.value_width, spec.width)
        # Replaced by another kernel, and by `parallel.py` under context parallelism.
        self.core: AttentionCore = causal_attention
        # Brings what keys and values are made from together over context ranks; `parallel.py` sets it.
        self.share: Callable[[Tensor], Tensor] = lambda narrow: narrow

    def make_table(self, start: int, end: int, device: torch.device) -> Table:
        return rope_table(self.rope, start, end, device)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, heads, time, head_dim); a tensor-parallel rank holds some heads only."""
        if self.wq_down is None or self.q_norm is None or self.wq_up is None:
            assert self.wq is not None
            q = self.wq(x)
        else:
            q = self.wq_up(self.q_norm(self.wq_down(x)))
        plain, turned = q.unflatten(-1, (-1, self.head_dim)).split(self.sizes[:2], dim=-1)
        turned = rotate_pairs(turned.transpose(1, 2), cos, sin).transpose(1, 2)
        # Heads of one position lie side by side, and so does what the kernel returns: the last product needs no copy.
        return torch.cat((plain, turned), dim=-1).transpose(1, 2)

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The vector that keys and values are made from, and the keys' turned numbers, each (batch, time, numbers)."""
        narrow, turned = self.wkv_down(x).split((self.kv_rank, self.sizes[1]), dim=-1)
        # Of the turned numbers each tensor-parallel rank has a part of the gradient: that of its heads.
        turned = rotate_pairs(own_copy(turned).unsqueeze(1), cos, sin).squeeze(1)
        return own_part(self.kv_norm(narrow)), turned

    def keys_and_values(self, narrow: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.wkv(narrow).unflatten(-1, (-1, self.sizes[0] + self.sizes[2]))
        plain, values = heads.split((self.sizes[0], self.sizes[2]), dim=-1)
        keys = torch.cat((plain, turned.unsqueeze(2).expand(-1, -1, plain.shape[2], -1)), dim=-1)
        # A copy: the backward pass would keep the part of the keys that lies beside the values.
        return keys.transpose(1, 2), values.contiguous().transpose(1, 2)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        batch, time = x.shape[:2]
        cos, sin = (part[..., :time, :] for part in context.tables[self.table_key])
        narrow, turned = (self.share(part) for part in self.latents(x, cos, sin))
        heads = self.queries(x, cos, sin), *self.keys_and_values(narrow, turned)
        mask = context.masks.get(0)
        if mask is None:
            out = self.core(*heads, self.scores, context.documents, None)
        else:
            out = block_masked_attention(*heads, self.scores, mask)
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def new_state(self, batch: int, limit: int) -> Tensor:
        """Memory for the narrow vectors and the keys' turned numbers of `limit` positions."""
        weight = self.wkv_down.weight
        return torch.zeros((batch, limit, weight.shape[0]), dtype=weight.dtype, device=weight.device)

    def decode(self, x: Tensor, state: Tensor, places: Tensor, start: int | None, table: Table | None) -> Tensor:
        assert table is not None
        batch, time = x.shape[:2]
        cos, sin = (part.index_select(0, places) for part in table)
        q = self.queries(x, cos, sin)
        state.index_copy_(1, places, torch.cat(self.latents(x, cos, sin), dim=-1))
        end = state.shape[1] if start is None else start + time
        k, v = self.keys_and_values(*state[:, :end].split((self.kv_rank, self.sizes[1]), dim=-1))
        if start is None:
            visible = places[:, None] >= torch.arange(end, device=places.device)
            out = weighted_values(q, k, v, self.scores, visible)
        else:
            out = causal_attention(q, k, v, self.scores, start=start)
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def state_bytes(self, state: Tensor, position: int) -> int:
        """Of the positions taken so far; the memory for the others is already reserved."""
        return state[:, :position].numel() * state.element_size()


BLOCK = LatentAttention
