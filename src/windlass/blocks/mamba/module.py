"""The Mamba-2 mixer; logits equal to those of transformers' Nemotron-H. Chunks to train, the recurrence to decode."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.blocks.base import Block, BlockContext, Table
from windlass.blocks.divide import LocalParameters
from windlass.blocks.initial_values import Filler, fill_constant
from windlass.blocks.linear import Linear, project
from windlass.blocks.mamba.fused import fused_scan, is_installed
from windlass.blocks.mamba.scan import Incoming, chunked_scan
from windlass.blocks.mamba.spec import MambaSpec


class Convolution(LocalParameters):
    """Causal and of each channel alone, then SiLU, in fp32. Written as a sum of shifted inputs, which compiles to one
    kernel and can leave out positions of other documents."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, near: Tensor | None) -> Tensor:
        """`x` (batch, taps - 1 + time, channels) begins with the positions before the first; `near` has their
        documents and those of the others."""
        weight, taps = self.local(self.weight).float(), self.weight.shape[2]
        time = x.shape[1] - taps + 1
        out = self.local(self.bias).float()
        for tap in range(taps):
            part = x[:, tap : tap + time].float() * weight[:, 0, tap]
            if near is not None and tap < taps - 1:
                part = part * (near[:, tap : tap + time] == near[:, taps - 1 :])[..., None]
            out = out + part
        return F.silu(out).to(x.dtype)


class GatedNorm(LocalParameters):
    """RMSNorm of x * SiLU(gate) within groups of the width."""

    def __init__(self, width: int, group: int, eps: float) -> None:
        super().__init__()
        self.group, self.eps = group, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide: Tensor = (x * F.silu(gate.float())).unflatten(-1, (-1, self.group))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.flatten(-2).to(gate.dtype) * self.local(self.weight)


class Mamba(Block, LocalParameters):
    last_weight = "wo.weight"
    repeats = True

    def __init__(self, spec: MambaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.wz, self.wx = Linear(spec.width, spec.inner), Linear(spec.width, spec.inner)
        self.wb, self.wc = Linear(spec.width, spec.shared), Linear(spec.width, spec.shared)
        self.wt = Linear(spec.width, spec.heads)
        self.wo = Linear(spec.inner, spec.width)
        self.conv_x = Convolution(spec.inner, spec.conv)
        self.conv_b, self.conv_c = Convolution(spec.shared, spec.conv), Convolution(spec.shared, spec.conv)
        self.a_log = nn.Parameter(torch.empty(spec.heads))
        self.d = nn.Parameter(torch.empty(spec.heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.heads))
        self.norm = GatedNorm(spec.inner, spec.inner // spec.groups, spec.norm_eps)
        # Under context parallelism: which stretch of the sequence this is, the last inputs of the convolutions on the
        # rank before, and the state that the ranks before leave. `parallel.py` sets them.
        self.stretch = 0
        self.has_kernels = is_installed()
        self.tail_before: Callable[[Tensor], Tensor] | None = None
        self.incoming: Incoming | None = None

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        near, time, taps = None, x.shape[1], self.spec.conv
        if context.documents is not None:
            start = self.stretch * time
            near = F.pad(context.documents, (taps, 0), value=-1)[:, start + 1 : start + taps + time]
        options = self.projected(x), near, self.tail_before, self.incoming
        if not self.repeats or not torch.is_grad_enabled():
            return self.wo(self.mix(*options)[0])
        # Scores of chunks and states are five times what goes in and out, and cheap to compute again.
        mixed, _, _ = checkpoint(self.mix, *options, use_reentrant=False, preserve_rng_state=False)
        return self.wo(mixed)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return project(x, (self.wz, self.wx, self.wb, self.wc, self.wt), self.fused)

    def mix(
        self,
        projected: tuple[Tensor, ...],
        near: Tensor | None,
        tail_before: Callable[[Tensor], Tensor] | None,
        incoming: Incoming | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the last product multiplies, the last inputs of the convolutions and the state after the last position
        (only where a state came in). `near` has the documents of these positions and of the taps - 1 before them."""
        spec, taps = self.spec, self.spec.conv
        gate, *inputs, steps = projected
        if tail_before is None:
            inputs = [F.pad(part, (0, 0, taps - 1, 0)) for part in inputs]
        else:
            tail = torch.cat([part[:, 1 - taps :] for part in inputs], dim=-1)
            tails = tail_before(tail).split([part.shape[-1] for part in inputs], dim=-1)
            inputs = [torch.cat(both, dim=1) for both in zip(tails, inputs, strict=True)]
        values, write, read = (
            conv(part, near).unflatten(-1, (-1, size))
            for conv, part, size in (
                (self.conv_x, inputs[0], spec.head_dim),
                (self.conv_b, inputs[1], spec.state),
                (self.conv_c, inputs[2], spec.state),
            )
        )
        steps = F.softplus(steps.float() + self.local(self.dt_bias).float()).clamp(min=spec.dt_min)
        decay = -self.local(self.a_log).float().exp()
        if self.has_kernels and values.is_cuda and incoming is None:
            numbers = None if near is None else near[:, taps - 1 :].to(torch.int32).contiguous()
            out, state = fused_scan(values, steps, decay, write, read, spec.chunk, numbers).float(), steps.new_empty(0)
        else:
            documents = None if near is None else near[:, taps - 2 :]
            out, state = chunked_scan(values, steps, decay, write, read, spec.chunk, documents, incoming)
        out = out + values.float() * self.local(self.d).float()[:, None]
        tail = torch.cat([part[:, 1 - taps :] for part in inputs], dim=-1)
        return self.norm(out.flatten(2), gate), tail, state

    def filler(self, name: str, std: float, num_layers: int) -> Filler:
        """As Mamba-2's own: decays of 1 to 16, time steps of dt_min to dt_max on a logarithmic scale."""
        if name == "a_log":
            return fill_decays
        if name == "dt_bias":
            return partial(fill_steps, low=self.spec.dt_min, high=self.spec.dt_max)
        if name in ("d", "norm.weight"):
            return partial(fill_constant, value=1.0)
        if name.startswith("conv_"):
            return partial(fill_uniform, bound=self.spec.conv**-0.5)
        return super().filler(name, std, num_layers)

    def new_state(self, batch: int, limit: int) -> Tensor:
        """The state of each head, then the last inputs of the convolutions, in fp32: what is added at every token must
        not be rounded away."""
        size = self.spec.inner * self.spec.state + (self.spec.conv - 1) * self.spec.channels
        return torch.zeros(batch, size, dtype=torch.float32, device=self.wo.weight.device)

    def decode(self, x: Tensor, state: Tensor, places: Tensor, start: int | None, table: Table | None) -> Tensor:
        spec, batch = self.spec, x.shape[0]
        heads, tail = state.split([spec.inner * spec.state, (spec.conv - 1) * spec.channels], dim=1)
        before = heads.view(batch, spec.groups, -1, spec.head_dim, spec.state)
        tail = tail.view(batch, spec.conv - 1, spec.channels)
        parts = self.projected(x)
        mixed, new_tail, after = self.mix(parts, None, lambda _: tail.to(x.dtype), lambda left, through: before)
        state.copy_(torch.cat((after.flatten(1), new_tail.float().flatten(1)), dim=1))
        return self.wo(mixed)

    def state_bytes(self, state: Tensor, position: int) -> int:
        return state.numel() * state.element_size()


def fill_decays(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.uniform_(1.0, 16.0, generator=generator).log_()


def fill_steps(tensor: Tensor, generator: torch.Generator, low: float, high: float) -> None:
    """What softplus turns into time steps between `low` and `high`."""
    steps = tensor.uniform_(math.log(low), math.log(high), generator=generator).exp()
    tensor.copy_(steps + torch.log(-torch.expm1(-steps)))


def fill_uniform(tensor: Tensor, generator: torch.Generator, bound: float) -> None:
    tensor.uniform_(-bound, bound, generator=generator)


BLOCK = Mamba
