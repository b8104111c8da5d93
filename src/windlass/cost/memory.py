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
TIGHT = 0.10
"""What remains of that slack when memory is short and the allocator gives cached blocks back; also covers the error of the estimate."""
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
    if p == 1:
        return [_Stage(0, layers, first_table, norm + (0.0 if s.tied else table), body, 1.0, True)]
    first = _Stage(0, layers, first_table, 0.0, body, _in_flight(layout, work, 0), False)
    last = _Stage(p - 1, layers, 0.0, norm + table, body, _in_flight(layout, work, p - 1), True)
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
    states = _states(work, layout, stage, per_node)
    unsharded, reduce_buffers = _unsharded(work, layout, stage, per_node)
    layer, kept = layer_activations(shape, work, layout), kept_activations(shape, work, layout)
    tokens = work.micro_batch * work.seq_len / layout.context
    activations = kept * tokens * stage.layers * stage.in_flight
    inputs = _inputs(shape, work, layout, tokens)
    one_layer = max(0.0, layer - kept) * tokens
    # Without recompute the backward pass frees a layer's activations before the last gradients appear.
    late = (
        activations + one_layer if work.recompute != "none" else activations / max(1.0, stage.layers * stage.in_flight)
    )
    moments = {
        "loss": {
            **states.always,
            "gradients": states.early_gradients,
            "unsharded weights": unsharded,
            "activations": activations,
            "logits and loss": _logits(shape, work, layout, tokens) if stage.has_loss else 0.0,
        },
        "backward": {
            **states.always,
            "gradients": states.gradients,
            "unsharded weights": unsharded,
            "reduction buffers": reduce_buffers,
            "activations": late,
        },
        "optimizer": {**states.always, "gradients": states.gradients, "optimizer temporaries": states.step},
    }
    name = max(moments, key=lambda n: sum(moments[n].values()))
    terms = {k: v for k, v in {**moments[name], "inputs": inputs}.items() if v > 0}
    allocated = sum(terms.values())
    reserved = allocated * (1 + SLACK)
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
    d, t = float(work.bytes_per_value), layout.tensor
    spread = t if layout.sequence_parallel else 1  # norms and residuals are divided only along the sequence
    residuals = 4.0 * d * s.width / spread  # the inputs of both norms and of the products that follow them
    attention = d * (2.0 * s.attention_width + 2.0 * s.kv_width) / t + 4.0 * s.heads / t
    if not work.flash:
        attention += 2.0 * d * s.heads * work.seq_len / t
    # SwiGLU keeps gate, up and their product; eager code also the activated gate. GELU keeps its input and output.
    hidden = ((3.0 if work.compile else 4.0) if s.glu else 2.0) * d * s.ffn / t
    if s.arch == "retnet":
        attention += d * 2.0 * s.value_width / t
    return residuals + attention + hidden


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
    if work.engine != "torch":  # Megatron's: only the square of scores is worked out again
        return layer_activations(s, work, layout) - (0.0 if work.flash else 2.0 * d * s.heads * work.seq_len / t)
    # Per-op policy: attention's output and every other matrix product are kept.
    return d * (2.0 * s.width / spread + (2.0 * s.attention_width + s.kv_width + s.ffn) / t) + 4.0 * s.heads / t


def _logits(s: Shape, work: Work, layout: Degrees, tokens: float) -> float:
    """plain: 16-bit logits, their fp32 copy and its gradient. compiled: logits and gradient in one pass. chunked and fused: one chunk's
    logits, and both gradients, which are worked out on the way forward."""
    vocab = s.padded_vocab / layout.tensor
    if work.loss in ("chunked", "fused"):
        return (
            min(tokens, work.loss_chunk) * vocab * 6.0 + 4.0 * vocab * s.width + tokens * s.width * work.bytes_per_value
        )
    per_value = {"plain": 10.0, "compiled": 8.0, "inplace": 4.0}.get(work.loss, 10.0)
    if work.engine != "torch":
        # Softmax overwrites the fp32 logits and is kept for the gradient; engines of before 2022 held logits, softmax and gradient apart.
        per_value = 8.0 if work.flash else 14.0
    elif layout.tensor > 1:
        per_value += 4.0  # on a divided vocabulary softmax and its gradient are separate operations
    return tokens * vocab * per_value


def _inputs(s: Shape, work: Work, layout: Degrees, tokens: float) -> float:
    """Token numbers, and the output of embedding and final norm."""
    spread = layout.tensor if layout.sequence_parallel else 1
    return tokens * (16.0 + 2.0 * work.bytes_per_value * s.width / spread)
