"""What is one optimizer step? Forward and backward over the micro-batches, one reduction of loss and norm, clip, guard, update.

Nothing here waits for the device: clipping, the decision to skip and the numbers for the log stay tensors until they are read back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.train.clock import Mark, mark, seconds_between
from windlass.train.geometry import Geometry
from windlass.train.guard import Guard
from windlass.train.mesh import World
from windlass.train.optimizers.base import Optimizer, local
from windlass.train.parallelize import Parts, bind_pipeline, choose_sync, set_sync


@dataclass
class StepResult:
    """Numbers of a step, still on the device: loss, gradient norm, reason not to update (0: none), auxiliary loss."""

    values: Tensor
    lr: float
    forward: Any
    """Seconds of the forward passes, or the pair of events around the first one: before any reduction, so a slow rank shows."""


class Stepper:
    def __init__(
        self,
        parts: Parts,
        optimizer: Optimizer,
        recipe: Recipe,
        world: World,
        geometry: Geometry,
        beat: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.parts, self.optimizer, self.recipe, self.world, self.geometry = parts, optimizer, recipe, world, geometry
        self.sync = choose_sync(recipe, geometry.micro_batches)
        self.guard = Guard(recipe.train, world.device)
        self.scale = 1.0 / geometry.tokens_per_step
        self._sums: list[Tensor] = []
        self.schedule = bind_pipeline(parts, recipe, world, geometry.micro_batches, self._pipeline_loss)
        # The last stage would keep its outputs of all micro-batches; older releases of torch do not know the word.
        known = self.schedule is not None and "return_outputs" in inspect.signature(self.schedule.step).parameters
        self._no_outputs = {"return_outputs": False} if known else {}
        self.replication = [replication(p, world) for _, p in parts.named_parameters()]
        if world.size == 1 and recipe.train.precision != "fp32" and geometry.micro_batches > 1:
            optimizer.accumulate_in_fp32()
        self.beat = beat
        """Called at each phase, so that the watchdog can say how far this rank came."""

    def step(self, tokens: Tensor, documents: Tensor | None, lr: float) -> StepResult:
        """One optimizer step on this rank's sequences (n, seq_len + 1)."""
        forward = self.gradients(tokens, documents)
        self.beat("reduce")
        values = self._reduce()
        self.beat("update")
        norm = values[1]
        clip = self.recipe.optim.clip
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0) if clip else torch.ones_like(norm)
        reason = self.guard.judge(values[0], norm)
        self.optimizer.step(lr, scale, reason == 0)
        self.optimizer.zero_grad()
        if self.parts.tie is not None:
            self.parts.tie.spread()
        return StepResult(torch.stack((values[0], norm, reason.to(values.dtype), values[2])), lr, forward)

    def gradients(self, tokens: Tensor, documents: Tensor | None) -> Any:
        """Gradients of the whole batch's mean loss, summed over this rank's micro-batches (and over ranks by the sharding)."""
        self._sums.clear()
        inputs, targets, numbers = cut(tokens, documents, self.world)
        if self.schedule is not None:
            return self._pipeline(inputs, targets, numbers)
        module, count = self.parts.modules[0], self.geometry.micro_batches
        watch = Stopwatch(self.world.device)
        for index in range(count):
            part = slice(index * self.geometry.micro_batch, (index + 1) * self.geometry.micro_batch)
            set_sync(module, self.sync, index == count - 1)
            self.beat("forward")
            watch.start()
            out = module(inputs[part], targets[part], None if numbers is None else numbers[part])
            watch.stop()
            self._sums.append(out.detach())
            self.beat("backward")
            (out[0] * self.scale).backward()
        return watch

    def _pipeline(self, inputs: Tensor, targets: Tensor, numbers: Tensor | None) -> Any:
        self.schedule.step(*self._first(inputs), **self._extra(targets, numbers), **self._no_outputs)
        self._forget_trial()
        if self.parts.tie is not None:
            self.parts.tie.collect()
        return None

    def _forget_trial(self) -> None:
        """Before its first batch a schedule runs a stage once to learn its shapes; that loss is not of the batch."""
        del self._sums[: -self.geometry.micro_batches]

    def pipeline_sums(self, inputs: Tensor, targets: Tensor, numbers: Tensor | None) -> Tensor:
        """Loss sums of a batch without gradients; zero on ranks that do not hold the last stage."""
        self._sums.clear()
        self.schedule.eval(*self._first(inputs), **self._extra(targets, numbers), **self._no_outputs)
        self._forget_trial()
        return torch.stack(self._sums).sum(0) if self._sums else torch.zeros(2, device=self.world.device)

    def _first(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs,) if 0 in self.parts.stages else ()

    def _extra(self, targets: Tensor, numbers: Tensor | None) -> dict[str, Tensor]:
        """Every stage gets the document numbers; the one with the head also the targets, as input and for torch's own loss call."""
        extra = {} if numbers is None else {"documents": numbers}
        if self.parts.num_stages - 1 in self.parts.stages:
            extra |= {"targets": targets, "target": targets}
        return extra

    def _pipeline_loss(self, out: Tensor, target: Tensor) -> Tensor:
        self._sums.append(out.detach())
        return out[0] * self.scale

    def _reduce(self) -> Tensor:
        """(loss, gradient norm, auxiliary loss) over all ranks by one reduction of three numbers."""
        gradients = self.optimizer.gradients()
        square = norm_square(gradients, self.replication, self.world.device)
        sums = (
            torch.stack(self._sums).sum(0) * self.scale
            if self._sums and self.world.counts_loss
            else torch.zeros(2, device=self.world.device)
        )
        total = self.world.sum_(torch.stack((sums[1], square, sums[0] - sums[1])))
        return torch.stack((total[0], total[1].sqrt(), total[2]))


def cut(tokens: Tensor, documents: Tensor | None, world: World) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs and targets, one apart; under context parallelism only this rank's positions of them."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    numbers = None if documents is None else documents[:, :-1]
    if world.axes.context > 1:
        width = inputs.shape[1] // world.axes.context
        part = slice(world.context_rank * width, (world.context_rank + 1) * width)
        inputs, targets = inputs[:, part], targets[:, part]
    return inputs, targets, numbers


def replication(parameter: Tensor, world: World) -> float:
    """How many ranks of the job hold the same numbers of this parameter's gradient."""
    parts = world.axes.pipeline
    if hasattr(parameter, "placements"):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                parts *= parameter.device_mesh.size(axis)
    return world.size / parts


def norm_square(gradients: list[Tensor], copies: list[float], device: torch.device) -> Tensor:
    """This rank's share of the squared gradient norm: each number counts once over all ranks that hold it."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for count in sorted(set(copies)):
        group = [local(g) for g, c in zip(gradients, copies, strict=True) if c == count and local(g).numel()]
        if group:
            norms = torch.stack(torch._foreach_norm(group, 2, dtype=torch.float32))
            total = total + norms.to(device).square().sum() / count
    return total


class Stopwatch:
    """Time of the forward passes; on a GPU by events, which are read long after."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[Mark, Mark]] = []
        self._begin: Mark = 0.0

    def start(self) -> None:
        self._begin = mark(self.cuda)

    def stop(self) -> None:
        self.spans.append((self._begin, mark(self.cuda)))

    def seconds(self) -> float:
        return sum(seconds_between(begin, end) for begin, end in self.spans)
