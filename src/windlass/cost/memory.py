"""Peak device memory of one training step. Pure arithmetic: no torch, no I/O.

Memory can peak when the forward pass is done and the loss is computed (all activations live), in the backward pass of
the first layers (all gradients live), and in the optimizer. The estimate is the highest of these on the fullest
pipeline rank."""

from dataclasses import dataclass

from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.head.spec import loss_bytes
from windlass.cost.engines import ENGINE_PROFILES
from windlass.layout.stages import layers_of_rank, stages, stages_of_rank
from windlass.layout.types import Layout, StepSpec
from windlass.models.spec import LayerSpec, ModelSpec

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
CONTEXT_BYTES = 0.6e9
"""CUDA or ROCm context with loaded kernels, outside the allocator."""
NCCL_BYTES_PER_GROUP = 0.7e9
"""Buffers of one communicator (data, tensor, pipeline, context), outside the allocator."""
SLACK = 0.12
"""Reserved beyond allocated: blocks that the caching allocator holds but cannot hand out, as long as there is room."""
SHARDED_SLACK = 0.25
"""The same under full sharding, whose gathers and reductions run on streams of their own, each with its own pool."""
TIGHT = 0.10
"""What remains of that slack when memory is short and cached blocks are returned; also covers the error of the
estimate."""
WORKSPACE_BYTES = 72e6
"""Scratch of cuBLAS and cuDNN inside the allocator: the same on every H200 row of ours."""

Moments = dict[str, dict[str, float]]
"""Moment of the step -> bytes by what holds them."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    terms: dict[str, float]
    """Bytes by what holds them, at the moment of the peak; sums to `allocated`."""
    allocated: float
    """Peak of the caching allocator (torch.cuda.max_memory_allocated)."""
    reserved: float
    """What the allocator took from the driver."""
    total: float
    """With context and communication buffers: what nvidia-smi shows."""
    needed: float
    """The least with which the step runs: compare this with the device's usable memory."""
    moment: str
    """When the peak occurs: "loss", "backward" or "optimizer"."""
    stage: int
    """Pipeline rank with the highest peak."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Activations of one layer per token, the same on every pipeline rank."""

    layer: LayerSpec
    kept: float
    """From the forward to the backward pass."""
    transient: float
    """While its backward pass runs."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Parameters and layers of one pipeline rank, after tensor division."""

    index: int
    layers: tuple[tuple[LayerBytes, float], ...]
    """Layers of each group of the model that the rank holds a part of, with their number."""
    num_layers: float
    embedding: float
    head: float
    body: float
    in_flight: float
    """Micro-batches whose activations live at the same time."""
    has_loss: bool

    @property
    def params(self) -> float:
        return self.embedding + self.head + self.body

    @property
    def params_per_layer(self) -> float:
        return self.body / max(1.0, self.num_layers)


def memory(model: ModelSpec, step: StepSpec, layout: Layout) -> MemoryEstimate:
    """Peak memory of the fullest device: of the first pipeline rank (embedding, most micro-batches) or the last
    (head)."""
    ranks = [0] if layout.pipeline == 1 else [0, layout.pipeline - 1]
    layers = [_layer_bytes(group.layer, step, layout) for group in model.groups]
    estimates = [_rank_memory(model, step, layout, rank_load(model, step, layout, rank, layers)) for rank in ranks]
    return max(estimates, key=lambda estimate: estimate.allocated)


def _layer_bytes(layer: LayerSpec, step: StepSpec, layout: Layout) -> LayerBytes:
    full, kept = layer_activations(layer, step, layout), kept_activations(layer, step, layout)
    again = max(0.0, full - kept)
    return LayerBytes(layer, kept, again + backward_gradients(layer, step, layout) if step.native else again)


def rank_load(model: ModelSpec, step: StepSpec, layout: Layout, rank: int, layers: list[LayerBytes]) -> RankLoad:
    held = stages_of_rank(layout, rank)
    has_embedding, has_head = 0 in held, layout.num_stages - 1 in held
    counts: list[float] = []
    if not step.native:  # rows of other engines do not say how an uneven pipeline is split: the mean is taken
        counts = [group.count / layout.pipeline for group in model.groups]
    elif len(model.groups) == 1:
        counts = [layers_of_rank(model.num_layers, layout, rank)]
    else:
        split, first = stages(model.num_layers, layout.num_stages), 0
        ranges = [split[index].layers for index in held]
        for group in model.groups:
            counts.append(sum(max(0, min(r.stop, first + group.count) - max(r.start, first)) for r in ranges))
            first += group.count
    table = model.embedding.rows * model.width / layout.tensor
    own_head = table if not model.tied or layout.pipeline > 1 else 0.0
    return RankLoad(
        index=rank,
        layers=tuple((layer, count) for layer, count in zip(layers, counts, strict=True) if count),
        num_layers=sum(counts),
        embedding=table + model.embedding.positions * model.width if has_embedding else 0.0,
        head=float(model.params.terms["final norm"]) + own_head if has_head else 0.0,
        body=sum(each.layer.num_params * count for each, count in zip(layers, counts, strict=True)) / layout.tensor,
        in_flight=1.0 if layout.pipeline == 1 else _in_flight(layout, rank),
        has_loss=has_head,
    )


def _in_flight(layout: Layout, rank: int) -> float:
    ranks, micro_batches, chunks = layout.pipeline, layout.accumulation, layout.chunks
    if layout.schedule == "gpipe":
        return float(micro_batches)
    if layout.schedule == "zbv":
        return float(min(micro_batches, ranks))
    warm_up = float(ranks - rank)
    if chunks > 1:  # interleaved: so many chunks of 1/chunks of the rank's layers
        warm_up = ((ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1) / chunks
    return float(min(micro_batches, warm_up))


def _rank_memory(model: ModelSpec, step: StepSpec, layout: Layout, rank: RankLoad) -> MemoryEstimate:
    moments = (_native_moments if step.native else _published_moments)(model, step, layout, rank)
    sums = {name: sum(terms.values()) for name, terms in moments.items()}
    moment = max(sums, key=sums.__getitem__)
    terms = {name: size for name, size in moments[moment].items() if size > 0}
    allocated = sum(terms.values())
    reserved = allocated * (1 + (SHARDED_SLACK if layout.weight_shards > 1 else SLACK))
    groups = sum(degree > 1 for degree in (layout.data, layout.tensor, layout.pipeline, layout.context))
    outside = CONTEXT_BYTES + NCCL_BYTES_PER_GROUP * groups
    return MemoryEstimate(
        terms=terms,
        allocated=allocated,
        reserved=reserved,
        total=reserved + outside,
        needed=allocated * (1 + TIGHT) + outside,
        moment=moment,
        stage=rank.index,
    )


def _published_moments(model: ModelSpec, step: StepSpec, layout: Layout, rank: RankLoad) -> Moments:
    """Engines that published rows describe: the loss, the end of the backward pass, the optimizer."""
    states = _states(step, layout, rank)
    gathered, reduce_buffers = _gathered_weights(step, layout, rank)
    tokens = layout.micro_batch * step.seq_len / layout.context
    activations = sum(each.kept * count for each, count in rank.layers) * tokens * rank.in_flight
    one_layer = max(each.transient for each, _ in rank.layers) * tokens
    # Without recompute the backward pass frees a layer's activations before the last gradients appear.
    late = activations + one_layer
    if step.recompute == "none":
        late = activations / max(1.0, rank.num_layers * rank.in_flight)
    always = {**states.always, "inputs": _input_bytes(model, step, layout, tokens)}
    logits = _logits_bytes(model, step, layout, tokens) if rank.has_loss else 0.0
    return {
        "loss": {
            **always,
            "gradients": states.early_gradients,
            "unsharded weights": gathered,
            "activations": activations,
            "logits and loss": logits,
        },
        "backward": {
            **always,
            "gradients": states.gradients,
            "unsharded weights": gathered,
            "reduction buffers": reduce_buffers,
            "activations": late,
        },
        "optimizer": {**always, "gradients": states.gradients, "optimizer temporaries": states.update},
    }


def _native_moments(model: ModelSpec, step: StepSpec, layout: Layout, rank: RankLoad) -> Moments:
    """Our engine: the loss, the last layer's backward pass (everything kept still lives), the first layer's, the
    optimizer."""
    states = _states(step, layout, rank)
    _, reduce_buffers = _gathered_weights(step, layout, rank)
    tokens = layout.micro_batch * step.seq_len / layout.context
    kept = sum(each.kept * count for each, count in rank.layers) * tokens
    if step.fused_projections:  # fused weights are kept for the backward pass: 16 bits, in FP8 the cast ones
        size = 1.0 if step.precision == "fp8" else 2.0
        kept += size * sum(each.layer.fusable_weights * count for each, count in rank.layers) / layout.tensor
    activations = kept * rank.in_flight
    one_layer = max(each.transient for each, _ in rank.layers) * tokens
    weight_bytes = 4.0 if step.precision == "fp32" else 2.0
    head = weight_bytes * (rank.embedding if model.tied else rank.head) if rank.has_loss else 0.0
    always = {
        **states.always,
        "inputs": _input_bytes(model, step, layout, tokens),
        "workspaces": WORKSPACE_BYTES,
    }
    tables = sum(block.constant_bytes(step, layout) for block in model.blocks)
    mask = _mask_bytes(step, layout, rank)
    early, late = _native_gathered(model, step, layout, rank)
    # A pipeline whose micro-batches are all in flight at once has made no gradient yet when it is fullest.
    all_in_flight = layout.pipeline > 1 and layout.accumulation <= rank.in_flight
    summed = 0.0 if all_in_flight else states.early_gradients
    backward = {**always, "unsharded weights": late, "reduction buffers": reduce_buffers}
    last_layers = activations / max(1.0, rank.num_layers * rank.in_flight) * max(1.0, rank.in_flight - 1.0)
    moments = {
        "loss": {
            **always,
            "gradients": summed,
            "last reduction": _lingering_reduction(step, layout, rank),
            "unsharded weights": early,
            "activations": activations,
            "decay matrix": tables,
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
            "gradients": states.gradients,
            "activations": last_layers,
            "one layer's backward": one_layer,
        },
        "optimizer": {**always, "gradients": states.gradients, "optimizer temporaries": states.update},
    }
    reduced_once = layout.devices > 1 and (not step.sync.every_micro_batch or layout.pipeline > 1)
    if layout.accumulation > 1 and reduced_once and rank.embedding and step.precision not in ("fp32", "bf16_pure"):
        # Gradients are summed over micro-batches before the one reduction. The embedding's comes last and lies there
        # as the old sum, the new one, and both in 16 bits: 12 bytes a value of this rank's rows.
        share = 1.0 - 1.0 / (layout.chunks * max(1.0, rank.in_flight))
        moments["backward, embedding"] = {
            **always,
            "gradients": max(0.0, states.gradients - 4.0 * rank.embedding),
            "embedding's gradient": 12.0 * rank.embedding,
            "activations": activations * share,
        }
    return moments


def _mask_bytes(step: StepSpec, layout: Layout, rank: RankLoad) -> float:
    """Document borders: one byte per pair of positions, and the values that each layer's kernel makes of it and
    keeps."""
    if not step.mask_documents:
        return 0.0
    pairs = layout.micro_batch * float(step.seq_len) ** 2 / layout.context
    masked = sum(
        count
        for each, count in rank.layers
        if any(isinstance(branch.block, AttentionSpec) for branch in each.layer.branches)
    )
    return pairs * (1.0 + step.bytes_per_value * masked * rank.in_flight)


def _native_gathered(model: ModelSpec, step: StepSpec, layout: Layout, rank: RankLoad) -> tuple[float, float]:
    """Gathered weights at the loss (head, and the buffer of the newest gather) and in the backward pass (head, two
    layers).

    zero1 and zero2 keep all of them as the 16-bit copy, and the buffer. A tied table belongs to the whole model and
    stays."""
    if layout.devices == 1 or layout.shard == "none" or layout.pipeline > 1:
        return 0.0, 0.0
    size = 2.0 if step.precision != "fp32" else 4.0
    newest = rank.params_per_layer if model.tied else rank.head
    if layout.shard in ("zero1", "zero2"):
        return (size * newest if layout.accumulation == 1 else 0.0), 0.0
    head = rank.embedding if model.tied else rank.head
    return size * (head + newest), size * (head + (3.0 if model.tied else 2.0) * rank.params_per_layer)


def _lingering_reduction(step: StepSpec, layout: Layout, rank: RankLoad) -> float:
    """Between micro-batches FSDP holds the input of its last reduction: the embedding's gradient in fp32, under zero2
    also in 16 bits."""
    one_reduction = layout.accumulation == 1 or layout.pipeline > 1 or not step.sync.every_micro_batch
    if layout.devices == 1 or one_reduction:
        return 0.0
    return rank.embedding * (6.0 if step.precision != "fp32" and layout.shard == "zero2" else 4.0)


def backward_gradients(layer: LayerSpec, step: StepSpec, layout: Layout) -> float:
    """Bytes per token of gradients that live only while one layer's backward pass runs."""
    stream = step.bytes_per_value * _width(layer) / layout.sequence_split
    largest = max(branch.block.transient_bytes(step, layout) for branch in layer.branches)
    return stream * (2.0 if step.recompute == "full" else 1.0) + largest


def _width(layer: LayerSpec) -> int:
    return layer.products[-1][0].outputs


@dataclass(frozen=True, slots=True)
class _States:
    always: dict[str, float]
    early_gradients: float
    """When the loss is computed: none yet, unless micro-batches are accumulated or a buffer is kept."""
    gradients: float
    update: float
    """Temporaries of the optimizer step."""


def _states(step: StepSpec, layout: Layout, rank: RankLoad) -> _States:
    """Weights, masters, moments and gradients of one device."""
    moments = float(step.moment_tensors * MOMENT_BYTES.get(step.moments, 4))
    gradient_shards = layout.shard_size if layout.shard == "zero2" else layout.weight_shards
    if ENGINE_PROFILES[step.engine].fp32_weights or step.precision in ("fp32", "bf16_pure"):
        states = _fp32_states(step, layout, rank.params, moments, gradient_shards)
    else:
        states = _resident_states(step, layout, rank.params, moments, gradient_shards)
    if layout.offload == "none":
        return states
    moved = {"optimizer states", "master weights"} | ({"weights"} if layout.offload == "parameters" else set())
    always = {name: size for name, size in states.always.items() if name not in moved}
    return _States(always, states.early_gradients, states.gradients, 0.0)


def _fp32_states(step: StepSpec, layout: Layout, params: float, moments: float, gradient_shards: int) -> _States:
    """fp32 weights are the master (bf16_pure: everything in 16 bits); gradients vanish after the step.

    zero1 and zero2 divide masters, moments and (at the end) gradients as full sharding does, but keep the gathered
    16-bit weights."""
    pure = step.precision == "bf16_pure"
    divided = layout.shard_size if layout.shard in ("zero1", "zero2") else layout.weight_shards
    always = {
        "weights": (2.0 if pure else 4.0) * params / divided,
        "optimizer states": (min(moments, 4.0) if pure else moments) * params / layout.shard_size,
    }
    gathered = layout.shard not in ("full", "hybrid") and not (pure and divided == 1)
    if gathered and step.precision != "fp32":
        always["16-bit copy"] = 2.0 * params  # gathered or cast weights live until the backward pass is done
    if step.native and layout.devices == 1 and step.precision in ("bf16", "fp8"):
        # 16-bit gradients of 16-bit weights; accumulated ones are summed in fp32.
        summed = 4.0 * params if layout.accumulation > 1 else 0.0
        return _States(always, summed, summed or 2.0 * params, 0.0)
    size = 2.0 if pure or step.gradient_precision == "bf16" else 4.0
    undivided = layout.shard == "zero1" and layout.accumulation > 1  # until the one reduction per step
    gradients = size * params / (1 if undivided else divided if layout.shard == "zero1" else gradient_shards)
    early = gradients if layout.accumulation > 1 or layout.pipeline > 1 else 0.0
    return _States(always, early, gradients, 0.0)


def _resident_states(step: StepSpec, layout: Layout, params: float, moments: float, gradient_shards: int) -> _States:
    """16-bit weights and a gradient buffer stay; fp32 masters and moments belong to the optimizer, which is often
    divided."""
    engine = ENGINE_PROFILES[step.engine]
    habit = "bf16" if step.precision == "fp16" else engine.gradient_precision
    if step.gradient_precision == "fp32" and engine.keeps_both_gradients:
        size = 6.0
    else:
        size = 4.0 if (step.gradient_precision or habit) == "fp32" else 2.0
    gradients = size * params / gradient_shards
    always = {
        "weights": 2.0 * params / layout.weight_shards,
        "master weights": 4.0 * params / layout.shard_size,
        "optimizer states": moments * params / layout.shard_size,
    }
    if engine.bucket_bytes and step.gradient_precision is None:
        always["all-reduce buckets"] = min(engine.bucket_bytes, 4.0 * params)
    update = 4.0 * params / layout.shard_size if size == 2.0 else 0.0  # 16-bit gradients are widened for the step
    return _States(always, gradients, gradients, update)


def _gathered_weights(step: StepSpec, layout: Layout, rank: RankLoad) -> tuple[float, float]:
    """Full sharding: gathered weights (embedding and head stay, two layers live at a time), and gradients being
    reduced."""
    if layout.weight_shards <= 1:
        return 0.0, 0.0
    size = 2.0 if step.precision != "fp32" else 4.0
    gathered = size * (rank.embedding + rank.head + 2.0 * rank.params_per_layer)
    return gathered, (size + 4.0) * rank.params_per_layer  # 16-bit gradients and the fp32 copy that is reduced


def layer_activations(layer: LayerSpec, step: StepSpec, layout: Layout) -> float:
    """Bytes per token that one layer keeps for its backward pass without recompute."""
    return sum(
        branch.block.kept_bytes(step, layout) + sum(norm.kept_bytes(step, layout) for norm in branch.norms)
        for branch in layer.branches
    )


def kept_activations(layer: LayerSpec, step: StepSpec, layout: Layout) -> float:
    """Bytes per token and layer that live from the forward to the backward pass under the recompute policy."""
    layer_input = step.bytes_per_value * _width(layer) / layout.sequence_split
    if step.recompute == "full":
        return layer_input
    full = layer_activations(layer, step, layout)
    if step.recompute == "selective":
        return min(full, _selective_activations(layer, step, layout, full))
    if step.recompute == "budget":
        return layer_input + (full - layer_input) * step.recompute_budget
    return full


def _selective_activations(layer: LayerSpec, step: StepSpec, layout: Layout, full: float) -> float:
    """The layer's input, what attention keeps, and the outputs of every second product except the last."""
    size = float(step.bytes_per_value)
    if not ENGINE_PROFILES[step.engine].fp32_weights:  # Megatron's policy: only the square of scores is recomputed
        mixing = [m for branch in layer.branches if (m := branch.block.mixing(step)) is not None]
        return full - sum(2.0 * size * m.scores for m in mixing) / layout.tensor
    stream = size * _width(layer) / layout.sequence_split
    groups = layer.product_groups if step.fused_projections else [(product,) for product, _ in layer.products]
    kept = stream + sum(branch.block.selective_bytes(step, layout) for branch in layer.branches)
    for number, group in enumerate(groups[:-1]):
        if number % 2 == 0:
            split = layout.tensor if group[0].divided == "outputs" else layout.sequence_split
            kept += size * sum(product.outputs for product in group) / split
    if step.native:
        if len(groups) % 2 and not step.compile:
            kept += stream  # only code that is not compiled keeps the last product, which nobody reads
        if layout.tensor > 1:
            kept += stream  # sums over tensor-parallel ranks are kept
    return kept


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
