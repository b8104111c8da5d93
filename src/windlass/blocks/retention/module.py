"""RetNet's retention, with a decay per head. Equal forms: parallel and chunkwise to train, recurrent to decode."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.blocks.base import Block, BlockContext, Table
from windlass.blocks.initial_values import Filler, fill_xavier
from windlass.blocks.linear import Linear, project
from windlass.blocks.retention.spec import RetentionSpec

EPS = 1e-6


def decays(heads: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """gamma of each head: 1 - 2^(-5 - h)."""
    return 1 - 2.0 ** (-5 - torch.arange(heads, device=device, dtype=dtype))


def angles_at(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (places, head_dim), each frequency for two neighbours."""
    frequency = 10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=places.device).repeat_interleave(2)
    angle = torch.outer(places.float(), frequency)
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
    # The state before each chunk: the sum of what earlier ones left, decayed; one small product instead of a loop.
    left = state_left(k, v, gamma)
    weight = F.pad(decay_matrix(left.shape[2], gamma**chunk, left.dtype)[:, :-1], (0, 0, 1, 0))
    before = (weight @ left.flatten(-2)).view(left.shape)
    return (inner + retain_state(q, before, gamma)).flatten(-3, -2)


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


class Retention(Block):
    prefill_chunk: int | None = 512  # a long prompt is decoded in chunks, so that memory does not grow with it

    def __init__(self, spec: RetentionSpec) -> None:
        super().__init__()
        self.heads, self.chunk = spec.heads, spec.chunk
        self.key_dim, self.value_dim = spec.width // spec.heads, spec.value_width // spec.heads
        self.table_key: str = f"retention-{self.heads}-{self.key_dim}"
        self.first_head = 0  # under tensor parallelism a rank holds some heads only, and each has its own decay
        self.wq, self.wk = Linear(spec.width, spec.width), Linear(spec.width, spec.width)
        self.wv, self.wg = Linear(spec.width, spec.value_width), Linear(spec.width, spec.value_width)
        self.wo = Linear(spec.value_width, spec.width)
        # What earlier positions on other ranks add; `parallel.py` sets it under context parallelism.
        self.carried: Callable[..., Tensor] | None = None

    def make_table(self, start: int, end: int, device: torch.device) -> Table:
        cos, sin = angles_at(torch.arange(end, device=device), self.key_dim)
        return cos[start:], sin[start:], decays(self.heads, device)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        batch, time = x.shape[:2]
        q, k, v, gate = project(x, (self.wq, self.wk, self.wv, self.wg), self.fused)
        q, k = (part.view(batch, time, -1, self.key_dim).transpose(1, 2) for part in (q, k))
        v = v.view(batch, time, -1, self.value_dim).transpose(1, 2)
        table = context.tables[self.table_key]
        cos, sin = table[0][:time], table[1][:time]
        gamma = table[2][self.first_head : self.first_head + q.shape[1]]
        q, k = rotate_every_two(q, cos, sin), rotate_every_two(k, cos, sin) * self.key_dim**-0.5
        out = retain_chunkwise(q, k, v, gamma, self.chunk) if self.chunk else retain_parallel(q, k, v, gamma)
        if self.carried is not None:
            out = out + self.carried(q, k, v, gamma)
        out = self.head_norm(out).transpose(1, 2).reshape(batch, time, -1)
        return self.wo(F.silu(gate) * out)

    def head_norm(self, out: Tensor) -> Tensor:
        """Per head, without weights, in fp32."""
        wide = out.float() if out.dtype == torch.bfloat16 else out
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(out.dtype)

    def filler(self, name: str, std: float, num_layers: int) -> Filler:
        """As torchscale does: Xavier with gain 2^-2.5, 2^-1 for the output."""
        return partial(fill_xavier, gain=0.5 if name == "wo.weight" else 2**-2.5)

    def new_state(self, batch: int, limit: int) -> Tensor:
        # In fp32 whatever the weights are: what is added at every token must not be rounded away.
        shape = (batch, self.heads, self.key_dim, self.value_dim)
        return torch.zeros(shape, dtype=torch.float32, device=self.wq.weight.device)

    def decode(self, x: Tensor, state: Tensor, places: Tensor, start: int | None, table: Table | None) -> Tensor:
        """The state after the new tokens replaces the one before them; the kernels do not depend on the places."""
        batch, time = x.shape[:2]
        both = torch.stack((self.wq(x), self.wk(x))).view(2, batch, time, -1, self.key_dim)
        q, k = rotate_every_two(both.transpose(2, 3), *angles_at(places, self.key_dim)).float()
        v = self.wv(x).view(batch, time, -1, self.value_dim).transpose(1, 2).float()
        assert table is not None
        retain = retain_one if time == 1 else retain_from
        out = retain(q, k * self.key_dim**-0.5, v, table[2], state)
        out = self.head_norm(out).to(x.dtype).transpose(1, 2).reshape(batch, time, -1)
        return self.wo(F.silu(self.wg(x)) * out)

    def state_bytes(self, state: Tensor, position: int) -> int:
        return state.numel() * state.element_size()


def retain_from(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> Tensor:
    """Retention of some tokens after a state, which becomes the state after them: the recurrence, all tokens at
    once."""
    out = retain_parallel(q, k, v, gamma) + retain_state(q, state, gamma)
    state.mul_(gamma[:, None, None] ** q.shape[-2]).add_(state_left(k, v, gamma))
    return out


def retain_one(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> Tensor:
    """The same for a single token, in three kernels: at that size the time goes into starting them."""
    state.mul_(gamma[:, None, None]).addcmul_(k.transpose(-1, -2), v)
    return q @ state


BLOCK = Retention
