"""Divides a model over devices, in one ordered list: stages, kernels, context, tensor, precision, recompute, compile,
shard.

Which rank holds what, and what that costs in memory, is described in docs/concepts/layouts.md; the planner counts the
same way."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from windlass.blocks import block_part
from windlass.blocks.attention.kernels import attention_core
from windlass.blocks.divide import Meshes
from windlass.blocks.embedding import parallel as parallel_embedding
from windlass.blocks.head import parallel as parallel_head
from windlass.blocks.head.parallel import parallel_loss
from windlass.blocks.head.preference import PairScorer
from windlass.blocks.head.spec import choose_loss
from windlass.blocks.initial_values import local_tensor
from windlass.blocks.norm import parallel as parallel_norm
from windlass.config import Recipe
from windlass.errors import ConfigError, TrainError
from windlass.layout.stages import GRADIENT_BYTES, gradient_buckets, stages, stages_of_rank
from windlass.layout.types import GradientSync, StepSpec
from windlass.models.decoder import DecoderModel, Layer
from windlass.models.hf import HFModel
from windlass.registry import OBJECTIVES
from windlass.train.adapters import add_adapters, check_targets
from windlass.train.mesh import World
from windlass.train.tie import Tie, find_tie
from windlass.units import print_bytes


@dataclass
class ModelParts:
    """This rank's piece of the model: one module per pipeline stage it holds (one without a pipeline)."""

    modules: list[DecoderModel]
    stages: list[int]
    num_stages: int
    # What was chosen automatically, with its reason, for the log.
    notes: list[str] = field(default_factory=list)
    # Single process in bf16: parameters are bf16 and the optimizer holds the fp32 master copy.
    master_copy: bool = False
    # Embedding and head share weights but are in different stages.
    tie: Tie | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each trained parameter once."""
        return ((name, parameter) for name, parameter in self._own_parameters() if parameter.requires_grad)

    def frozen(self) -> dict[str, Tensor]:
        """Weights that are not trained; a checkpoint holds them too, so that it can be used alone."""
        return {name: p.detach() for name, p in self._own_parameters() if not p.requires_grad}

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Without the copy of another stage's weights, which is neither trained nor saved here."""
        copied = None if self.tie is None else self.tie.copy
        for module in self.modules:
            yield from ((name, parameter) for name, parameter in module.named_parameters() if parameter is not copied)

    def saved_buffers(self) -> dict[str, Tensor]:
        """Buffers that are neither trained nor recomputed, such as the biases of routers."""
        kept: dict[str, Tensor] = {}
        for module in self.modules:
            buffers = dict(module.named_buffers()) if module.divisible else {}
            kept |= {name: buffers[name] for name in (module.state_dict() if buffers else ()) if name in buffers}
        return kept


def parallelize(model: DecoderModel, recipe: Recipe, step: StepSpec, world: World) -> ModelParts:
    """`model` is on the meta device; the parts come back on the world's device, not yet initialised."""
    lora = None if recipe.tune is None else recipe.tune.lora
    if lora is not None:
        check_targets(model, lora)  # of the complete model: a stage need not have all of them
    parts = split_stages(model, world)
    single = world.size == 1
    for module in parts.modules:
        for block in module.blocks():
            if block.core is not None:
                block.core = attention_core(step.attention)
            block.fused = step.fused_projections
        module.resets_positions = recipe.data.reset_positions
        if world.layout.context > 1:
            module.start_at(world.context_rank * (module.seq_len // world.layout.context))
        divide_blocks(module, world)
        set_loss(module, recipe, step, world, parts.notes)
        if lora is not None:
            parts.notes.append(add_adapters(module, lora))
        if step.precision == "fp8":
            from windlass.train.float8 import apply_float8

            parts.notes.append(apply_float8(module, world.device, recipe.train))
        set_recompute(module, step, parts.notes)
        if step.compile:
            compile_layers(module, recipe, step, world, parts.notes)
        # Shard last, so that FSDP's hooks stay outside the compiled layers and cause no graph breaks.
        if not single:
            shard_parameters(module, step, world, parts.notes)
        if step.precision == "bf16_pure" or (single and step.precision != "fp32"):
            module.to(torch.bfloat16)
        module.to_empty(device="cpu" if world.layout.offload == "parameters" else world.device)
    parts.master_copy = single and step.precision not in ("fp32", "bf16_pure")
    parts.tie = find_tie(parts.modules, parts.stages, parts.num_stages, world)
    parts.notes[:] = list(dict.fromkeys(parts.notes))
    return parts


def split_stages(model: DecoderModel, world: World) -> ModelParts:
    if world.layout.pipeline == 1:
        return ModelParts([model], [0], 1)
    indexes, split = (
        stages_of_rank(world.layout, world.coordinate("pp")),
        stages(model.num_layers, world.layout.num_stages),
    )
    modules = [copy.deepcopy(model) for _ in indexes]
    for module, index in zip(modules, indexes, strict=True):
        module.keep_stage(split[index].layers, first=split[index].has_embedding, last=split[index].has_head)
    return ModelParts(modules, indexes, world.layout.num_stages)


def set_loss(module: DecoderModel, recipe: Recipe, step: StepSpec, world: World, notes: list[str]) -> None:
    """Give the head its loss function. Call it after `divide_blocks`, which divides the logits."""
    if not module.divisible:  # a Hugging Face model has its own head and returns full logits
        assert isinstance(module, HFModel)
        module.z_loss = step.z_loss
        notes.append("loss: plain (a Hugging Face model returns full logits)")
    if module.head is None:
        return
    mesh, objective = world.block_meshes.tensor, recipe.train.objective
    if recipe.tune is not None and recipe.tune.task == "prefer":
        scorer = PairScorer(step.loss_chunk, module.head.logits, world.block_meshes.context)
        module.head.loss = partial(scorer.loss, beta=recipe.tune.beta)
        notes.append(f"loss: preference of answers (DPO, beta {recipe.tune.beta:g})")
        return
    if mesh is None:
        module.head.loss = OBJECTIVES.load(objective).loss_function(step)
    elif objective == "next_token":
        module.head.loss = partial(parallel_loss, mesh=mesh, chunk=step.loss_chunk, z_loss=step.z_loss)
    else:
        raise ConfigError(
            "train.objective-not-divided",
            f"train.objective = {objective!r} is not computed on a divided vocabulary "
            f"(layout.tensor {world.layout.tensor})",
            hint="set layout.tensor = 1",
        )
    tokens = world.layout.micro_batch * step.seq_len // world.layout.context
    kind, reason = choose_loss(recipe.train.loss, module.spec.embedding.rows, tokens, world.layout.tensor)
    notes.append(f"loss: {f'in chunks of {step.loss_chunk} tokens' if kind == 'chunked' else kind} ({reason})")


def divide_blocks(module: DecoderModel, world: World) -> None:
    """Tensor, context and expert parallelism, block by block."""
    meshes = world.block_meshes
    if meshes == Meshes():
        return
    for layer in module.typed_layers():
        for branch, block in zip(layer.spec.branches, layer.blocks(), strict=True):
            block_part(branch.block.kind, "parallel").parallelize(block, meshes)
    if meshes.tensor is None:
        return
    for layer in module.typed_layers():
        for norm in layer.pre_norms():
            parallel_norm.parallelize(norm, meshes.tensor)
        for norm in layer.post_norms():
            parallel_norm.parallelize(norm, meshes.tensor, ends_branch=True)
    if module.norm is not None:
        parallel_norm.parallelize(module.norm, meshes.tensor)
    if module.embed is not None:
        parallel_embedding.parallelize(module.embed, meshes.tensor)
    if module.head is not None and module.divides_head:
        parallel_head.parallelize(module.head, meshes.tensor)
    elif module.head is not None and module.head.weight is not None:
        copies = distribute_tensor(module.head.weight.detach(), meshes.tensor, [Replicate()])
        module.head.weight = nn.Parameter(copies)


def set_recompute(module: DecoderModel, step: StepSpec, notes: list[str]) -> None:
    if step.recompute == "selective" and not module.divisible:
        notes.append("recompute: full (selective is for our own blocks)")
    module.set_recompute(step.recompute if step.recompute in ("full", "selective") else "none")


def compile_layers(module: DecoderModel, recipe: Recipe, step: StepSpec, world: World, notes: list[str]) -> None:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch.compiler.config as compiler

    # The cached graph holds the attention kernel that was chosen when it was made; torch's own key does not name it,
    # so a warm cache would keep using cuDNN after train.attention = "flash" (seen on the H200).
    compiler.cache_key_tag = f"attention={step.attention}"
    functorch.activation_memory_budget = step.recompute_budget if step.recompute == "budget" else 1.0
    exchanges = world.layout.expert > 1
    # A graph for each kind of layer and for the first one, in training and in evaluation with and without documents.
    kinds = len({layer.spec for layer in module.typed_layers()}) + 1
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * kinds)
    # Dynamic shapes cost speed. A layer sees one shape in training and one in evaluation, but batches of examples are
    # as wide as their longest text. The rows that experts exchange are of any number; the exchange itself cuts the
    # graph.
    dynamic = recipe.reads_examples
    for layer in module.layer_modules():
        parts = [layer]
        if exchanges and step.recompute == "full" and isinstance(layer, Layer):
            # A recomputed graph cannot be split; its blocks can.
            parts = [*layer.pre_norms(), *layer.post_norms(), *layer.blocks()]
        for part in parts:
            part.compile(fullgraph=isinstance(layer, Layer) and not exchanges, dynamic=dynamic)
        if isinstance(layer, Layer):  # with recomputation it would have to keep two tensors instead of one
            layer.carries = step.recompute == "none"
    if module.norm is not None and world.layout.tensor == 1:
        module.norm.compile(fullgraph=True, dynamic=dynamic)
    reason = "running on a GPU" if recipe.train.compile is None else "train.compile"
    notes.append(f"compile: each layer ({reason})")
    if exchanges and step.recompute == "selective":
        notes.append("compile: layers with experts are not compiled (layout.expert with selective recomputation)")


def check_compile(step: StepSpec) -> None:
    if step.recompute == "budget" and not step.compile:
        raise ConfigError(
            "train.budget-needs-compile",
            'train.recompute = "budget" needs train.compile',
            hint='use "selective", or set train.compile = true',
        )


def shard_parameters(module: DecoderModel, step: StepSpec, world: World, notes: list[str]) -> None:
    layout = world.layout
    assert world.mesh is not None
    # bf16 compute from fp32 shards, gradients reduced in fp32. fp32 needs no casts.
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offloaded = layout.offload == "parameters"
    common: dict[str, Any] = {
        "mesh": world.mesh["fsdp"] if world.copies == 1 else world.mesh["rep", "fsdp"],
        "mp_policy": MixedPrecisionPolicy() if step.precision == "fp32" else bf16,
        "offload_policy": CPUOffloadPolicy(pin_memory=world.cuda) if offloaded else OffloadPolicy(),
        "shard_placement_fn": shard_placement(world),
    }
    # Under a pipeline every micro-batch would gather the weights again, so they stay until the step is done.
    reshard = layout.shard in ("full", "hybrid") and layout.pipeline == 1
    layers = module.layer_modules()
    sizes = [sum(local_tensor(p).numel() for p in layer.parameters()) for layer in layers]
    buckets = gradient_buckets(sizes, layout.bucket)
    for bucket in buckets:
        fully_shard(layers[bucket.start : bucket.stop], reshard_after_forward=reshard, **common)
    if layout.bucket is not None and buckets:
        largest = GRADIENT_BYTES * max(sum(sizes[bucket.start : bucket.stop]) for bucket in buckets)
        notes.append(
            f"gradient buckets: {len(layers)} layers in {len(buckets)} collectives of up to {print_bytes(largest)}"
        )
    if module.embed is not None and not module.tied:
        fully_shard(module.embed, reshard_after_forward=reshard, **common)
    if module.head is not None and module.norm is not None and not module.tied:
        fully_shard([module.norm, module.head], reshard_after_forward=False, **common)
    fully_shard(module, reshard_after_forward=False, **common)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss is divided by the tokens of the whole batch, so gradients are summed, not averaged.
            part.set_gradient_divide_factor(1.0)
            if hasattr(part, "set_force_sum_reduction_for_comms"):  # gloo cannot multiply while it sums
                part.set_force_sum_reduction_for_comms(True)


def shard_placement(world: World) -> Callable[[nn.Parameter], Any]:
    """How FSDP divides a parameter. Stacked experts whose number does not divide evenly are divided inside, or some
    ranks would hold one more than others, and most none. Those of expert parallelism have their own mesh: gradients are
    summed only over ranks that hold the same ones, because the exchange has brought all rows to them."""
    on_expert_mesh: Callable[[Shard], Any] | None = None
    if (mesh := world.expert_mesh) is not None:
        try:
            from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp

            result = fsdp.ShardPlacementResult
        except (ImportError, AttributeError):
            raise TrainError(
                "train.expert-needs-torch",
                f"layout.expert ({world.layout.expert}) needs torch 2.12 or later, but this is {torch.__version__}",
                hint="install a newer torch, or set layout.expert = 1",
            ) from None
        info: Any = fsdp.FSDPMeshInfo(mesh["fsdp"], shard_mesh_dim=0)
        if mesh["rep"].size() > 1:
            info = fsdp.HSDPMeshInfo(mesh["rep", "fsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
        on_expert_mesh = partial(result, mesh_info=info)

    def place(parameter: nn.Parameter) -> Any:
        shape = local_tensor(parameter).shape
        if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
            assert on_expert_mesh is not None
            return on_expert_mesh(even_shard(shape, world.layout.expert_shard_size))
        return None if len(shape) < 3 else even_shard(shape, world.layout.shard_size)

    return place


def even_shard(shape: torch.Size, shards: int) -> Shard:
    return Shard(next((dim for dim, size in enumerate(shape) if size % shards == 0), 0))


def set_sync(module: nn.Module, sync: GradientSync, last: bool) -> None:
    """Tell FSDP what to do after this micro-batch's backward pass."""
    if not isinstance(module, FSDPModule):
        return
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(last or sync.every_micro_batch)
    module.set_requires_all_reduce(last or not sync.defer_replicas)
    module.set_reshard_after_backward(last or not sync.keep_weights)
