"""How much memory does one device need for a training step? Pure arithmetic: no torch, no files, no network.

A step has three moments at which memory can peak: when the forward pass is done and the loss is computed (all activations
live), in the backward pass of the first layers (all gradients live), and in the optimizer. The estimate is the highest of
them, on the fullest pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.cost.params import count
from windlass.cost.shapes import Shape
from windlass.cost.work import Degrees, Work

GIB = 2**30

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
CONTEXT_BYTES = 0.6e9
"""CUDA or ROCm context with loaded kernels, outside the allocator."""
NCCL_BYTES_PER_GROUP = 0.7e9
"""Buffers of one communicator (data, tensor, pipeline, context), outside the allocator."""
SLACK = 0.12
"""Reserved beyond allocated: blocks that the caching allocator holds but cannot hand out, as long as there is room."""
SHARDED_SLACK = 0.25
"""The same under full sharding, whose gathers and reductions run on streams of their own: the allocator keeps a pool for each stream, and
one cannot use what another has free."""
TIGHT = 0.10
"""What remains of that slack when memory is short and the allocator gives cached blocks back; also covers the error of the estimate."""
SQUARE_BYTES = 4.0
"""One score of our own engine's attention without a fused kernel: torch computes it in fp32 whatever the model's precision."""
WORKSPACE_BYTES = 72e6
"""Scratch of cuBLAS and cuDNN inside the allocator: the same on every H200 row of ours."""
BUCKET_BYTES = 2.0e9
"""DeepSpeed's reduce and all-gather buckets: twice 5e8 values of 16 bits."""


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
    """Pipeline stage with the highest peak."""


@dataclass(frozen=True, slots=True)
class _Stage:
    index: int
    layers: float
    embedding: float
    """Parameters of the embedding on this device (after tensor division)."""
    head: float
    body: float
    in_flight: float
    """Micro-batches whose activations live at the same time."""
    has_loss: bool
    fusable: float = 0.0
    """Of the body: weights that a fused product lays side by side."""

    @property
    def params(self) -> float:
        return self.embedding + self.head + self.body


def memory(shape: Shape, work: Work, layout: Degrees, devices_per_node: int | None = None) -> MemoryEstimate:
    """Peak memory of the fullest device."""
    best: MemoryEstimate | None = None
    for stage in _stages(shape, work, layout):
        estimate = _stage_memory(shape, work, layout, stage, devices_per_node)
        if best is None or estimate.allocated > best.allocated:
            best = estimate
    assert best is not None
    return best


def _stages(s: Shape, work: Work, layout: Degrees) -> list[_Stage]:
    """The stages that can be the fullest: the first (most micro-batches in flight, embedding) and the last (head and logits)."""
    params, t, p = count(s), layout.tensor, layout.pipeline
    table = s.padded_vocab * s.width / t
    first_table = table + s.positions * s.width
    norm = float(params.terms["final norm"])
    layers = s.layers / p
    body = params.per_layer * layers / t
    inner = s.width + s.value_width if s.arch == "retnet" else s.attention_width // 2 + s.kv_width
    fusable = (2.0 * inner + (2.0 * s.ffn if s.glu else 0.0)) * s.width * layers / t
    if p == 1:
        return [_Stage(0, layers, first_table, norm + (0.0 if s.tied else table), body, 1.0, True, fusable)]
    first = _Stage(0, layers, first_table, 0.0, body, _in_flight(layout, work, 0), False, fusable)
    last = _Stage(p - 1, layers, 0.0, norm + table, body, _in_flight(layout, work, p - 1), True, fusable)
    return [first, last]


def _in_flight(layout: Degrees, work: Work, stage: int) -> float:
    p, m, v = layout.pipeline, work.accumulation, layout.chunks
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "zbv":
        return float(min(m, p))
    warm = float(p - stage)
    if v > 1:  # interleaved: (p - stage - 1) * 2 + (v - 1) * p + 1 chunks of 1/v of the stage
        warm = ((p - stage - 1) * 2 + (v - 1) * p + 1) / v
    return float(min(m, warm))


def _stage_memory(shape: Shape, work: Work, layout: Degrees, stage: _Stage, per_node: int | None) -> MemoryEstimate:
    moments = (_native_moments if work.native else _moments)(shape, work, layout, stage, per_node)
    name = max(moments, key=lambda n: sum(moments[n].values()))
    terms = {k: v for k, v in moments[name].items() if v > 0}
    allocated = sum(terms.values())
    reserved = allocated * (1 + (SHARDED_SLACK if layout.shards(per_node) > 1 else SLACK))
    groups = sum(d > 1 for d in (layout.data, layout.tensor, layout.pipeline, layout.context))
    outside = CONTEXT_BYTES + NCCL_BYTES_PER_GROUP * groups
    return MemoryEstimate(
        terms=terms,
        allocated=allocated,
        reserved=reserved,
        total=reserved + outside,
        needed=allocated * (1 + TIGHT) + outside,
        moment=name,
        stage=stage.index,
    )


Moments = dict[str, dict[str, float]]


def _moments(shape: Shape, work: Work, layout: Degrees, stage: _Stage, per_node: int | None) -> Moments:
    """Engines that published rows describe: the loss, the end of the backward pass, the optimizer."""
    states = _states(work, layout, stage, per_node)
    unsharded, reduce_buffers = _unsharded(work, layout, stage, per_node)
    layer, kept = layer_activations(shape, work, layout), kept_activations(shape, work, layout)
    tokens = work.micro_batch * work.seq_len / layout.context
    activations = kept * tokens * stage.layers * stage.in_flight
    one_layer = max(0.0, layer - kept) * tokens
    # Without recompute the backward pass frees a layer's activations before the last gradients appear.
    late = (
        activations + one_layer if work.recompute != "none" else activations / max(1.0, stage.layers * stage.in_flight)
    )
    always = {**states.always, "inputs": _inputs(shape, work, layout, tokens)}
    return {
        "loss": {
            **always,
            "gradients": states.early_gradients,
            "unsharded weights": unsharded,
            "activations": activations,
            "logits and loss": _logits(shape, work, layout, tokens) if stage.has_loss else 0.0,
        },
        "backward": {
            **always,
            "gradients": states.gradients,
            "unsharded weights": unsharded,
            "reduction buffers": reduce_buffers,
            "activations": late,
        },
        "optimizer": {**always, "gradients": states.gradients, "optimizer temporaries": states.step},
    }


def _native_moments(shape: Shape, work: Work, layout: Degrees, stage: _Stage, per_node: int | None) -> Moments:
    """Our own engine: the loss, the last layer's backward pass (all that was kept still lives), the first layer's, the optimizer."""
    states = _states(work, layout, stage, per_node)
    _, reduce_buffers = _unsharded(work, layout, stage, per_node)
    tokens = work.micro_batch * work.seq_len / layout.context
    kept = kept_activations(shape, work, layout) * tokens
    activations = (kept * stage.layers + _side_by_side(work, stage) * stage.layers) * stage.in_flight
    one_layer = backward_transient(shape, work, layout) * tokens
    table = 2.0 if work.precision != "fp32" else 4.0
    head = table * (stage.head if not shape.tied else stage.embedding) if stage.has_loss else 0.0
    always = {**states.always, "inputs": _inputs(shape, work, layout, tokens), "workspaces": WORKSPACE_BYTES}
    square = 4.0 * shape.heads / layout.tensor * work.seq_len**2 if shape.arch == "retnet" and not shape.chunk else 0.0
    early, late = _native_unsharded(shape, work, layout, stage)
    # A pipeline whose micro-batches are all in flight at once has made no gradient yet when it is fullest.
    summed = 0.0 if layout.pipeline > 1 and work.accumulation <= stage.in_flight else states.early_gradients
    backward = {**always, "unsharded weights": late, "reduction buffers": reduce_buffers}
    return {
        "loss": {
            **always,
            "gradients": summed,
            "last reduction": _lingering(work, layout, stage),
            "unsharded weights": early,
            "activations": activations,
            "decay matrix": square,
            "document mask": _mask(work, layout, stage),
            "logits and loss": _logits(shape, work, layout, tokens) if stage.has_loss else 0.0,
        },
        "backward, last layer": {
            **backward,
            "gradients": max(summed, head),
            "activations": activations,
            "document mask": _mask(work, layout, stage),
            "one layer's backward": one_layer,
        },
        "backward, first layer": {
            **backward,
            "gradients": states.gradients,
            "activations": activations / max(1.0, stage.layers * stage.in_flight) * max(1.0, stage.in_flight - 1.0),
            "one layer's backward": one_layer,
        },
        **_table_moment(work, layout, stage, {**always, "gradients": states.gradients}, activations),
        "optimizer": {**always, "gradients": states.gradients, "optimizer temporaries": states.step},
    }


def _mask(work: Work, layout: Degrees, stage: _Stage) -> float:
    """Borders between documents: one byte for each pair of positions, and the values that each layer's kernel makes of it and keeps."""
    if not work.masked:
        return 0.0
    pairs = work.micro_batch * float(work.seq_len) ** 2 / layout.context
    return pairs * (1.0 + work.bytes_per_value * stage.layers * stage.in_flight)


def _summed_whole(work: Work, layout: Degrees) -> bool:
    """Micro-batches' gradients are summed before the one reduction."""
    return work.accumulation > 1 and layout.devices > 1 and (layout.sync != "every" or layout.pipeline > 1)


def _table_moment(work: Work, layout: Degrees, stage: _Stage, base: dict[str, float], activations: float) -> Moments:
    """Gradients that are summed whole over micro-batches: the embedding's comes last and lies there as old sum, new one, and both in 16
    bits: 12 bytes a value of this rank's rows."""
    if not _summed_whole(work, layout) or not stage.embedding or work.precision in ("fp32", "bf16_pure"):
        return {}
    whole = 12.0 * stage.embedding
    gradients = max(0.0, base["gradients"] - 4.0 * stage.embedding)
    others = activations * (1.0 - 1.0 / (layout.chunks * max(1.0, stage.in_flight)))
    return {
        "backward, embedding": {**base, "gradients": gradients, "embedding's gradient": whole, "activations": others}
    }


def _native_unsharded(s: Shape, work: Work, layout: Degrees, stage: _Stage) -> tuple[float, float]:
    """Gathered weights at the loss (head, and the buffer in which the newest were gathered) and in the backward pass (head, two layers).
    zero1 and zero2 keep all of them, as the 16-bit copy, and the buffer. A tied table belongs to the whole model and stays."""
    if layout.devices == 1 or layout.shard == "none" or layout.pipeline > 1:
        return 0.0, 0.0
    width = 2.0 if work.precision != "fp32" else 4.0
    layer = stage.body / max(1.0, stage.layers)
    newest = layer if s.tied else stage.head
    if layout.shard in ("zero1", "zero2"):
        return (width * newest if work.accumulation == 1 else 0.0), 0.0
    head = stage.embedding if s.tied else stage.head
    return width * (head + newest), width * (head + (3.0 if s.tied else 2.0) * layer)


def _lingering(work: Work, layout: Degrees, stage: _Stage) -> float:
    """Between micro-batches FSDP holds the input of its last reduction: the embedding's gradient in fp32, under zero2 also in 16 bits."""
    if layout.devices == 1 or work.accumulation == 1 or layout.pipeline > 1 or layout.sync != "every":
        return 0.0
    return stage.embedding * (6.0 if work.precision != "fp32" and layout.shard == "zero2" else 4.0)


def _side_by_side(work: Work, stage: _Stage) -> float:
    """Bytes of one layer's fused weights, kept for the backward pass: 16 bits, in FP8 the cast ones."""
    if not work.fuse:
        return 0.0
    return stage.fusable / max(1.0, stage.layers) * (1.0 if work.precision == "fp8" else 2.0)


def backward_transient(s: Shape, work: Work, layout: Degrees) -> float:
    """Bytes per token that live only while one layer's backward pass runs: what is computed again, and gradients on their way.

    Read off four H200 rows (selective and full at two sizes): gradients of gate and up beside both, and of the residual stream."""
    d, t = float(work.bytes_per_value), layout.tensor
    stream = d * s.width / (t if layout.sequence_parallel else 1)
    inner = d * s.ffn / t
    # Gradients of scores and of shares lie side by side.
    square = 0.0 if work.flash or s.arch == "retnet" else 2.0 * SQUARE_BYTES * s.heads * work.seq_len / t
    if work.recompute == "none":
        return stream + max(inner, square)
    again = max(0.0, layer_activations(s, work, layout) - kept_activations(s, work, layout))
    return again + stream * (2.0 if work.recompute == "full" else 1.0) + max(2.0 * inner, square)


@dataclass(frozen=True, slots=True)
class _States:
    always: dict[str, float]
    early_gradients: float
    """When the loss is computed: none yet, unless micro-batches are accumulated or a buffer is kept."""
    gradients: float
    step: float
    """Temporaries of the optimizer step."""


def _states(work: Work, layout: Degrees, stage: _Stage, per_node: int | None) -> _States:
    """Weights, masters, moments and gradients of one device."""
    p, shards, state_shards = stage.params, layout.shards(per_node), layout.state_shards(per_node)
    moments = (2.0 if work.optimizer.startswith("adam") else 1.0) * MOMENT_BYTES.get(work.moments, 4)
    gradient_shards = state_shards if layout.shard == "zero2" else shards
    if work.engine == "torch" or work.precision in ("fp32", "bf16_pure"):
        states = _torch_states(work, layout, p, shards, state_shards, moments, gradient_shards)
    else:
        states = _buffer_states(work, p, shards, state_shards, moments, gradient_shards)
    if layout.offload == "none":
        return states
    moved = {"optimizer states", "master weights"} | ({"weights"} if layout.offload == "parameters" else set())
    return _States(
        {k: v for k, v in states.always.items() if k not in moved}, states.early_gradients, states.gradients, 0.0
    )


def _torch_states(
    work: Work, layout: Degrees, p: float, shards: int, state_shards: int, moments: float, gradient_shards: int
) -> _States:
    """fp32 weights are the master (bf16_pure: everything in 16 bits); gradients have the weights' precision and vanish after the step.

    zero1 and zero2 divide masters, moments and (at the end) gradients as full sharding does, but keep the gathered 16-bit weights."""
    pure = work.precision == "bf16_pure"
    divided = state_shards if layout.shard in ("zero1", "zero2") else shards
    width = 2.0 if pure else 4.0
    narrow = 2.0 if pure or work.gradients == "bf16" else 4.0
    always = {
        "weights": width * p / divided,
        "optimizer states": (min(moments, 4.0) if pure else moments) * p / state_shards,
    }
    if (
        shards == 1
        and layout.shard not in ("full", "hybrid")
        and not (pure and divided == 1)
        and work.precision != "fp32"
    ):
        always["16-bit copy"] = 2.0 * p  # gathered or cast weights live until the backward pass is done
    if work.native and layout.devices == 1 and work.precision in ("bf16", "fp8"):
        # 16-bit gradients of 16-bit weights; accumulated ones are summed in fp32.
        summed = 4.0 * p if work.accumulation > 1 else 0.0
        return _States(always, summed, summed or 2.0 * p, 0.0)
    whole = layout.shard == "zero1" and work.accumulation > 1  # one reduction per step: sums are whole until then
    gradient = narrow * p / (1 if whole else divided if layout.shard == "zero1" else gradient_shards)
    early = gradient if work.accumulation > 1 or layout.pipeline > 1 else 0.0
    return _States(always, early, gradient, 0.0)


def _buffer_states(
    work: Work, p: float, shards: int, state_shards: int, moments: float, gradient_shards: int
) -> _States:
    """16-bit weights and a gradient buffer stay; fp32 masters and moments belong to the optimizer, which is often divided."""
    kept = work.gradients or ("fp32" if work.engine == "megatron" and work.precision != "fp16" else "bf16")
    # An explicit fp32 accumulation beside 16-bit gradients (nanotron, DeepSpeed's BF16Optimizer) holds both.
    width = 6.0 if work.gradients == "fp32" and work.engine != "megatron" else 4.0 if kept == "fp32" else 2.0
    gradient = width * p / gradient_shards
    always = {
        "weights": 2.0 * p / shards,
        "master weights": 4.0 * p / state_shards,
        "optimizer states": moments * p / state_shards,
    }
    if work.engine == "deepspeed" and work.gradients is None:
        always["all-reduce buckets"] = min(BUCKET_BYTES, 4.0 * p)
    step = 4.0 * p / state_shards if width == 2.0 else 0.0  # 16-bit gradients are widened for the step
    return _States(always, gradient, gradient, step)


def _unsharded(work: Work, layout: Degrees, stage: _Stage, per_node: int | None) -> tuple[float, float]:
    """Full sharding gathers layers when they are needed: the embedding and head stay, two layers live at a time; and gradients on their way out."""
    if layout.shards(per_node) <= 1:
        return 0.0, 0.0
    width = 2.0 if work.precision != "fp32" else 4.0
    layer = stage.body / max(1.0, stage.layers)
    gathered = width * (stage.embedding + stage.head + 2.0 * layer)
    return gathered, (width + 4.0) * layer  # 16-bit gradients and the fp32 copy that is reduced


def layer_activations(s: Shape, work: Work, layout: Degrees) -> float:
    """Bytes per token that one layer keeps for its backward pass without recompute."""
    if work.native:
        return _native_layer(s, work, layout)
    d, t = float(work.bytes_per_value), layout.tensor
    spread = t if layout.sequence_parallel else 1  # norms and residuals are divided only along the sequence
    residuals = 4.0 * d * s.width / spread  # the inputs of both norms and of the products that follow them
    attention = d * (2.0 * s.attention_width + 2.0 * s.kv_width) / t + 4.0 * s.heads / t
    if not work.flash:
        attention += 2.0 * d * s.heads * work.seq_len / t
    # SwiGLU keeps gate, up and their product; eager code also the activated gate. GELU keeps its input and output.
    hidden = ((3.0 if work.compile else 4.0) if s.glu else 2.0) * d * s.ffn / t
    return residuals + attention + hidden


def _native_layer(s: Shape, work: Work, layout: Degrees) -> float:
    """The same for our own blocks. Compiled, a norm keeps its input and output; FP8 products work the output out again, and the product
    of gate and up, from what is kept anyway. Eager norms also keep the input in fp32 and what they multiply with the weight."""
    d, t = float(work.bytes_per_value), layout.tensor
    stream = d * s.width / (t if layout.sequence_parallel else 1)
    eight = work.precision == "fp8" and work.compile
    # Divided, what the products read is the norms' output gathered from all ranks: whole on each, in FP8 as it was cast.
    outputs = (2.0 if eight else 2.0 * d) * s.width if t > 1 else 0.0 if eight else 2.0 * stream
    norms = outputs + (2.0 if work.compile else 4.0 if work.precision == "fp32" else 6.0) * stream
    hidden = d * s.ffn / t * ((4.0 if not work.compile else 2.0 if eight else 3.0) if s.glu else 2.0)
    return norms + (_retention if s.arch == "retnet" else _attention)(s, work, d) / t + hidden


def _attention(s: Shape, work: Work, d: float) -> float:
    """Turned queries and keys, values, the output and the logarithms of its sums; fused products hold the unturned ones too. Without a
    fused kernel torch works in fp32 and keeps the square of shares (69.0 GiB measured on an H200, where two of 16 bits would do)."""
    keys = s.attention_width if work.every_head else s.kv_width
    kept = d * (2.0 * s.attention_width + 2.0 * keys) + 4.0 * s.heads
    kept += d * (s.attention_width + s.kv_width) if work.fuse else 0.0
    return kept + (0.0 if work.flash else SQUARE_BYTES * s.heads * work.seq_len)


def _retention(s: Shape, work: Work, d: float) -> float:
    """Turned queries and keys; values, gate, output, its norm and the gated one; decayed scores; chunkwise also the states between chunks."""
    fused = (
        2.0 * s.width + s.value_width if work.fuse else 0.0
    )  # side by side with the gate, unturned ones and values stay too
    kept = d * (2.0 * s.width + 4.0 * s.value_width + fused)
    if not work.compile:
        kept += 2.0 * d * s.value_width  # the norm's input in fp32
    span = s.chunk if s.chunk and s.chunk < work.seq_len else work.seq_len
    kept += d * s.heads * span
    return kept + (d * s.width * s.value_width / (s.heads * span) if span < work.seq_len else 0.0)


def kept_activations(s: Shape, work: Work, layout: Degrees) -> float:
    """Bytes per token and layer that live from the forward to the backward pass under the recompute policy."""
    full = layer_activations(s, work, layout)
    spread = layout.tensor if layout.sequence_parallel else 1
    block_input = work.bytes_per_value * s.width / spread
    if work.recompute == "full":
        return block_input
    if work.recompute == "selective":
        return min(full, _selective(s, work, layout))
    if work.recompute == "budget":
        return block_input + (full - block_input) * work.recompute_budget
    return full


def _selective(s: Shape, work: Work, layout: Degrees) -> float:
    d, t = float(work.bytes_per_value), layout.tensor
    spread = t if layout.sequence_parallel else 1
    if work.native:
        return _native_selective(s, work, layout)
    if work.engine != "torch":  # Megatron's: only the square of scores is worked out again
        return layer_activations(s, work, layout) - (0.0 if work.flash else 2.0 * d * s.heads * work.seq_len / t)
    # Per-op policy: the block's input, attention's output and every second product (queries, values, gate); of the last nobody reads the output.
    return d * (s.width / spread + (2.0 * s.attention_width + s.kv_width + s.ffn) / t) + 4.0 * s.heads / t


def _native_selective(s: Shape, work: Work, layout: Degrees) -> float:
    """The block's input, attention with its output, and every second product: queries, values, gate (fused: both fused ones). The last
    product is every second too, but only code that is not compiled holds what nobody reads."""
    d, t = float(work.bytes_per_value), layout.tensor
    stream = d * s.width / (t if layout.sequence_parallel else 1)
    keys = s.width if s.arch == "retnet" else s.attention_width
    values = s.value_width if s.arch == "retnet" else s.kv_width
    gates = s.ffn * (2.0 if s.glu and work.fuse else 1.0)
    products = keys + values + ((s.width + s.value_width if s.arch == "retnet" else s.kv_width) if work.fuse else 0.0)
    mixed = 0.0 if s.arch == "retnet" else d * s.attention_width + 4.0 * s.heads
    idle = (0.0 if work.compile or work.fuse else 1.0) + (1.0 if t > 1 else 0.0)  # divided: sums over ranks are kept
    return stream * (1.0 + idle) + (d * (products + gates) + mixed) / t


def _logits(s: Shape, work: Work, layout: Degrees, tokens: float) -> float:
    """plain: 16-bit logits, their fp32 copy and its gradient. compiled: logits and gradient in one pass. chunked and fused: one chunk's
    logits, and both gradients, which are worked out on the way forward."""
    vocab = s.padded_vocab / layout.tensor
    if work.loss in ("chunked", "fused") or (work.native and layout.tensor > 1):
        return _chunked(s, work, layout, tokens, vocab)
    # Our own plain loss is not compiled: softmax and two gradients in fp32. Elsewhere a plain loss holds 8 bytes (logits,
    # softmax and two gradients in 16 bits) or 12 (softmax and two gradients in fp32); which one is not said, so 10 are taken.
    per_value = {"plain": 12.0 if work.native else 10.0, "compiled": 8.0, "inplace": 4.0}.get(work.loss, 10.0)
    if work.engine != "torch":
        # Softmax overwrites the fp32 logits and is kept for the gradient; engines of before 2022 held logits, softmax and gradient apart.
        per_value = 8.0 if work.flash else 14.0
    elif layout.tensor > 1:
        per_value += 4.0  # on a divided vocabulary softmax and its gradient are separate operations
    return tokens * vocab * per_value


def _chunked(s: Shape, work: Work, layout: Degrees, tokens: float, vocab: float) -> float:
    """A chunk's logits, their gradient and that of the chunk before; then the old and the new sum of the weights' gradient. On a divided
    vocabulary the softmax is not compiled (25 bytes per logit), and the hidden states are gathered from all ranks."""
    chunk = min(tokens, work.loss_chunk)
    hidden = tokens * s.width * work.bytes_per_value
    if not work.native:
        return chunk * vocab * 6.0 + 4.0 * vocab * s.width + hidden
    divided = layout.tensor > 1
    sums = (1.0 if tokens <= chunk else 2.0) * 4.0 * vocab * s.width
    again = 0.0 if tokens <= chunk else 2.0  # the gradient of the chunk before
    softmax = chunk * vocab * ((23.0 if divided else 4.0) + again) + (4.0 * vocab * s.width if again else 0.0)
    return max(softmax, chunk * vocab * 2.0 + sums) + hidden * (2.0 if divided else 1.0)


def _inputs(s: Shape, work: Work, layout: Degrees, tokens: float) -> float:
    """Token numbers, and the output of embedding and final norm (eager: with its fp32 input)."""
    spread = layout.tensor if layout.sequence_parallel else 1
    values = 4.0 if work.native and not work.compile and work.precision != "fp32" else 2.0
    return tokens * (16.0 + values * work.bytes_per_value * s.width / spread)
