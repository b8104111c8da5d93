"""How is a model divided over devices? One ordered list: stages, tensor parallel, context, precision, recompute, compile, shard.

Which rank holds what, and what that costs in memory, stands in docs/concepts/layouts.md; the planner counts the same way.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.models.parts import Model
from windlass.models.recompute import Recomputed
from windlass.registry import OBJECTIVES
from windlass.train.attention import apply_attention
from windlass.train.mesh import World
from windlass.train.tie import Tie, find_tie


@dataclass
class Parts:
    """This rank's piece of the model: one module per pipeline stage it holds (one without a pipeline)."""

    modules: list[Model]
    stages: list[int]
    num_stages: int
    notes: list[str] = field(default_factory=list)
    """What was chosen automatically, with its reason."""
    shadow: bool = False
    """Single process in bf16: parameters are bf16 and the optimizer holds the fp32 master copy."""
    tie: Tie | None = None
    """Embedding and head share weights and stand in different stages."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once: what is a copy of another rank's (or stage's) is not trained here."""
        copy = None if self.tie is None else self.tie.copy
        for module in self.modules:
            yield from ((name, parameter) for name, parameter in module.named_parameters() if parameter is not copy)


def parallelize(model: Model, recipe: Recipe, world: World) -> Parts:
    """`model` is on the meta device; the parts come back on the world's device, not yet initialised."""
    layout, train = recipe.layout, recipe.train
    parts = split_stages(model, world, schedule=layout.schedule, chunks=layout.pipeline_chunks)
    for module in parts.modules:
        apply_attention(module, train.attention)
        if world.axes.context > 1:
            _context(module, world)
        _fuse(module, recipe, world)
        _loss(module, recipe, world, parts.notes)
        if world.axes.tensor > 1:
            _tensor(module, recipe, world)
        if train.precision == "fp8":
            _float8(module, recipe, world, parts.notes)
        _recompute(module, train.recompute, parts.notes)
        _compile(module, recipe, world, parts.notes)
        # Shard last, so that FSDP's hooks stay outside the compiled blocks and cause no graph breaks.
        if world.size > 1:
            _shard(module, recipe, world)
        elif train.precision != "fp32":
            parts.shadow = train.precision != "bf16_pure"
            module.to(torch.bfloat16)
        if train.precision == "bf16_pure" and world.size > 1:
            module.to(torch.bfloat16)
        module.to_empty(device="cpu" if layout.offload == "parameters" else world.device)
    parts.tie = find_tie(parts.modules, parts.stages, parts.num_stages, layout.schedule, world)
    parts.notes[:] = list(dict.fromkeys(parts.notes))
    return parts


# -- pipeline stages ----------------------------------------------------------------------------------------------------


def stage_numbers(schedule: str, rank: int, ranks: int, chunks: int) -> list[int]:
    """Which stages a pipeline rank holds: one, or several in the order that its schedule expects."""
    if ranks == 1:
        return [0]
    if schedule == "interleaved":
        return [rank + ranks * i for i in range(chunks)]
    if schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank]


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous, as even as possible; the last stages get fewer, because the head costs about as much as a layer or two."""
    sizes = [num_layers // num_stages + (1 if i < num_layers % num_stages else 0) for i in range(num_stages)]
    starts = [sum(sizes[:i]) for i in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def split_stages(model: Model, world: World, *, schedule: str, chunks: int) -> Parts:
    ranks = world.axes.pipeline
    numbers = stage_numbers(schedule, world.coordinate("pp"), ranks, chunks)
    total = ranks * len(numbers)
    if ranks == 1:
        return Parts([model], [0], 1)
    if not model.stackable:
        raise ConfigError(
            "train.model-family-cannot-cut",
            "this model family cannot be cut into pipeline stages",
            hint="set layout.pipeline = 1",
        )
    if model.num_layers < total:
        raise ConfigError(
            "train.model-layers-fewer-pipeline",
            f"model.layers ({model.num_layers}) is fewer than the {total} pipeline stages",
            hint="use fewer stages or pipeline_chunks",
        )
    modules = []
    for number in numbers:
        part = copy.deepcopy(model)
        part.keep(stage_layers(model.num_layers, total)[number], first=number == 0, last=number == total - 1)
        modules.append(part)
    return Parts(modules, numbers, total)


# -- inside a layer -----------------------------------------------------------------------------------------------------


def _context(module: Model, world: World) -> None:
    from windlass.train.context import apply_context

    apply_context(module, world)


def _float8(module: Model, recipe: Recipe, world: World, notes: list[str]) -> None:
    from windlass.train.float8 import apply_float8

    notes.append(apply_float8(module, world.device, recipe.train))


def _fuse(module: Model, recipe: Recipe, world: World) -> None:
    # Measured on an H200 (benchmarks/gpu_train.py): in bf16 laying weights side by side costs 1.5 % speed and 4 GiB, in FP8
    # one cast of the shared input instead of three pays for it.
    automatic = world.device.type == "cuda" and recipe.train.precision == "fp8"
    wanted = recipe.train.fuse if recipe.train.fuse is not None else automatic
    for part in module.modules():
        if hasattr(part, "fused"):
            part.fused = wanted and world.axes.tensor == 1


def _loss(module: Model, recipe: Recipe, world: World, notes: list[str]) -> None:
    if not module.stackable:  # a foreign network has its own head and hands out whole logits
        module.z_loss = recipe.train.z_loss
        notes.append("loss: plain (a network of transformers makes its logits whole)")
    if module.head is None:
        return
    rows = (module.embed if module.head.weight is None else module.head).weight.shape[0]
    tokens = recipe.layout.micro_batch * recipe.data.seq_len // world.axes.context
    module.head.loss, note = OBJECTIVES.load(recipe.train.objective).choose_loss(recipe.train, rows=rows, tokens=tokens)
    if world.axes.tensor > 1:  # `apply_tensor` gives the head another, whatever was chosen
        note = f"loss: in chunks of {recipe.train.loss_chunk} tokens (the vocabulary is divided over {world.axes.tensor} ranks)"
    notes.append(note)


def _tensor(module: Model, recipe: Recipe, world: World) -> None:
    from windlass.train.tensor import apply_tensor

    apply_tensor(module, recipe, world)


def _recompute(module: Model, kind: str, notes: list[str]) -> None:
    if kind == "selective" and not isinstance(next(iter(module.layers.values()), None), Recomputed):
        notes.append("recompute: full (selective is for our own blocks)")
    for block in module.layers.values():
        block.recompute = kind if kind in ("full", "selective") else "none"


def _compile(module: Model, recipe: Recipe, world: World, notes: list[str]) -> None:
    train = recipe.train
    wanted = train.compile if train.compile is not None else world.device.type == "cuda"
    if train.recompute == "budget" and not wanted:
        raise ConfigError(
            "train.train-recompute-budget-needs",
            'train.recompute = "budget" needs train.compile',
            hint='use "selective", or set train.compile = true',
        )
    if not wanted:
        return
    # The default lies in /tmp and is gone with the node; a job chain should find its compiled kernels again.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass" / "compile"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    import torch._functorch.config as functorch
    import torch.compiler.config as compiler

    # The cached graph holds the attention kernel that was chosen when it was made; torch's own key does not name it, so a
    # warm cache would go on with cuDNN after train.attention = "flash" (seen on the H200).
    compiler.cache_key_tag = f"attention={train.attention}"
    functorch.activation_memory_budget = train.recompute_budget if train.recompute == "budget" else 1.0
    for block in module.layers.values():
        # Dynamic shapes would cost speed and are not needed: every block sees one shape in training and one in evaluation.
        block.compile(fullgraph=isinstance(block, Recomputed), dynamic=False)
        # With recomputation a block would have to keep two tensors instead of one: only without it.
        block.carries = train.recompute == "none" and isinstance(block, Recomputed)
    if module.norm is not None and world.axes.tensor == 1:
        module.norm.compile(fullgraph=True, dynamic=False)
    notes.append("compile: each block (train.compile)" if train.compile else "compile: each block (a GPU is there)")


# -- sharding -----------------------------------------------------------------------------------------------------------


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """bf16 compute from fp32 shards, gradients reduced in fp32; fp32 and pure bf16 need no casts, but the latter reduces in fp32."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard(module: Model, recipe: Recipe, world: World) -> None:
    layout = recipe.layout
    mesh = world.mesh["fsdp"] if world.axes.replicate == 1 else world.mesh["rep", "fsdp"]
    # Under a pipeline every micro-batch would gather the weights again, so they stay until the step is done.
    reshard = layout.shard in ("full", "hybrid") and layout.pipeline == 1
    offload = (
        CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if layout.offload == "parameters" else OffloadPolicy()
    )
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision_policy(recipe.train.precision),
        "offload_policy": offload,
    }
    for block in module.layers.values():
        fully_shard(block, reshard_after_forward=reshard, **common)
    if module.embed is not None and not module.tied:
        fully_shard(module.embed, reshard_after_forward=reshard, **common)
    if module.head is not None and not module.tied:
        fully_shard([module.norm, module.head], reshard_after_forward=False, **common)
    fully_shard(module, reshard_after_forward=False, **common)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is divided by the tokens of the whole batch, so gradients are summed, not averaged.
            part.set_gradient_divide_factor(1.0)
            if hasattr(part, "set_force_sum_reduction_for_comms"):  # gloo cannot multiply while it sums
                part.set_force_sum_reduction_for_comms(True)


@dataclass(frozen=True)
class Sync:
    """When gradients are reduced under accumulation."""

    every: bool
    """Reduce-scatter after each micro-batch (gradients stay divided)."""
    defer_replicas: bool
    """Only the all-reduce across copies waits for the last micro-batch."""
    keep_weights: bool
    """Weights stay gathered between micro-batches."""
    note: str


def choose_sync(recipe: Recipe, micro_batches: int) -> Sync:
    """The recipe's wish, or the rule by layout: whole gradients are held anyway under none and zero1, so one reduction is enough."""
    layout = recipe.layout
    whole = layout.shard in ("none", "zero1")
    every = layout.sync == "every" or (layout.sync == "auto" and not whole)
    if micro_batches == 1:
        return Sync(True, False, False, "")
    if layout.sync != "auto":
        why = f"layout.sync = {layout.sync}"
    else:
        why = f"{layout.shard} holds whole gradients" if whole else f"{layout.shard} keeps gradients divided"
    defer = every and layout.shard == "hybrid" and layout.sync == "auto"
    when = (
        "after each micro-batch, across nodes once per step"
        if defer
        else ("after each micro-batch" if every else "once per step")
    )
    return Sync(every, defer, whole, f"gradient reduction: {when} ({why})")


def set_sync(module: nn.Module, sync: Sync, last: bool) -> None:
    """Tell FSDP what to do after this micro-batch's backward pass."""
    if not isinstance(module, FSDPModule):
        return
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(last or sync.every)
    module.set_requires_all_reduce(last or not sync.defer_replicas)
    module.set_reshard_after_backward(last or not sync.keep_weights)


def bind_pipeline(parts: Parts, recipe: Recipe, world: World, micro_batches: int, loss: Any) -> Any:
    """The schedule that moves micro-batches through the stages, or None without a pipeline."""
    if parts.num_stages == 1:
        return None
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as kinds

    group = world.mesh.get_group("pp")
    stages = [
        PipelineStage(m, number, parts.num_stages, world.device, group=group)
        for m, number in zip(parts.modules, parts.stages, strict=True)
    ]
    name = recipe.layout.schedule
    make = {
        "1f1b": kinds.Schedule1F1B, "gpipe": kinds.ScheduleGPipe, "interleaved": kinds.ScheduleInterleaved1F1B, "zbv": kinds.ScheduleZBVZeroBubble,
    }[name]  # fmt: skip
    return make(stages[0] if len(stages) == 1 else stages, micro_batches, loss_fn=loss, scale_grads=False)
