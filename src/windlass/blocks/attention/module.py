"""Causal attention with rotary positions and grouped heads; logits equal to transformers' Llama."""

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.blocks.attention.kernels import AttentionCore, causal_attention
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.base import Block, BlockContext, Table
from windlass.blocks.linear import Linear, project


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is (batch, heads, time, head_dim); computed in fp32, which costs nothing inside a fused kernel."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(Block):
    last_weight = "wo.weight"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.head_dim, self.theta = spec.head_dim, spec.rope_theta
        self.table_key: str = f"rope-{spec.head_dim}-{spec.rope_theta}"
        self.wq = Linear(spec.width, spec.query_width)
        self.wk = Linear(spec.width, spec.kv_width)
        self.wv = Linear(spec.width, spec.kv_width)
        self.wo = Linear(spec.query_width, spec.width)
        # Replaced by another kernel, and by `parallel.py` under context parallelism.
        self.core: AttentionCore = causal_attention

    def make_table(self, start: int, end: int, device: torch.device) -> Table:
        """Cosine and sine, each (positions, head_dim), halves repeated as in Hugging Face's convention."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        positions = torch.arange(end, dtype=torch.float32, device=device)
        angle = torch.outer(positions, 1.0 / self.theta**exponents).repeat(1, 2)
        return angle.cos()[start:], angle.sin()[start:]

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (batch, heads, time, head_dim); a tensor-parallel rank holds some heads
        only."""
        batch, time = x.shape[:2]
        parts = project(x, (self.wq, self.wk, self.wv), self.fused)
        return tuple(part.view(batch, time, -1, self.head_dim).transpose(1, 2) for part in parts)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        batch, time = x.shape[:2]
        q, k, v = self.heads(x)
        cos, sin = (part[:time] for part in context.tables[self.table_key])
        out = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v, context.documents)
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def new_state(self, batch: int, limit: int) -> Tensor:
        """Memory for keys and values of `limit` positions: (2, batch, heads, limit, head_dim)."""
        weight = self.wk.weight
        shape = (2, batch, weight.shape[0] // self.head_dim, limit, self.head_dim)
        # Zeros, not what memory happens to hold: what lies behind the last token is multiplied by a weight of 0.
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def decode(self, x: Tensor, state: Tensor, places: Tensor, start: int | None, table: Table | None) -> Tensor:
        assert table is not None
        batch, time = x.shape[:2]
        q, k, v = self.heads(x)
        cos, sin = (part.index_select(0, places) for part in table)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if start is None:
            state[0].index_copy_(2, places, k)
            state[1].index_copy_(2, places, v)
            q = q.reshape(batch, state.shape[2], -1, self.head_dim)
            scores = (q @ state[0].transpose(-1, -2)).float() * self.head_dim**-0.5
            past = torch.arange(state.shape[3], device=places.device) <= places
            weights = scores.masked_fill(~past, float("-inf")).softmax(-1).to(x.dtype)
            return self.wo((weights @ state[1]).reshape(batch, 1, -1))
        end = start + time
        state[0, :, :, start:end], state[1, :, :, start:end] = k, v
        keys, values = state[0, :, :, :end], state[1, :, :, :end]
        mask = torch.arange(end, device=x.device) <= places[:, None] if start and time > 1 else None
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=start == 0 and time > 1, enable_gqa=q.shape[1] != keys.shape[1]
        )
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def state_bytes(self, state: Tensor, position: int) -> int:
        """Of the positions taken so far; the memory for the others is already reserved."""
        return state[..., :position, :].numel() * state.element_size()


BLOCK = Attention
