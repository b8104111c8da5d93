"""Peak device memory of one training step. Pure arithmetic: no torch, no I/O.

Memory can peak when the forward pass is done and the loss is computed (all activations live), in the backward pass of
the first layers (all gradients live), and in the optimizer. The estimate is the highest of these on the fullest
pipeline rank."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.blocks.head.spec import loss_bytes
from windlass.cost.engines import ENGINE_PROFILES
from windlass.cost.muon import ROUND_SIZE
from windlass.layout.stages import gradient_buckets, stages, stages_of_rank
from windlass.layout.types import AXES, Layout, StepSpec
from windlass.models.spec import LayerSpec, ModelSpec

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
# CUDA or ROCm context with loaded kernels, outside the allocator.
CONTEXT_BYTES = 0.6e9
# Buffers of one communicator (data, tensor, pipeline, context), outside the allocator.
NCCL_BYTES_PER_GROUP = 0.7e9
# Reserved beyond allocated: blocks that the caching allocator holds but cannot hand out, as long as there is room.
SLACK = 0.12
# The same under full sharding, whose gathers and reductions run on streams of their own, each with its own pool.
SHARDED_SLACK = 0.25
# What remains of that slack when memory is short and cached blocks are returned; also covers the error of the
# estimate.
TIGHT_SLACK = 0.10
# Scratch of cuBLAS and cuDNN inside the allocator: the same on every H200 row of ours.
WORKSPACE_BYTES = 72e6

# Moment of the step -> bytes by what holds them.
Moments = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    # Bytes by what holds them, at the moment of the peak; sums to `allocated`.
    terms: dict[str, float]
    # Peak of the caching allocator (torch.cuda.max_memory_allocated).
    allocated: float
    # What the allocator took from the driver.
    reserved: float
    # With context and communication buffers: what nvidia-smi shows.
    total: float
    # The least with which the step runs: compare this with the device's usable memory.
    needed: float
    # When the peak occurs: "loss", "backward" or "optimizer".
    moment: str
    # Pipeline rank with the highest peak.
    stage: int


class RankLoad(NamedTuple):
    """Parameters and layers of one pipeline rank, after tensor division."""

    # Layers of each group of the model that the rank holds a part of, with their number.
    layers: list[tuple[LayerSpec, float]]
    num_layers: float
    # Bytes per token of all its layers' activations, from the forward to the backward pass.
    kept: float
    # Bytes per token more while the backward pass of its largest layer runs.
    transient: float
    embedding: float
    head: float
    # All layers; of them `experts` are divided as `Layout.for_experts` says.
    body: float
    experts: float
    # Micro-batches whose activations live at the same time.
    in_flight: float
    has_loss: bool

    @property
    def params(self) -> float:
        return self.embedding + self.head + self.body

    @property
    def params_per_layer(self) -> float:
        return self.body / max(1.0, self.num_layers)


def layers_per_bucket(model: ModelSpec, layout: Layout) -> float:
    """Mean number of layers whose gradients one collective reduces."""
    if layout.bucket is None:
        return 1.0
    sizes = [group.layer.rank_params(layout) for group in model.groups for _ in range(group.count)]
    return len(sizes) / len(gradient_buckets(sizes, layout.bucket))


def memory(model: ModelSpec, step: StepSpec, layout: Layout) -> MemoryEstimate:
    """Peak memory of the fullest device: of the first pipeline rank (embedding, most micro-batches) or the last
    (head)."""
    layer_bytes = []  # kept from the forward to the backward pass, and more while the backward pass runs
    for layer in (group.layer for group in model.distinct_layers):
        full = layer_activations(layer, step, layout)
        kept = kept_activations(layer, step, layout, full)
        transient = max(0.0, full - kept)
        if step.native:
            stream = step.bytes_per_value * _width(layer) / layout.sequence_split
            largest = max(branch.block.transient_bytes(step, layout) for branch in layer.branches)
            transient += stream * (2.0 if step.recompute == "full" else 1.0) + largest
        layer_bytes.append((kept, transient))
    layer_bytes = [layer_bytes[kind] for kind in model.layer_kinds]
    groups = sum(degree > 1 for degree in (layout.data, *(getattr(layout, axis) for axis in AXES)))
    outside = CONTEXT_BYTES + NCCL_BYTES_PER_GROUP * groups
    estimates = []
    for index in sorted({0, layout.pipeline - 1}):
        rank = _rank_load(model, step, layout, index, layer_bytes)
        moments = (_native_moments if step.native else _published_moments)(model, step, layout, rank)
        sums = {name: sum(terms.values()) for name, terms in moments.items()}
        moment = max(sums, key=sums.__getitem__)
        terms = {name: size for name, size in moments[moment].items() if size > 0}
        allocated = sum(terms.values())
        reserved = allocated * (1 + (SHARDED_SLACK if layout.weight_shards > 1 else SLACK))
        needed = allocated * (1 + TIGHT_SLACK) + outside
        estimates.append(MemoryEstimate(terms, allocated, reserved, reserved + outside, needed, moment, index))
    return max(estimates, key=lambda estimate: estimate.allocated)


def _rank_load(
    model: ModelSpec, step: StepSpec, layout: Layout, index: int, layer_bytes: list[tuple[float, float]]
) -> RankLoad:
    held = stages_of_rank(layout, index)
    # Rows of other engines do not say how an uneven pipeline is split: the mean is taken.
    counts = [group.count / layout.pipeline for group in model.groups]
    if step.native:
        split, first = stages(model.num_layers, layout.num_stages), 0
        for number, group in enumerate(model.groups):
            last = first + group.count
            ranges = (split[stage].layers for stage in held)
            counts[number] = sum(max(0, min(r.stop, last) - max(r.start, first)) for r in ranges)
            first = last
    loads = [load for load in zip(model.groups, counts, layer_bytes, strict=True) if load[1]]
    table = model.embedding.rows * model.width / layout.tensor
    own_head = table if not model.tied or layout.pipeline > 1 else 0.0
    ranks, chunks, has_head = layout.pipeline, layout.chunks, layout.num_stages - 1 in held
    # Interleaved: so many chunks of 1/chunks of the rank's layers.
    warm_up = ((ranks - index - 1) * 2 + (chunks - 1) * ranks + 1) / chunks if chunks > 1 else ranks - index
    most = {"gpipe": math.inf, "zbv": ranks}.get(layout.schedule, warm_up)
    return RankLoad(
        layers=[(group.layer, count) for group, count, _ in loads],
        num_layers=sum(counts),
        kept=sum(kept * count for _, count, (kept, _) in loads),
        transient=max(transient for _, _, (_, transient) in loads),
        embedding=table + model.embedding.positions * model.width if 0 in held else 0.0,
        head=float(model.params.terms["final norm"]) + own_head if has_head else 0.0,
        body=sum(group.layer.rank_params(layout) * count for group, count, _ in loads),
        experts=sum(group.layer.expert_params * count for group, count, _ in loads) / layout.expert_split,
        in_flight=1.0 if ranks == 1 else float(min(layout.accumulation, most)),
        has_loss=has_head,
    )


def _published_moments(model: ModelSpec, step: StepSpec, layout: Layout, rank: RankLoad) -> Moments:
    """Engines that published rows describe: the loss, the end of the backward pass, the optimizer."""
    states, early_gradients, gradients, update = _rank_states(step, layout, rank)
    size = 2.0 if step.precision != "fp32" else 4.0
    # Full sharding: embedding and head stay gathered, two layers live at a time; 16-bit gradients and the fp32 copy
    # that is reduced.
    sharded = layout.weight_shards > 1
    gathered = size * (rank.embedding + rank.head + 2.0 * rank.params_per_layer) if sharded else 0.0
    if sharded and layout.pipeline > 1 and ENGINE_PROFILES[step.engine].gathers_once_in_pipelines:
        gathered = size * rank.params
        early_gradients = gradients = (2.0 if step.gradient_precision == "bf16" else 4.0) * rank.params
    tokens = layout.micro_batch * step.seq_len / layout.context
    activations = rank.kept * tokens * rank.in_flight
    # Without recompute the backward pass frees a layer's activations before the last gradients appear.
    late = activations + rank.transient * tokens
    if step.recompute == "none":
        late = activations / max(1.0, rank.num_layers * rank.in_flight)
    always = {**states, "inputs": _input_bytes(model, step, layout, tokens)}
    return {
        "loss": {
            **always,
            "gradients": early_gradients,
            "unsharded weights": gathered,
            "activations": activations,
            "logits and loss": _logits_bytes(model, step, layout, tokens) if rank.has_loss else 0.0,
        },
        "backward": {
            **always,
            "gradients": gradients,
            "unsharded weights": gathered,
            "reduction buffers": (size + 4.0) * rank.params_per_layer if sharded else 0.0,
            "activations": late,
        },
        "optimizer": {**always, "gradients": gradients, "optimizer temporaries": update},
    }


def _native_moments(model: ModelSpec, step: StepSpec, layout: Layout, rank: RankLoad) -> Moments:
    """Our engine: the loss, the last layer's backward pass (everything kept still lives), the first layer's, the
    optimizer."""
    states, early_gradients, gradients, update = _rank_states(step, layout, rank)
    size = 4.0 if step.precision == "fp32" else 2.0
    tokens = layout.micro_batch * step.seq_len / layout.context
    kept = rank.kept * tokens
    if step.fused_projections:  # fused weights are kept for the backward pass: 16 bits, in FP8 the cast ones
        fused = sum(layer.fusable_weights * count for layer, count in rank.layers) / layout.tensor
        kept += (1.0 if step.precision == "fp8" else 2.0) * fused
    activations, one_layer = kept * rank.in_flight, rank.transient * tokens
    head = step.trained_share * size * (rank.embedding if model.tied else rank.head) if rank.has_loss else 0.0
    always = {**states, "inputs": _input_bytes(model, step, layout, tokens), "workspaces": WORKSPACE_BYTES}
    mask = 0.0
    if step.mask_documents and layout.context > 1:
        # One byte per pair of positions, and the values that each attention layer's kernel makes of it and keeps. On
        # undivided sequences the kernel that skips hidden blocks needs none of it.
        pairs = layout.micro_batch * float(step.seq_len) ** 2 / layout.context
        masked = (n for layer, n in rank.layers if any(isinstance(b.block, AttentionSpec) for b in layer.branches))
        mask = pairs * (1.0 + step.bytes_per_value * sum(masked) * rank.in_flight)
    joined = layers_per_bucket(model, layout)
    early_weights, late_weights = _native_gathered(model, size, layout, rank, joined)
    # A pipeline whose micro-batches are all in flight at once has made no gradient yet when it is fullest.
    all_in_flight = layout.pipeline > 1 and layout.accumulation <= rank.in_flight
    summed = 0.0 if all_in_flight else early_gradients
    accumulates = layout.accumulation > 1 and layout.devices > 1
    reduced_once = not step.sync.every_micro_batch or layout.pipeline > 1
    last_reduction = 0.0
    if accumulates and not reduced_once:
        # Between micro-batches FSDP holds the input of its last reduction: the embedding's gradient in fp32, under
        # zero2 also in 16 bits.
        both = layout.divides_gradients_only and step.precision != "fp32"
        last_reduction = step.trained_share * rank.embedding * (6.0 if both else 4.0)
    backward = {
        **always,
        "unsharded weights": late_weights,
        "reduction buffers": step.trained_share
        * ((size + 4.0) * rank.params_per_layer * (joined - (layout.weight_shards == 1))),
    }
    last_layers = activations / max(1.0, rank.num_layers * rank.in_flight) * max(1.0, rank.in_flight - 1.0)
    moments = {
        "loss": {
            **always,
            "gradients": summed,
            "last reduction": last_reduction,
            "unsharded weights": early_weights,
            "activations": activations,
            "decay matrix": sum(block.constant_bytes(step, layout) for block in model.blocks),
            "document mask": mask,
            "logits and loss": _logits_bytes(model, step, layout, tokens) if rank.has_loss else 0.0,
        },
        "backward, last layer": {
            **backward,
            "gradients": max(summed, head),
            "activations": activations,
            "document mask": mask,
            "one layer's backward": one_layer,
        },
        "backward, first layer": {
            **backward,
            "gradients": gradients,
            "activations": last_layers,
            "one layer's backward": one_layer,
        },
        "optimizer": {**always, "gradients": gradients, "optimizer temporaries": update},
    }
    if accumulates and reduced_once and rank.embedding and step.precision not in ("fp32", "bf16_pure"):
        # Gradients are summed over micro-batches before the one reduction. The embedding's comes last and lies there
        # as the old sum, the new one, and both in 16 bits: 12 bytes a value of this rank's rows.
        share = 1.0 - 1.0 / (layout.chunks * max(1.0, rank.in_flight))
        moments["backward, embedding"] = {
            **always,
            "gradients": max(0.0, gradients - 4.0 * rank.embedding),
            "embedding's gradient": 12.0 * step.trained_share * rank.embedding,
            "activations": activations * share,
        }
    return moments


def _native_gathered(
    model: ModelSpec, size: float, layout: Layout, rank: RankLoad, joined: float
) -> tuple[float, float]:
    """Gathered weights of `size` bytes at the loss (head, and the buffer of the newest gather) and in the backward pass
    (head, two buckets of `joined` layers).

    zero1, zero2 and hybrid_zero2 keep all of them as the 16-bit copy, and the buffer. A tied table belongs to the whole
    model and stays."""
    if layout.devices == 1 or layout.shard == "none" or layout.pipeline > 1:
        return 0.0, 0.0
    head, newest = (rank.embedding, rank.params_per_layer) if model.tied else (rank.head, rank.head)
    if layout.shard not in ("full", "hybrid"):
        return (size * newest if layout.accumulation == 1 else 0.0), 0.0
    return size * (head + newest), size * (head + (3.0 if model.tied else 2.0) * joined * rank.params_per_layer)


def _rank_states(step: StepSpec, layout: Layout, rank: RankLoad) -> tuple[dict[str, float], float, float, float]:
    if layout.expert_split == layout.tensor:
        return _states(step, layout, rank.params)
    dense, *dense_sums = _states(step, layout, rank.params - rank.experts)
    experts, *expert_sums = _states(step, layout.for_experts, rank.experts)
    early, gradients, update = (sum(pair) for pair in zip(dense_sums, expert_sums, strict=True))
    return {name: size + experts.get(name, 0.0) for name, size in dense.items()}, early, gradients, update


def _states(step: StepSpec, layout: Layout, params: float) -> tuple[dict[str, float], float, float, float]:
    """Bytes of one device: weights, masters and moments by name; gradients when the loss is computed (none yet, unless
    micro-batches are accumulated or a buffer is kept); gradients after it; temporaries of the optimizer step."""
    engine, trained = ENGINE_PROFILES[step.engine], params * step.trained_share
    moments = float(step.moment_tensors * MOMENT_BYTES.get(step.moments, 4))
    gradient_shards = layout.shard_size if layout.divides_gradients_only else layout.weight_shards
    update = 0.0
    if engine.fp32_weights or step.precision in ("fp32", "bf16_pure"):
        # fp32 weights are the master (bf16_pure: everything in 16 bits); gradients vanish after the step. zero1,
        # zero2 and hybrid_zero2 divide masters, moments and (at the end) gradients as full sharding does, but keep
        # the gathered 16-bit weights.
        pure, accumulates = step.precision == "bf16_pure", layout.accumulation > 1
        # On one device frozen weights are 16-bit and have no master.
        alone = step.native and layout.devices == 1 and step.precision in ("bf16", "fp8")
        always = {
            "weights": (2.0 if pure else 4.0) * (trained if alone else params) / layout.shard_size,
            "optimizer states": (min(moments, 4.0) if pure else moments) * trained / layout.shard_size,
        }
        gathered = layout.shard not in ("full", "hybrid") and not (pure and layout.shard_size == 1)
        if gathered and step.precision != "fp32":
            always["16-bit copy"] = 2.0 * params  # gathered or cast weights live until the backward pass is done
        if layout.shard == "zero1":
            gradient_shards = 1 if accumulates else layout.shard_size  # undivided until the one reduction per step
        narrow = pure or step.gradient_precision == "bf16"
        if alone:
            narrow = not accumulates  # 16-bit gradients of 16-bit weights; accumulated ones are summed in fp32
        gradients = (2.0 if narrow else 4.0) * trained / gradient_shards
        early_gradients = gradients if accumulates or layout.pipeline > 1 else 0.0
    else:
        # 16-bit weights and a gradient buffer stay; fp32 masters and moments belong to the optimizer, which is often
        # divided.
        habit = "bf16" if step.precision == "fp16" else engine.gradient_precision
        size = 4.0 if (step.gradient_precision or habit) == "fp32" else 2.0
        if step.gradient_precision == "fp32" and engine.keeps_both_gradients:
            size = 6.0
        early_gradients = gradients = size * params / gradient_shards
        always = {
            "weights": 2.0 * params / layout.weight_shards,
            "master weights": 4.0 * params / layout.shard_size,
            "optimizer states": moments * params / layout.shard_size,
        }
        if engine.bucket_bytes and step.gradient_precision is None:
            always["all-reduce buckets"] = min(engine.bucket_bytes, 4.0 * params)
        update = 4.0 * params / layout.shard_size if size == 2.0 else 0.0  # 16-bit gradients are widened for the step
    if step.optimizer == "muon":
        # Six tensors of 16 bits exist together.
        update += 12.0 * min(ROUND_SIZE, params * layout.tensor * layout.pipeline / layout.devices)
    if layout.offload != "none":
        moved = ("optimizer states", "master weights", *(["weights"] if layout.offload == "parameters" else []))
        always, update = {name: size for name, size in always.items() if name not in moved}, 0.0
    return always, early_gradients, gradients, update


def layer_activations(layer: LayerSpec, step: StepSpec, layout: Layout) -> float:
    """Bytes per token that one layer keeps for its backward pass without recompute."""
    experts_step = replace(step, compile=False) if ENGINE_PROFILES[step.engine].eager_experts else step
    return sum(
        branch.block.kept_bytes(experts_step if isinstance(branch.block, ExpertsSpec) else step, layout)
        + sum(norm.kept_bytes(step, layout) for norm in branch.norms)
        for branch in layer.branches
    )


def kept_activations(layer: LayerSpec, step: StepSpec, layout: Layout, full: float | None = None) -> float:
    """Bytes per token and layer that live from the forward to the backward pass under the recompute policy; `full`
    is what a layer keeps without recompute, where it is known already."""
    full = layer_activations(layer, step, layout) if full is None else full
    size = step.bytes_per_value
    stream = size * _width(layer) / layout.sequence_split
    if step.recompute == "full":
        return stream
    if step.recompute == "budget":
        return stream + (full - stream) * step.recompute_budget
    if step.recompute != "selective":
        return full
    if not ENGINE_PROFILES[step.engine].fp32_weights:  # Megatron's policy: only the square of scores is recomputed
        mixing = [m for branch in layer.branches if (m := branch.block.mixing(step)) is not None]
        return full - sum(2.0 * size * m.scores for m in mixing) / layout.tensor
    # The layer's input, what attention keeps, and the outputs of every second product except the last.
    groups = layer.product_groups if step.fused_projections else [(product,) for product, _ in layer.products]
    kept = stream + sum(branch.block.selective_bytes(step, layout) for branch in layer.branches)
    for group in groups[:-1:2]:
        split = layout.tensor if group[0].divided == "outputs" else layout.sequence_split
        kept += size * sum(product.outputs for product in group) / split
    if step.native:
        # Only code that is not compiled keeps the last product, which nobody reads. Sums over tensor-parallel ranks are
        # kept.
        kept += stream * ((len(groups) % 2 == 1 and not step.compile) + (layout.tensor > 1))
    return min(full, kept)


def _logits_bytes(model: ModelSpec, step: StepSpec, layout: Layout, tokens: float) -> float:
    engine = ENGINE_PROFILES[step.engine]
    plain = engine.plain_loss_bytes if step.flash else engine.plain_loss_bytes_unfused
    if engine.fp32_weights:
        plain = {"compiled": 8.0, "inplace": 4.0}.get(step.loss, plain)
    plain += engine.divided_loss_bytes if layout.tensor > 1 else 0.0
    return loss_bytes(model.width, model.embedding.rows, tokens, step, layout, plain)


def _input_bytes(model: ModelSpec, step: StepSpec, layout: Layout, tokens: float) -> float:
    """Token ids, and the output of embedding and final norm (eager: with its fp32 input)."""
    values = 4.0 if step.native and not step.compile and step.precision != "fp32" else 2.0
    return tokens * (16.0 + values * step.bytes_per_value * model.width / layout.sequence_split)


def _width(layer: LayerSpec) -> int:
    return layer.products[-1][0].outputs
