"""One optimizer step: forward and backward over the micro-batches, one reduction of loss and norm, clip, guard, update.

Nothing here waits for the device: clipping, the decision to skip and the numbers for the log stay tensors until they
are read back."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from windlass.blocks.head.preference import FURTHER_MEANS
from windlass.blocks.initial_values import local_tensor
from windlass.config import Recipe
from windlass.layout.types import StepSpec
from windlass.train.batches import Batch, BatchPlan, ExampleBatch, MicroBatch, TokenBatch
from windlass.train.capture import Replayed, ReplayedByShape, obstacle
from windlass.train.guard import Guard
from windlass.train.instruments import AttentionLogits, Instruments, QKClip
from windlass.train.mesh import World
from windlass.train.optimizers.base import Optimizer
from windlass.train.parallelize import ModelParts, set_sync
from windlass.train.pipeline import Pipeline
from windlass.train.routers import Routers
from windlass.train.targets import TargetMaker

# Values of a gradient from which on a kernel of its own is faster.
LARGE = 2**24
# A moment, at no cost while training: an event on a GPU, which is read later; elsewhere seconds of the host's clock.
Mark = torch.cuda.Event | float


@dataclass
class StepResult:
    """Numbers of a step, still on the device: loss, gradient norm, reason not to update (0: none), auxiliary loss; with
    experts also those of `Routers.finish`."""

    values: Tensor
    lr: float
    # Begin and end of each forward pass: before any reduction, so that a slow rank shows. None in a pipeline, and where
    # the passes are a CUDA graph.
    forward: list[tuple[Mark, Mark]] | None
    # How long the step waited for its batch.
    data_seconds: float = 0.0
    # Rows of each expert in the batch (layers with experts, experts), and the numbers of these layers.
    expert_loads: Tensor | None = None
    expert_layers: Sequence[int] = ()
    # What `Instruments.finish` measured, in a step that was asked for it.
    layers: Tensor | None = None
    # Names of further means that the objective reports, at the end of `values`.
    further: tuple[str, ...] = ()

    def forward_seconds(self) -> float | None:
        """On a GPU only when the step is done: its events are read long after."""
        return None if self.forward is None else sum(seconds_between(*span) for span in self.forward)


class Stepper:
    def __init__(
        self,
        parts: ModelParts,
        optimizer: Optimizer,
        recipe: Recipe,
        spec: StepSpec,
        world: World,
        plan: BatchPlan,
        beat: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.parts, self.optimizer, self.world, self.plan, self.spec = parts, optimizer, world, plan, spec
        self.clip = recipe.optim.clip
        # Of a sum over tokens in the loss; set for each batch.
        self.scale: float | Tensor = 1.0 / plan.tokens_per_step
        self.targets = TargetMaker(recipe, world, parts.modules[0].vocab)
        self.further = FURTHER_MEANS if recipe.task == "prefer" else ()
        self.guard = Guard(recipe.train, world.device)
        self._sums: list[Tensor] = []
        self.pipeline = None if parts.num_stages == 1 else Pipeline(parts, world, lambda sums: sums[0] * self.scale)
        self.tie = parts.tie if parts.tie is not None and parts.tie.is_trained else None
        self.routers = Routers(parts, world, 1.0 / plan.tokens_per_step)
        self.replication = [replication(p, world) for _, p in parts.named_parameters()]
        train, qk_clip = recipe.train, recipe.optim.qk_clip
        self.logits = AttentionLogits(parts, world) if train.instruments or qk_clip else None
        self.qk_clip = QKClip(self.logits, optimizer, qk_clip) if self.logits is not None and qk_clip else None
        if self.logits is not None and self.qk_clip is not None:
            self.logits.attach()
        self.instruments = Instruments(parts, optimizer, world, self.replication) if train.instruments else None
        if world.size == 1 and spec.precision != "fp32" and plan.layout.accumulation > 1:
            optimizer.accumulate_in_fp32()
        # Called at each phase, so that the watchdog can say how far this rank came.
        self.beat = beat
        self.replayed: Replayed | None = None
        self.replayed_pass: ReplayedByShape | None = None
        if recipe.train.capture:
            reason = obstacle(recipe, spec, world)
            parts.notes.append(
                f"capture: {'forward, backward and update are replayed as CUDA graphs' if not reason else f'off, {reason}'}"
            )
            if reason is None:
                self.replayed = Replayed(self._passes_and_gradients)
                optimizer.replay_updates(keep_gradients=False)
        elif recipe.reads_examples and world.size == 1:
            # Passes over a few short texts end before the host has launched the updates of two hundred tensors.
            optimizer.replay_updates(keep_gradients=True)
            if optimizer.keep_gradients and spec.recompute == "none":
                self.replayed_pass = ReplayedByShape(self._pass)

    def step(self, batch: Batch, lr: float, *, measure: bool = False) -> StepResult:
        """One optimizer step on this rank's part of a batch; `measure`: look at every layer."""
        instruments = self.instruments if measure else None
        if instruments is not None and self.logits is not None:
            instruments.begin()
            self.logits.attach()
        forward = self.gradients(batch)
        self.beat("reduce")
        (loss, norm, auxiliary), further, routed = self._reduce()
        self.beat("update")
        scale = torch.clamp(self.clip / (norm + 1e-6), max=1.0) if self.clip else torch.ones_like(norm)
        reason = self.guard.judge(loss, norm)
        if instruments is not None:
            instruments.before_update()
        self.optimizer.step(lr, scale, reason == 0)
        self.optimizer.zero_grad()
        layers = None
        if self.logits is not None and (self.qk_clip is not None or instruments is not None):
            largest = self.logits.largest()
            if self.qk_clip is not None:
                self.qk_clip.apply(largest, reason == 0)
            if instruments is not None:
                layers = instruments.finish(largest)
            if self.qk_clip is None:
                self.logits.detach()
        routing, loads = self.routers.finish(routed, reason == 0)
        if self.tie is not None:
            self.tie.spread()
        values = torch.stack((loss, norm, reason.to(loss.dtype), auxiliary, *routing, *further))
        return StepResult(
            values,
            lr,
            forward,
            expert_loads=loads,
            expert_layers=self.routers.layers,
            layers=layers,
            further=self.further,
        )

    def gradients(self, batch: Batch) -> list[tuple[Mark, Mark]] | None:
        """Gradients of the batch's mean loss, summed over this rank's micro-batches (and over ranks by the sharding);
        returns the times of the forward passes."""
        if self.replayed is None:
            return self._run_passes(batch)
        self.beat("forward")
        self._sums[:], gradients = self.replayed(cast(TokenBatch, batch).tokens)
        for slot, gradient in zip(self.optimizer.slots, gradients, strict=True):
            slot.parameter.grad = gradient
        return None

    def _passes_and_gradients(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        self._run_passes(TokenBatch(tokens))
        return list(self._sums), [slot.parameter.grad for slot in self.optimizer.slots]

    def _run_passes(self, batch: Batch) -> list[tuple[Mark, Mark]] | None:
        self._sums.clear()
        self.routers.clear()
        if self.logits is not None:
            self.logits.clear()
        if isinstance(batch, ExampleBatch):
            self.scale = 1.0 / batch.counted
            if self.replayed_pass is None:
                return self._run_micro_batches(batch.micro_batches)
            self.beat("forward")
            scale = torch.full((), self.scale, device=self.world.device)
            self._sums += [self.replayed_pass(*inputs, scale) for inputs in batch.micro_batches]
            return None
        self.routers.set_scale(1.0 / (len(batch.tokens) * self.world.layout.data * self.plan.seq_len))
        # The count of updates is part of a checkpoint, and the same on every rank.
        part = self.targets.make(batch, self.optimizer.count.long())
        self.scale = self.targets.scale(batch, part)
        if self.pipeline is None:
            return self._run_micro_batches(part.micro_batches(self.plan.layout.micro_batch))
        self._sums += self.pipeline.run("step", part)
        if self.tie is not None:
            self.tie.collect()
        return None

    def _pass(self, inputs: Tensor, targets: Tensor, segments: Tensor, scale: Tensor) -> Tensor:
        sums: Tensor = self.parts.modules[0](inputs, targets, segments)
        (sums[0] * scale).backward()
        return sums.detach()

    def _run_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Mark, Mark]]:
        module, forward = self.parts.modules[0], list[tuple[Mark, Mark]]()
        for index, inputs in enumerate(micro_batches):
            set_sync(module, self.spec.sync, index == len(micro_batches) - 1)
            self.beat("forward")
            began = mark(self.world.cuda)
            sums = module(*inputs)
            forward.append((began, mark(self.world.cuda)))
            self._sums.append(sums.detach())
            self.beat("backward")
            (sums[0] * self.scale).backward()
        return forward

    def _reduce(self) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, gradient norm, auxiliary loss), further means and the sums of routers, over all ranks by one small
        reduction."""
        device = self.world.device
        square, gradients = torch.zeros((), dtype=torch.float32, device=device), self.optimizer.gradients()
        for count in sorted(set(self.replication)):  # each number counts once over all ranks that hold it
            held = [local_tensor(g) for g, copies in zip(gradients, self.replication, strict=True) if copies == count]
            if group := [gradient for gradient in held if gradient.numel()]:
                square = square + norms(group).to(device).square().sum() / count
        sums = torch.zeros(2 + len(self.further), device=device)
        if self._sums and self.world.counts_loss:
            sums = torch.stack(self._sums).sum(0) * self.scale
        own = torch.stack((sums[1], square, sums[0] - sums[1], *sums[2:]))
        count = len(own)
        total, further, routed = self.world.sum_(torch.cat((own, self.routers.local_sums()))).tensor_split((3, count))
        return torch.stack((total[0], total[1].sqrt(), total[2])), further, routed


def norms(gradients: list[Tensor]) -> Tensor:
    """Of each, in fp32. Large ones alone: torch reads a list at 2.1 TB/s on an H200, one tensor at 3.5."""
    small, large = ([g for g in gradients if (g.numel() >= LARGE) == is_large] for is_large in (False, True))
    together = torch._foreach_norm(small, 2, dtype=torch.float32) if small else ()
    return torch.stack((*together, *(torch.linalg.vector_norm(g, dtype=torch.float32) for g in large)))


def replication(parameter: Any, world: World) -> float:
    """How many ranks of the job hold the same numbers of this parameter's gradient."""
    placements = enumerate(getattr(parameter, "placements", ()))
    parts = (parameter.device_mesh.size(axis) for axis, placement in placements if not placement.is_replicate())
    return world.size / int(math.prod(parts, start=world.layout.pipeline))


def mark(cuda: bool) -> Mark:
    if not cuda or torch.cuda.is_current_stream_capturing():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Both events must have completed: call after a synchronisation, or much later."""
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(cast(torch.cuda.Event, end))) / 1e3
    return cast(float, end) - begin
