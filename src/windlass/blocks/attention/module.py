"""Causal attention with grouped heads; logits equal to those of transformers' Llama, Qwen 3, OLMo, Gemma 3 and
gpt-oss."""

import torch
from torch import Tensor, nn

from windlass.blocks.attention.kernels import (
    AttentionCore,
    Scores,
    block_masked_attention,
    causal_attention,
    weighted_values,
)
from windlass.blocks.attention.logits import raise_largest
from windlass.blocks.attention.rope import Rope
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.base import Block, BlockContext, Table
from windlass.blocks.divide import own_part
from windlass.blocks.linear import Linear, project
from windlass.blocks.norm.module import Norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is (batch, heads, time, head_dim), of which the first numbers are turned, as many as `cos` has; computed in
    fp32, which costs nothing inside a fused kernel."""
    turned, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.float().chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    turned = (turned.float() * cos + crossed * sin).to(x.dtype)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


def rope_table(rope: Rope, start: int, end: int, device: torch.device) -> Table:
    """Cosine and sine, each (positions, turned numbers), halves repeated as in Hugging Face's convention."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    positions = torch.arange(end, dtype=torch.float32, device=device)
    speeds = 1.0 / rope.theta**exponents
    if rope.scaling is not None:
        speeds = speeds * torch.tensor(rope.slowdowns(), dtype=torch.float32, device=device)
    angle = torch.outer(positions, speeds).repeat(1, 2)
    amplitude = 1.0 if rope.scaling is None else rope.scaling.amplitude
    return angle.cos()[start:] * amplitude, angle.sin()[start:] * amplitude


class Attention(Block):
    last_weight = "wo.weight"
    measures_logits = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.head_dim, self.rope = spec.head_dim, spec.rope
        self.table_key: str | None = None if spec.rope is None else repr(spec.rope)
        self.window: int | None = spec.window
        self.scores = Scores(window=spec.window, scale=spec.scale, softcap=spec.softcap)
        self.needs_mask = spec.sinks or spec.softcap > 0
        self.wq = Linear(spec.width, spec.query_width, bias=spec.bias != "none")
        self.wk = Linear(spec.width, spec.kv_width, bias=spec.bias != "none")
        self.wv = Linear(spec.width, spec.kv_width, bias=spec.bias != "none")
        self.wo = Linear(spec.query_width, spec.width, bias=spec.bias == "all")
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        norms = spec.qk_norms
        self.q_norm = None if norms is None else Norm(norms[0])
        self.k_norm = None if norms is None else Norm(norms[1])
        self.norms_heads = spec.qk_norm == "head"
        # The largest logit of each head since `clear_counts`, where the training step gave it a tensor.
        self.max_logits: Tensor | None
        self.register_buffer("max_logits", None, persistent=False)
        # Replaced by another kernel, and by `parallel.py` under context parallelism.
        self.core: AttentionCore = causal_attention

    def make_table(self, start: int, end: int, device: torch.device) -> Table:
        assert self.rope is not None
        return rope_table(self.rope, start, end, device)

    def own_sinks(self) -> Tensor | None:
        """Of the heads that this tensor-parallel rank holds."""
        return None if self.sinks is None else own_part(self.sinks)

    def heads(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and turned queries and keys, and values, each (batch, heads, time, head_dim); a tensor-parallel rank
        holds some heads only."""
        batch, time = x.shape[:2]
        q, k, v = project(x, (self.wq, self.wk, self.wv), self.fused)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.view(batch, time, -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        batch, time = x.shape[:2]
        table = None if self.table_key is None else context.tables[self.table_key]
        cos, sin = (None, None) if table is None else (part[..., :time, :] for part in table)
        mask, heads = context.masks.get(self.scores.window), self.heads(x, cos, sin)
        if self.max_logits is not None:
            raise_largest(self.max_logits, heads[0], heads[1], self.scores, context.documents)
        if mask is None:
            out = self.core(*heads, self.scores, context.documents, self.own_sinks())
        else:
            out = block_masked_attention(*heads, self.scores, mask, self.own_sinks())
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def clear_counts(self) -> None:
        if self.max_logits is not None:
            self.max_logits.fill_(float("-inf"))

    def new_state(self, batch: int, limit: int) -> Tensor:
        """Memory for keys and values of `limit` positions: (2, batch, heads, limit, head_dim)."""
        weight = self.wk.weight
        shape = (2, batch, weight.shape[0] // self.head_dim, limit, self.head_dim)
        # Zeros, not what memory happens to hold: what lies behind the last token is multiplied by a weight of 0.
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def decode(self, x: Tensor, state: Tensor, places: Tensor, start: int | None, table: Table | None) -> Tensor:
        batch, time = x.shape[:2]
        cos, sin = (None, None) if table is None else (part.index_select(0, places) for part in table)
        q, k, v = self.heads(x, cos, sin)
        if start is None:
            state[0].index_copy_(2, places, k)
            state[1].index_copy_(2, places, v)
            distance = places[:, None] - torch.arange(state.shape[3], device=places.device)
            visible = (distance >= 0) & (distance < (self.scores.window or state.shape[3]))
            grouped = q.reshape(batch, state.shape[2], -1, self.head_dim)
            sinks = None if (own := self.own_sinks()) is None else own.view(state.shape[2], -1, 1)
            out = weighted_values(grouped, state[0], state[1], self.scores, visible, sinks)
            return self.wo(out.reshape(batch, 1, -1))
        end = start + time
        state[0, :, :, start:end], state[1, :, :, start:end] = k, v
        keys, values = state[0, :, :, :end], state[1, :, :, :end]
        out = causal_attention(q, keys, values, self.scores, sinks=self.own_sinks(), start=start)
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def state_bytes(self, state: Tensor, position: int) -> int:
        """Of the positions taken so far; the memory for the others is already reserved."""
        return state[..., :position, :].numel() * state.element_size()


BLOCK = Attention
