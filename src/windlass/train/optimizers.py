"""How does a step move the weights? AdamW and SGD on each rank's own part of every tensor, whatever the layout.

One implementation serves every case: fp32 weights (sharded or not), bf16 weights with an fp32 master copy, bf16 moments and
bf16 weights with stochastic rounding. Clipping and the decision to skip a step are factors inside the update, so gradients
are read once and the host never waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config import OptimConfig
from windlass.models.init import generator_of
from windlass.models.parts import Model

Named = tuple[str, nn.Parameter]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor is its own."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def decays(name: str, parameter: Tensor, undecayed: Collection[str] = Model.undecayed) -> bool:
    """Weight decay acts on matrices, not on norms, biases or embeddings (whose names the model knows)."""
    return parameter.ndim >= 2 and name not in undecayed


@dataclass
class Slot:
    """One parameter and what the optimizer keeps for it."""

    name: str
    parameter: nn.Parameter
    master: Tensor | None
    """fp32 copy of bf16 weights; None where the parameter itself is the master."""
    moments: dict[str, Tensor]
    decay: float
    main_grad: Tensor | None = None
    """fp32 sum of the micro-batches' gradients, where the parameter's own are bf16."""

    @property
    def weights(self) -> Tensor:
        return self.parameter if self.master is None else self.master

    def gradient(self) -> Tensor | None:
        return self.main_grad if self.main_grad is not None else self.parameter.grad


class Optimizer:
    """Slots for every parameter; `step` is one pass over weights, moments and gradients."""

    moment_names: tuple[str, ...] = ()

    def __init__(
        self,
        named: Iterable[Named],
        config: OptimConfig,
        *,
        master: bool = False,
        offload: bool = False,
        undecayed: Collection[str] = Model.undecayed,
    ) -> None:
        self.config, self.offload, self.undecayed = config, offload, undecayed
        self.slots = [self._slot(name, parameter, master) for name, parameter in named]
        device = torch.device("cpu") if offload or not self.slots else local(self.slots[0].parameter).device
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        """Steps that changed weights; on the device, because only it knows whether a step was skipped."""
        self.calls = 0
        """Steps that were asked for: what the host knows without waiting."""

    def _slot(self, name: str, parameter: nn.Parameter, master: bool) -> Slot:
        where = "cpu" if self.offload else None
        copy = parameter.detach().to(torch.float32, copy=True) if master else None
        if copy is not None and where:
            copy = copy.to(where)
        dtype = torch.bfloat16 if self.config.moments == "bf16" else torch.float32
        made = {
            n: torch.zeros_like(parameter, dtype=dtype, device=where, requires_grad=False) for n in self.moment_names
        }
        decay = self.config.weight_decay if decays(name, parameter, self.undecayed) else 0.0
        return Slot(name, parameter, copy, made, decay)

    def accumulate_in_fp32(self) -> None:
        """Move each micro-batch's bf16 gradient into an fp32 sum as soon as it is complete."""
        for slot in self.slots:
            slot.main_grad = torch.zeros_like(slot.parameter, dtype=torch.float32, requires_grad=False)
            slot.parameter.register_post_accumulate_grad_hook(_move_gradient(slot))

    def zero_grad(self) -> None:
        for slot in self.slots:
            slot.parameter.grad = None
        sums = [local(slot.main_grad) for slot in self.slots if slot.main_grad is not None]
        if sums:
            torch._foreach_zero_(sums)

    def gradients(self) -> list[Tensor]:
        return [g for slot in self.slots if (g := slot.gradient()) is not None]

    def refresh(self) -> None:
        """Weights from the master copy, after a checkpoint was read into it."""
        with torch.no_grad():
            for slot in self.slots:
                if slot.master is not None:
                    local(slot.parameter).copy_(local(slot.master))
        self.calls = int(self.count)

    def adopt(self) -> None:
        """The master copy from the weights, after these were initialised or loaded."""
        with torch.no_grad():
            for slot in self.slots:
                if slot.master is not None:
                    local(slot.master).copy_(local(slot.parameter))

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | float = 1.0, good: Tensor | None = None) -> None:
        """Update with gradients x `scale`; where `good` is false nothing changes."""
        live = [slot for slot in self.slots if slot.gradient() is not None and local(slot.weights).numel()]
        if self.count.device.type == "cpu":
            if good is not None and not bool(good):
                return
            self.count += 1
            self._step_host(live, lr, float(scale))
            return
        good = torch.ones((), dtype=torch.bool, device=self.count.device) if good is None else good
        self.count += good
        self.calls += 1
        with self._same_noise():
            self._step_device(live, lr, torch.as_tensor(scale, dtype=torch.float32, device=self.count.device), good)

    @contextlib.contextmanager
    def _same_noise(self) -> Iterator[None]:
        """Ranks that hold copies must round them alike, but their generators differ after a restart on another number of ranks: for
        the time of an update the noise follows from the step. Host only; nothing waits."""
        device = self.count.device
        kinds = {local(slot.weights).dtype for slot in self.slots}
        if self.config.moments != "bf16" and torch.bfloat16 not in kinds:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            (torch.cuda if device.type == "cuda" else torch).manual_seed(self.calls)
            yield

    def _step_host(self, live: list[Slot], lr: float, scale: float) -> None:
        raise NotImplementedError

    def _step_device(self, live: list[Slot], lr: float, scale: Tensor, good: Tensor) -> None:
        raise NotImplementedError

    def _host_lists(self, live: list[Slot], scale: float) -> tuple[list[Tensor], list[Tensor]]:
        weights = [local(slot.weights) for slot in live]
        gradients = [local(slot.gradient()).to(device="cpu", dtype=torch.float32) for slot in live]
        if scale != 1.0:
            gradients = torch._foreach_mul(gradients, scale)
        return [w.to(device="cpu", dtype=torch.float32) for w in weights], gradients

    def _rounded(self, slot: Slot, what: str, value: Tensor) -> Tensor:
        """At random, by step and name alone: ranks that hold copies round them alike, whatever else they hold, and a resumed run
        goes on bit for bit."""
        return round_stochastically(value, generator_of(f"{int(self.count)}/{slot.name}/{what}", value.device))

    def _store_moment(self, slot: Slot, name: str, new: Tensor) -> None:
        moment = local(slot.moments[name])
        if moment.dtype == torch.bfloat16:
            moment.copy_(self._rounded(slot, name, new))

    def _write_back(self, live: list[Slot], weights: list[Tensor]) -> None:
        """New fp32 weights into master and parameter; bf16 weights without a master are rounded at random, so that small
        updates survive on average."""
        for slot, new in zip(live, weights, strict=True):
            target = local(slot.weights)
            if target.dtype == torch.bfloat16:
                target.copy_(self._rounded(slot, "weights", new))
            elif target.data_ptr() != new.data_ptr():
                target.copy_(new)
            if slot.master is not None:
                local(slot.parameter).copy_(new)


class AdamW(Optimizer):
    moment_names = ("exp_avg", "exp_avg_sq")

    def _step_host(self, live: list[Slot], lr: float, scale: float) -> None:
        c, count = self.config, float(self.count)
        weights, gradients = self._host_lists(live, scale)
        first, second = ([local(s.moments[n]).to(torch.float32) for s in live] for n in self.moment_names)
        torch._foreach_mul_(weights, [1.0 - lr * s.decay for s in live])
        torch._foreach_lerp_(first, gradients, 1.0 - c.beta1)
        torch._foreach_mul_(second, c.beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - c.beta2)
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, math.sqrt(1.0 - c.beta2**count))
        torch._foreach_add_(below, c.eps)
        torch._foreach_addcdiv_(weights, first, below, -lr / (1.0 - c.beta1**count))
        for slot, m, v in zip(live, first, second, strict=True):
            self._store_moment(slot, "exp_avg", m)
            self._store_moment(slot, "exp_avg_sq", v)
        self._write_back(live, weights)

    def _step_device(self, live: list[Slot], lr: float, scale: Tensor, good: Tensor) -> None:
        c, count = self.config, self.count
        numbers = torch.stack((
            scale, lr / (1.0 - c.beta1**count), 1.0 / torch.sqrt(1.0 - c.beta2**count), torch.full_like(count, lr),
        ))  # fmt: skip
        update = _compiled(_adamw_one)
        for slot in live:
            shadow = local(slot.parameter).view(-1) if slot.master is not None else None
            update(
                local(slot.weights).view(-1), shadow, local(slot.gradient()).view(-1), local(slot.moments["exp_avg"]).view(-1),
                local(slot.moments["exp_avg_sq"]).view(-1), numbers, good, c.beta1, c.beta2, c.eps, slot.decay,
            )  # fmt: skip


class SGD(Optimizer):
    moment_names = ("momentum",)

    def _step_host(self, live: list[Slot], lr: float, scale: float) -> None:
        weights, gradients = self._host_lists(live, scale)
        if any(s.decay for s in live):
            torch._foreach_add_(gradients, torch._foreach_mul(weights, [s.decay for s in live]))
        velocity = [local(s.moments["momentum"]).to(torch.float32) for s in live]
        torch._foreach_mul_(velocity, self.config.momentum)
        torch._foreach_add_(velocity, gradients)
        torch._foreach_add_(weights, velocity, alpha=-lr)
        for slot, speed in zip(live, velocity, strict=True):
            self._store_moment(slot, "momentum", speed)
        self._write_back(live, weights)

    def _step_device(self, live: list[Slot], lr: float, scale: Tensor, good: Tensor) -> None:
        update = _compiled(_sgd_one)
        rate = torch.full_like(scale, lr)
        for slot in live:
            shadow = local(slot.parameter).view(-1) if slot.master is not None else None
            update(local(slot.weights).view(-1), shadow, local(slot.gradient()).view(-1), local(slot.moments["momentum"]).view(-1),
                   torch.stack((scale, rate)), good, self.config.momentum, slot.decay)  # fmt: skip


def _adamw_one(w: Tensor, shadow: Tensor | None, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor, good: Tensor,
               beta1: float, beta2: float, eps: float, decay: float) -> None:  # fmt: skip
    """One tensor; compiled into a single kernel that reads and writes everything once."""
    scale, size, inverse_root, lr = numbers.unbind()
    old, m_old, v_old = w.float(), m.float(), v.float()
    grad = g.float() * scale
    m_new = m_old + (grad - m_old) * (1.0 - beta1)
    v_new = v_old * beta2 + grad * grad * (1.0 - beta2)
    new = old * (1.0 - lr * decay) - size * m_new / (torch.sqrt(v_new) * inverse_root + eps)
    new, m_new, v_new = torch.where(good, new, old), torch.where(good, m_new, m_old), torch.where(good, v_new, v_old)
    _store(w, new)
    _store(m, m_new)
    _store(v, v_new)
    if shadow is not None:
        shadow.copy_(new)


def _sgd_one(
    w: Tensor,
    shadow: Tensor | None,
    g: Tensor,
    velocity: Tensor,
    numbers: Tensor,
    good: Tensor,
    momentum: float,
    decay: float,
) -> None:
    scale, lr = numbers.unbind()
    old, before = w.float(), velocity.float()
    speed = before * momentum + g.float() * scale + old * decay
    new = torch.where(good, old - lr * speed, old)
    _store(w, new)
    _store(velocity, torch.where(good, speed, before))
    if shadow is not None:
        shadow.copy_(new)


def _store(target: Tensor, value: Tensor) -> None:
    target.copy_(round_stochastically(value) if target.dtype == torch.bfloat16 else value)


def round_stochastically(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 -> bf16, up or down with the probability that keeps the mean: add 16 random bits below bf16's last one, cut."""
    # A compiled update of any size cannot name a generator, not even None.
    drawn = {} if generator is None else {"generator": generator}
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, **drawn)
    bits = (value.view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(value), bits.view(torch.float32), value).to(torch.bfloat16)


_cache: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _cache:
        _cache[function] = torch.compile(function, dynamic=True)
    return _cache[function]


def build_optimizer(named: Iterable[Named], config: OptimConfig, **options: Any) -> Optimizer:
    """`options` as `Optimizer` takes them."""
    kind = AdamW if config.name == "adamw" else SGD
    return kind(named, config, **options)


def _move_gradient(slot: Slot) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        local(slot.main_grad).add_(local(parameter.grad))
        parameter.grad = None

    return move
