"""What all optimizers share: parameters with their state, master copies, stochastic rounding, skipped steps.

An optimizer works on each rank's own part of every tensor, whatever the layout. One implementation serves fp32
weights (sharded or not), bf16 weights with an fp32 master copy, and bf16 moments or weights with stochastic rounding.
Clipping and the decision to skip a step are factors inside the update, so gradients are read once and the host never
waits for the device.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from windlass.blocks.initial_values import generator_of, local_tensor
from windlass.config import OptimConfig
from windlass.models.decoder import DecoderModel
from windlass.registry import OPTIMIZERS, import_target
from windlass.train.capture import Replayed
from windlass.train.optimizers.spec import OptimizerSpec

Tensors = list[Tensor]
Rule = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def decays(name: str, parameter: Tensor, undecayed: Collection[str] = DecoderModel.undecayed) -> bool:
    """Weight decay acts on matrices, not on norms, biases or embeddings (`undecayed` lists their names)."""
    return parameter.ndim >= 2 and not name.endswith("bias") and name not in undecayed


@dataclass
class ParameterState:
    """One parameter and what the optimizer keeps for it."""

    name: str
    parameter: nn.Parameter
    # fp32 copy of bf16 weights; None where the parameter itself is updated.
    master: Tensor | None
    moments: dict[str, Tensor]
    decay: float
    # fp32 sum of the micro-batches' gradients, where the parameter's own gradients are bf16.
    main_grad: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        return self.parameter if self.master is None else self.master

    @property
    def gradient(self) -> Tensor | None:
        return self.main_grad if self.main_grad is not None else self.parameter.grad

    def add_gradient(self, parameter: Tensor) -> None:
        """Hook of `parameter`: move its bf16 gradient into the fp32 sum as soon as it is complete."""
        if self.main_grad is not None and parameter.grad is not None:
            local_tensor(self.main_grad).add_(local_tensor(parameter.grad))
            parameter.grad = None


class Optimizer:
    """Base class. A subclass writes `rule`, the update of one tensor, and the numbers that it needs.

    `update_lists` is the same update for all tensors in host memory at once; a subclass may write it with fused list
    operations.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        spec: OptimizerSpec,
        *,
        master: bool = False,
        offload: bool = False,
        undecayed: Collection[str] = DecoderModel.undecayed,
    ) -> None:
        self.config, self.moment_names = config, spec.moments
        host = "cpu" if offload else None
        dtype = torch.bfloat16 if config.moments == "bf16" else torch.float32
        self.slots = [
            ParameterState(
                name,
                parameter,
                parameter.detach().to(torch.float32, copy=True).to(host) if master else None,
                {
                    n: torch.zeros_like(parameter, dtype=dtype, device=host, requires_grad=False)
                    for n in spec.moments_of(name, parameter.shape)
                },
                config.weight_decay if decays(name, parameter, undecayed) else 0.0,
            )
            for name, parameter in named
        ]
        device = torch.device("cpu") if offload or not self.slots else local_tensor(self.slots[0].parameter).device
        # Steps that changed weights; on the device, because only the device knows whether a step was skipped.
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        # Steps requested: what the host knows without waiting.
        self.calls = 0
        # Replaced where a step is captured.
        self.updates: Callable[..., None] = self.update_slots
        self.keep_gradients = False

    # -- written by each optimizer -----------------------------------------------------------------------------------

    def numbers(self, lr: float, scale: Tensor) -> Tensor:
        """Scalars of this step that `rule` reads, as one tensor; `scale` (the gradient factor) is the first."""
        return torch.stack((scale, torch.full_like(scale, lr)))

    def constants(self) -> tuple[float, ...]:
        """Numbers of `rule` that never change during a run."""
        return ()

    @staticmethod
    def rule(
        weights: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], numbers: Tensor, decay: float, *constants: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """New weights and moments of one tensor. All tensors are fp32; the gradient is scaled already."""
        raise NotImplementedError

    def update_lists(
        self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors], decay: list[float], lr: float
    ) -> None:
        """Update fp32 weights and moments in place, in host memory; gradients are scaled already."""
        numbers, constants = self.numbers(lr, torch.ones((), dtype=torch.float32)), self.constants()
        for weight, gradient, state, factor in zip(weights, gradients, zip(*moments, strict=True), decay, strict=True):
            new, new_state = self.rule(weight, gradient, state, numbers, factor, *constants)
            weight.copy_(new)
            for old, value in zip(state, new_state, strict=True):
                old.copy_(value)

    # -- used by the training step -----------------------------------------------------------------------------------

    def accumulate_in_fp32(self) -> None:
        for slot in self.slots:
            slot.main_grad = torch.zeros_like(slot.parameter, dtype=torch.float32, requires_grad=False)
            slot.parameter.register_post_accumulate_grad_hook(slot.add_gradient)

    def replay_updates(self, *, keep_gradients: bool) -> None:
        """Updates as one CUDA graph from the third step on. Gradients must stay where they are: in the graph of the
        passes, or kept and set to zero."""
        if not self.rounds and self.count.is_cuda:
            self.updates, self.keep_gradients = Replayed(self.updates), keep_gradients

    def zero_grad(self) -> None:
        sums = [local_tensor(slot.main_grad) for slot in self.slots if slot.main_grad is not None]
        if self.keep_gradients:
            sums += [local_tensor(grad) for slot in self.slots if (grad := slot.parameter.grad) is not None]
        else:
            for slot in self.slots:
                slot.parameter.grad = None
        if sums:
            torch._foreach_zero_(sums)

    def gradients(self) -> list[Tensor]:
        return [gradient for slot in self.slots if (gradient := slot.gradient) is not None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights into the parameters, after a checkpoint was read into them."""
        for slot in self.slots:
            if slot.master is not None:
                local_tensor(slot.parameter).copy_(local_tensor(slot.master))
        self.calls = int(self.count)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the parameters into the master weights, after they were initialised or loaded."""
        for slot in self.slots:
            if slot.master is not None:
                local_tensor(slot.master).copy_(local_tensor(slot.parameter))

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | float = 1.0, good: Tensor | None = None) -> None:
        """Update with gradients x `scale`; where `good` is false nothing changes."""
        slots = [slot for slot in self.slots if slot.gradient is not None and local_tensor(slot.weights).numel()]
        device = self.count.device
        if device.type == "cpu":
            if good is None or bool(good):
                self.count += 1
                self.step_host(slots, lr, float(scale))
            return
        good = torch.ones((), dtype=torch.bool, device=device) if good is None else good
        self.count += good
        self.calls += 1
        with self.same_noise():
            self.step_device(slots, lr, torch.as_tensor(scale, dtype=torch.float32, device=device), good)

    # -- the two ways to apply an update -----------------------------------------------------------------------------

    def step_host(self, slots: list[ParameterState], lr: float, scale: float) -> None:
        if not slots:  # a pipeline stage without adapters, or a rank with empty shards
            return
        fp32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        weights = [local_tensor(slot.weights).to(**fp32) for slot in slots]
        gradients = [local_tensor(gradient).to(**fp32) for slot in slots if (gradient := slot.gradient) is not None]
        if scale != 1.0:
            gradients = list(torch._foreach_mul(gradients, scale))
        moments = [[local_tensor(slot.moments[name]).to(torch.float32) for slot in slots] for name in self.moment_names]
        self.update_lists(weights, gradients, moments, [slot.decay for slot in slots], lr)
        for index, slot in enumerate(slots):
            for name, values in zip(self.moment_names, moments, strict=True):
                self._store(slot, name, local_tensor(slot.moments[name]), values[index])
            # bf16 weights without a master copy are rounded stochastically, so that small updates survive on average.
            self._store(slot, "weights", local_tensor(slot.weights), weights[index])
            if slot.master is not None:
                local_tensor(slot.parameter).copy_(weights[index])

    def _store(self, slot: ParameterState, kind: str, target: Tensor, value: Tensor) -> None:
        """Rounding is seeded by step and name alone: copies on other ranks and resumed runs round alike."""
        if target.dtype == torch.bfloat16:
            generator = generator_of(f"{int(self.count)}/{slot.name}/{kind}", value.device)
            target.copy_(round_stochastically(value, generator))
        elif target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def step_device(self, slots: list[ParameterState], lr: float, scale: Tensor, good: Tensor) -> None:
        self.updates(self.numbers(lr, scale), good, slots=slots)

    def update_slots(self, numbers: Tensor, good: Tensor, *, slots: list[ParameterState]) -> None:
        update = compiled_update(self.rule)
        for slot in slots:
            update(
                local_tensor(slot.weights).view(-1),
                local_tensor(slot.parameter).view(-1) if slot.master is not None else None,
                local_tensor(cast(Tensor, slot.gradient)).view(-1),
                tuple(local_tensor(slot.moments[name]).view(-1) for name in self.moment_names),
                numbers,
                good,
                slot.decay,
                *self.constants(),
            )

    @property
    def rounds(self) -> bool:
        """Something is rounded at random: moments, or weights without a master copy."""
        dtypes = {local_tensor(slot.weights).dtype for slot in self.slots}
        return self.config.moments == "bf16" or torch.bfloat16 in dtypes

    @contextlib.contextmanager
    def same_noise(self) -> Iterator[None]:
        """Seed the device's random numbers by the step for the time of an update, where something is rounded.

        Ranks must round copies alike, but their generators differ after a restart on another number of ranks.
        """
        if not self.rounds:
            yield
            return
        cuda = self.count.device.type == "cuda"
        with torch.random.fork_rng([self.count.device] if cuda else []):
            (torch.cuda if cuda else torch).manual_seed(self.calls)
            yield


def update_function(rule: Rule) -> Callable[..., None]:
    """The in-place update of one tensor; compiled into one kernel that reads and writes everything once."""

    def update(
        weights: Tensor,
        shadow: Tensor | None,
        gradient: Tensor,
        moments: tuple[Tensor, ...],
        numbers: Tensor,
        good: Tensor,
        decay: float,
        *constants: float,
    ) -> None:
        old, old_moments = weights.float(), tuple(moment.float() for moment in moments)
        new, new_moments = rule(old, gradient.float() * numbers[0], old_moments, numbers, decay, *constants)
        new = torch.where(good, new, old)
        store_rounded(weights, new)
        for moment, before, value in zip(moments, old_moments, new_moments, strict=True):
            store_rounded(moment, torch.where(good, value, before))
        if shadow is not None:
            shadow.copy_(new)

    return update


@cache
def compiled_update(rule: Rule) -> Callable[..., None]:
    return torch.compile(update_function(rule), dynamic=True)


def store_rounded(target: Tensor, value: Tensor) -> None:
    target.copy_(round_stochastically(value) if target.dtype == torch.bfloat16 else value)


def round_stochastically(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 -> bf16, up or down with the probability that keeps the mean: add 16 random low bits, then cut."""
    # A compiled update of any size cannot name a generator, not even None.
    source: dict[str, Any] = {} if generator is None else {"generator": generator}
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, **source)
    bits = (value.view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(value), bits.view(torch.float32), value).to(torch.bfloat16)


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, **options: Any) -> Optimizer:
    spec: OptimizerSpec = OPTIMIZERS.load(config.name)
    optimizer: Optimizer = import_target(spec.update)(named, config, spec, **options)
    return optimizer
