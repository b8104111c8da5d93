"""The Llama family: grouped-query attention with rotary positions, RMSNorm, SwiGLU; logits equal to transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.models import padded_vocab
from windlass.models.attention import causal_attention
from windlass.models.linear import Linear, together
from windlass.models.parts import Model, Norm
from windlass.models.recompute import Carried, Recomputed

if TYPE_CHECKING:
    from windlass.config import ModelConfig

Rope = tuple[Tensor, Tensor]


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> Rope:
    """Cosine and sine, each (seq_len, head_dim), with the halves repeated as in Hugging Face's convention."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is (batch, heads, time, head_dim); computed in fp32, which costs nothing inside a fused kernel."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(width, heads * head_dim)
        self.wk = Linear(width, kv_heads * head_dim)
        self.wv = Linear(width, kv_heads * head_dim)
        self.wo = Linear(heads * head_dim, width)
        self.core: Callable[..., Tensor] = causal_attention
        """Replaced by `train.parallelize` under context parallelism."""
        self.fused = False
        """One product for queries, keys and values; set by `train.parallelize` on GPUs."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return together(x, (self.wq, self.wk, self.wv)) if self.fused else (self.wq(x), self.wk(x), self.wv(x))

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        batch, time = x.shape[:2]
        # -1 heads: under tensor parallelism a rank holds only some of them.
        q, k, v = (part.view(batch, time, -1, self.head_dim).transpose(1, 2) for part in self.project(x))
        cos, sin = rope[0][:time], rope[1][:time]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.core(q, k, v, documents)
        return self.wo(out.transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, ffn: int, activation: str) -> None:
        super().__init__()
        self.w1 = Linear(width, ffn)
        self.w2 = Linear(ffn, width)
        self.w3 = Linear(width, ffn) if activation == "swiglu" else None
        self.fused = False

    def forward(self, x: Tensor) -> Tensor:
        if self.w3 is None:
            return self.w2(F.gelu(self.w1(x)))
        gate, up = together(x, (self.w1, self.w3)) if self.fused else (self.w1(x), self.w3(x))
        return self.w2(F.silu(gate) * up)


class Block(Recomputed):
    def __init__(self, width: int, attention: Attention, ffn: int, activation: str, eps: float) -> None:
        super().__init__()
        self.attention_norm = Norm(width, eps)
        self.attention = attention
        self.ffn_norm = Norm(width, eps)
        self.feed_forward = FeedForward(width, ffn, activation)

    def branches(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Carried:
        x = x + self.attention(self.attention_norm(x), rope, documents)
        return x, self.feed_forward(self.ffn_norm(x))


class Llama(Model):
    tensor_plan = {
        "attention_norm": "norm", "attention": "mixer", "attention.wq": "column", "attention.wk": "column", "attention.wv": "column",
        "attention.wo": "row", "ffn_norm": "norm", "feed_forward": "ffn", "feed_forward.w1": "column", "feed_forward.w2": "row",
        "feed_forward.w3": "column",
    }  # fmt: skip
    """Role of each part of a block when its layers are divided over a tensor-parallel group."""

    def __init__(self, *, head_dim: int, theta: float, **common: Any) -> None:
        super().__init__(**common)
        self.head_dim, self.theta = head_dim, theta

    def make_table(self, device: torch.device) -> Rope:
        cos, sin = rope_table(self.position_start + self.seq_len, self.head_dim, self.theta, device)
        return cos[self.position_start :], sin[self.position_start :]

    def body(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.embeds and x.shape[1] > self.table[0].shape[0]:
            self.table = rope_table(self.position_start + x.shape[1], self.head_dim, self.theta, x.device)
        return super().body(x, documents)


def build_llama(config: ModelConfig, seq_len: int) -> Llama:
    head_dim = config.head_dim or config.width // config.heads
    blocks: list[nn.Module] = [
        Block(
            config.width,
            Attention(config.width, config.heads, config.kv_heads or config.heads, head_dim),
            config.ffn,
            config.activation,
            config.norm_eps,
        )
        for _ in range(config.layers)
    ]
    return Llama(
        head_dim=head_dim, theta=config.rope_theta, width=config.width, rows=padded_vocab(config.vocab), vocab=config.vocab,
        eps=config.norm_eps, seq_len=seq_len, std=config.init_std, blocks=blocks, tied=config.tied,
    )  # fmt: skip
