"""RetNet: retention instead of attention, with a decay per head. Three equal forms: parallel, recurrent and chunkwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.models import padded_vocab
from windlass.models.linear import Linear, together
from windlass.models.llama import FeedForward
from windlass.models.parts import Model, Norm
from windlass.models.recompute import Carried, Recomputed

if TYPE_CHECKING:
    from windlass.config import ModelConfig

Table = tuple[Tensor, Tensor, Tensor]
EPS = 1e-6


def decays(heads: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """gamma of each head: 1 - 2^(-5 - h)."""
    return 1 - 2.0 ** (-5 - torch.arange(heads, device=device, dtype=dtype))


def angle_table(seq_len: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (seq_len, head_dim), each frequency for two neighbours."""
    frequency = 10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=device).repeat_interleave(2)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate_every_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float() if x.dtype == torch.bfloat16 else x
    turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
    return (wide * cos + turned * sin).to(x.dtype)


def retain_parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """(Q K^T * D) V with D_nm = gamma^(n-m) for n >= m; q is (batch, heads, time, dim)."""
    return ((q @ k.transpose(-1, -2)) * decay_matrix(q.shape[-2], gamma, q.dtype)) @ v


def decay_matrix(size: int, gamma: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads, size, size), zero above the diagonal."""
    place = torch.arange(size, device=gamma.device)
    distance = place[:, None] - place
    power = gamma[:, None, None] ** distance.clamp(min=0)
    return torch.where(distance >= 0, power, 0.0).to(dtype)


def retain_recurrent(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_n = gamma S_(n-1) + k_n^T v_n, o_n = q_n S_n; the state is what decoding carries from token to token."""
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for n in range(q.shape[-2]):
        state = gamma[:, None, None].to(q.dtype) * state + k[..., n, :, None] * v[..., n, None, :]
        out.append((q[..., n, None, :] @ state).squeeze(-2))
    return torch.stack(out, dim=-2), state


def retain_chunkwise(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, chunk: int) -> Tensor:
    """Parallel inside a chunk; across chunks through the state that each chunk leaves, all chunks at once."""
    time = q.shape[-2]
    if time <= chunk:
        return retain_parallel(q, k, v, gamma)
    if time % chunk:
        pad = (0, 0, 0, chunk - time % chunk)
        return retain_chunkwise(F.pad(q, pad), F.pad(k, pad), F.pad(v, pad), gamma, chunk)[..., :time, :]
    q, k, v = (part.unflatten(-2, (-1, chunk)) for part in (q, k, v))
    inner = ((q @ k.transpose(-1, -2)) * decay_matrix(chunk, gamma, q.dtype)[:, None]) @ v
    return (inner + retain_state(q, _before(state_left(k, v, gamma), gamma**chunk), gamma)).flatten(-3, -2)


def state_left(k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """What a stretch of positions leaves to those after it: (..., dim, value_dim), decayed to the stretch's end."""
    time = k.shape[-2]
    return (k * _decayed(gamma, time - 1 - torch.arange(time, device=k.device), k)).transpose(-1, -2) @ v


def retain_state(q: Tensor, state: Tensor, gamma: Tensor) -> Tensor:
    """What a stretch's queries find in the state that was there before its first position."""
    return (q * _decayed(gamma, 1 + torch.arange(q.shape[-2], device=q.device), q)) @ state


def _decayed(gamma: Tensor, power: Tensor, like: Tensor) -> Tensor:
    """gamma^power for each head and position, to be multiplied with `like` (batch, heads, chunks if any, time, dim)."""
    return (gamma[:, None] ** power).to(like.dtype).view(len(gamma), *(1,) * (like.ndim - 4), -1, 1)


def _before(left: Tensor, gamma: Tensor) -> Tensor:
    """The state before each chunk: sum of what earlier chunks left, decayed; one small product instead of a loop."""
    count = left.shape[2]
    place = torch.arange(count, device=left.device)
    gap = place[:, None] - place - 1
    weight = torch.where(gap >= 0, gamma[:, None, None] ** gap.clamp(min=0), 0.0).to(left.dtype)
    return (weight @ left.flatten(-2)).view(left.shape)


class Retention(nn.Module):
    def __init__(self, width: int, value_width: int, heads: int, form: str, chunk: int) -> None:
        super().__init__()
        self.heads, self.form, self.chunk = heads, form, chunk
        self.key_dim, self.value_dim = width // heads, value_width // heads
        self.first_head = 0
        """Under tensor parallelism a rank holds some heads only, and each head has its own decay."""
        self.wq, self.wk = Linear(width, width), Linear(width, width)
        self.wv, self.wg = Linear(width, value_width), Linear(width, value_width)
        self.wo = Linear(value_width, width)
        self.fused = False
        self.carried: Callable[..., Tensor] | None = None
        """What earlier positions on other ranks add; set by `train.parallelize` under context parallelism."""

    def forward(self, x: Tensor, table: Table, documents: Tensor | None = None) -> Tensor:
        batch, time = x.shape[:2]
        parts = (self.wq, self.wk, self.wv, self.wg)
        q, k, v, gate = together(x, parts) if self.fused else tuple(part(x) for part in parts)
        q, k = (p.view(batch, time, -1, self.key_dim).transpose(1, 2) for p in (q, k))
        v = v.view(batch, time, -1, self.value_dim).transpose(1, 2)
        cos, sin = table[0][:time], table[1][:time]
        gamma = table[2][self.first_head : self.first_head + q.shape[1]]
        q, k = rotate_every_two(q, cos, sin), rotate_every_two(k, cos, sin) * self.key_dim**-0.5
        out = (
            retain_parallel(q, k, v, gamma) if self.form == "parallel" else retain_chunkwise(q, k, v, gamma, self.chunk)
        )
        if self.carried is not None:
            out = out + self.carried(q, k, v, gamma)
        out = self._norm(out).transpose(1, 2).reshape(batch, time, -1)
        return self.wo(F.silu(gate) * out)

    def _norm(self, out: Tensor) -> Tensor:
        """Per head, without weights, in fp32."""
        wide = out.float() if out.dtype == torch.bfloat16 else out
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(out.dtype)


class RetNetBlock(Recomputed):
    def __init__(self, width: int, retention: Retention, ffn: int, activation: str, eps: float) -> None:
        super().__init__()
        self.retention_norm = Norm(width, eps)
        self.retention = retention
        self.ffn_norm = Norm(width, eps)
        self.feed_forward = FeedForward(width, ffn, activation)

    def branches(self, x: Tensor, table: Table, documents: Tensor | None = None) -> Carried:
        x = x + self.retention(self.retention_norm(x), table, documents)
        return x, self.feed_forward(self.ffn_norm(x))


class RetNet(Model):
    tensor_plan = {
        "retention_norm": "norm", "retention": "mixer", "retention.wq": "column", "retention.wk": "column",
        "retention.wv": "column", "retention.wg": "column", "retention.wo": "row", "ffn_norm": "norm", "feed_forward": "ffn",
        "feed_forward.w1": "column", "feed_forward.w2": "row", "feed_forward.w3": "column",
    }  # fmt: skip

    def __init__(self, *, heads: int, key_dim: int, **common: Any) -> None:
        super().__init__(**common)
        self.heads, self.key_dim = heads, key_dim

    def make_table(self, device: torch.device) -> Table:
        cos, sin = angle_table(self.position_start + self.seq_len, self.key_dim, device)
        return cos[self.position_start :], sin[self.position_start :], decays(self.heads, device)

    def divide_heads(self, rank: int, size: int) -> None:
        """Tensor parallelism gave this rank the heads from rank x heads / size on."""
        for block in self.layers.values():
            block.retention.first_head = rank * (self.heads // size)

    def filler(self, name: str) -> Callable[[Tensor, torch.Generator], None]:
        """Retention as torchscale begins it: Xavier with gain 2^-2.5, 2^-1 for the output."""
        if ".retention." not in name:
            return super().filler(name)
        return partial(_xavier, gain=0.5 if name.endswith("wo.weight") else 2**-2.5)


def _xavier(tensor: Tensor, generator: torch.Generator, gain: float) -> None:
    bound = gain * (6.0 / sum(tensor.shape)) ** 0.5
    tensor.uniform_(-bound, bound, generator=generator)


def build_retnet(config: ModelConfig, seq_len: int) -> RetNet:
    values = config.value_width or config.ffn
    blocks: list[nn.Module] = [
        RetNetBlock(
            config.width,
            Retention(config.width, values, config.heads, config.retention, config.chunk),
            config.ffn,
            config.activation,
            config.norm_eps,
        )
        for _ in range(config.layers)
    ]
    return RetNet(
        heads=config.heads, key_dim=config.width // config.heads, width=config.width, rows=padded_vocab(config.vocab),
        vocab=config.vocab, eps=config.norm_eps, seq_len=seq_len, std=config.init_std, blocks=blocks, tied=config.tied,
    )  # fmt: skip
