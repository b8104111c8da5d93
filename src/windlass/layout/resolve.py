"""From a recipe's wishes to the complete `Layout` and `StepSpec`. The same functions serve the engine and the
planner."""

from dataclasses import dataclass
from functools import cache

from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.head.spec import choose_loss
from windlass.config import LayoutConfig, Recipe
from windlass.config.ramp import batch_sizes
from windlass.layout.types import HYBRID_SHARDS, GradientSync, Layout, StepSpec
from windlass.models.spec import ModelSpec
from windlass.registry import OPTIMIZERS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """What a layout has to divide: devices and the global batch."""

    devices: int
    devices_per_node: int
    seq_len: int
    # Sequences of one optimizer step over all devices, the largest of a ramp; None: one micro-batch per replica.
    sequences: int | None
    # The other sizes of a ramp.
    smaller: tuple[int, ...] = ()


def job_size(recipe: Recipe, devices: int, devices_per_node: int) -> JobSize:
    data = recipe.data
    batches = [] if data.batch_tokens is None else [size for _, size in batch_sizes(data, data.batch_tokens)]
    sizes = sorted({batch // data.seq_len for batch in batches})
    return JobSize(
        devices=devices,
        devices_per_node=devices_per_node,
        seq_len=data.seq_len,
        sequences=sizes[-1] if sizes else None,
        smaller=tuple(sizes[:-1]),
    )


def default_shard_size(tensor: int, replicas: int, devices_per_node: int) -> int:
    """hybrid and hybrid_zero2 without shard_size: a node's devices share one copy, as far as tensor parallelism leaves
    room."""
    return max(1, min(devices_per_node // tensor, replicas))


def complete_layout(wish: LayoutConfig, size: JobSize) -> Layout:
    """The layout that a `[layout]` table means on this many devices.

    Data-parallel degree and accumulation follow from the devices and the batch; where these do not divide they are
    rounded down, and `rules.violations` says so."""
    data = max(1, size.devices // (wish.tensor * wish.pipeline * wish.context))
    replicas = data * wish.context
    shard_size = 1 if wish.shard == "none" else replicas
    if wish.shard in HYBRID_SHARDS:
        shard_size = wish.shard_size or default_shard_size(wish.tensor, replicas, size.devices_per_node)
    accumulation = 1 if size.sequences is None else max(1, size.sequences // (data * wish.micro_batch))
    return Layout(
        tensor=wish.tensor,
        pipeline=wish.pipeline,
        context=wish.context,
        expert=wish.expert,
        data=data,
        shard=wish.shard,
        shard_size=shard_size,
        micro_batch=wish.micro_batch,
        accumulation=accumulation,
        schedule=wish.schedule,
        chunks=wish.pipeline_chunks if wish.schedule == "interleaved" else 1,
        offload=wish.offload,
        sync=wish.sync,
        bucket=wish.bucket,
    )


def gradient_sync(layout: Layout) -> GradientSync:
    """The wish, or the rule by sharding: where every rank holds whole gradients anyway, one reduction per step is
    enough."""
    if layout.accumulation == 1:
        return GradientSync()
    full_gradients = layout.shard in ("none", "zero1")
    every, reason = layout.sync == "every", f"layout.sync = {layout.sync}"
    if layout.sync == "auto":
        every = not full_gradients
        reason = f"shard = {layout.shard} keeps {'full' if full_gradients else 'divided'} gradients"
    defer = layout.is_hybrid and layout.sync == "auto"
    when = "after each micro-batch" if every else "once per step"
    when += ", across copies once per step" if defer else ""
    return GradientSync(every, defer, full_gradients, f"gradient reduction: {when} ({reason})")


def resolve_step(
    recipe: Recipe, model: ModelSpec, layout: Layout, *, gpu: bool, recompute: str | None = None
) -> StepSpec:
    """How the engine computes a step of this recipe. `recompute` replaces the recipe's policy, for the planner's
    search."""
    train, optim, data = recipe.train, recipe.optim, recipe.data
    masked = masks_documents(recipe, model)
    grouped = any(isinstance(b, AttentionSpec) and b.kv_heads < b.heads for b in model.blocks)
    tokens = layout.micro_batch * data.seq_len // layout.context
    # DeepSpeed's hooks break the graphs. Batches of examples have many widths: compiling them took longer than it
    # saved.
    compiles = gpu and train.engine != "deepspeed" and not recipe.reads_examples
    loss = "plain" if model.foreign else choose_loss(train.loss, model.embedding.rows, tokens, layout.tensor)[0]
    return StepSpec(
        seq_len=data.seq_len,
        precision=train.precision,
        engine="deepspeed" if train.engine == "deepspeed" else "torch" if model.foreign else "native",
        compile=compiles if train.compile is None else train.compile,
        attention=train.attention,
        loss=loss,
        loss_chunk=train.loss_chunk,
        z_loss=train.z_loss,
        recompute=train.recompute if recompute is None else recompute,
        recompute_budget=train.recompute_budget,
        optimizer=optim.name,
        moment_tensors=moment_tensors(optim.name, model.params.body / model.params.stored),
        moments=optim.moments,
        # In bf16 laying weights side by side costs 1.5 % speed and 4 GiB (H200, benchmarks/gpu_train.py); in FP8 one
        # cast of the shared input instead of three pays for it. Divided products cannot be laid side by side.
        fused_projections=layout.tensor == 1
        and (gpu and train.precision == "fp8" if train.fuse is None else train.fuse),
        fp8_scaling=train.fp8_scaling,
        fp8_backend=train.fp8_backend,
        mask_documents=masked,
        # The memory-efficient kernel, the only one on a GPU for fp32 and for masks over divided sequences, takes no
        # groups of heads.
        expand_kv_heads=gpu and grouped and ((masked and layout.context > 1) or train.precision == "fp32"),
        sync=gradient_sync(layout),
        trained_share=trained_share(recipe, model),
    )


def trained_share(recipe: Recipe, model: ModelSpec) -> float:
    """Share of the weights that are trained: with LoRA two thin matrices beside each product. Targets by name are
    counted as if all were meant."""
    lora = None if recipe.tune is None else recipe.tune.lora
    if lora is None:
        return 1.0
    sides = sum(
        group.count * (product.inputs + product.outputs)
        for group in model.groups
        for product, _ in group.layer.products
        if product.experts == 1
    )
    return min(1.0, lora.rank * sides / model.params.total)


def masks_documents(recipe: Recipe, model: ModelSpec) -> bool:
    """The recipe asks for it and the blocks can do it; `rules.check_step` refuses the others before a training."""
    return recipe.data.masks_documents and all(block.masks_documents for block in model.blocks)


@cache  # a search asks for every candidate
def moment_tensors(optimizer: str, share_of_layers: float) -> float:
    """Norms and routers count among the matrices of layers: they are less than a thousandth of a layer."""
    spec = OPTIMIZERS.load(optimizer)
    count = len(spec.moments)
    return count if spec.matrix_moments is None else count + share_of_layers * (len(spec.matrix_moments) - count)
