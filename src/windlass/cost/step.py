"""How long does a training step take? Matrix products, attention, memory traffic, collectives, pipeline bubble: each a term.

Physics first: work divided by a rate that the device reaches. The few constants stand in `Constants`, each with its meaning; they
were fitted to published runs by benchmarks/planner_accuracy.py. A cluster's own `[efficiency]` table replaces the four that depend on the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from windlass.clusters.model import Device, Efficiency, Links
from windlass.cost.flops import DEFAULT, Convention, hardware_per_token, per_token, product_widths, selective_products
from windlass.cost.memory import SQUARE_BYTES
from windlass.cost.params import count
from windlass.cost.shapes import Shape
from windlass.cost.work import Degrees, Work
from windlass.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What physics leaves open: each a share or a small time, with its meaning."""

    matmul: float = 0.765
    """Share of the dense peak that large matrix products hold inside a model, where power allows it."""
    tflops_per_watt: float = 0.985
    """bf16 products per watt of the limit on Hopper: 500 W parts and, in long runs, 700 W parts are limited by power, not by the peak."""
    edge: float = 150.0
    """Tile and pipeline-fill losses: a product costs as much as if each of its sides were this much longer."""
    misaligned: float = 1.45
    """Slowdown of a product whose sides are not multiples of 64 values (the tile of the tensor cores' loads)."""
    flash: float = 0.52
    """Share of the dense peak in flash attention (version 2) on the generation it was written for (Ampere)."""
    flash_hopper: float = 0.30
    """The same kernel on Hopper, whose faster instructions it does not use."""
    attention: float = 0.51
    """Share of the dense peak in attention written for the device (cuDNN, TransformerEngine, flash 3)."""
    square: float = 5.0
    """Times that attention without fusion moves the square of scores through memory in a forward pass."""
    memory: float = 0.79
    """Share of the device's bandwidth that element-wise kernels reach."""
    eager: float = 2.23
    """Bytes that unfused element-wise kernels move, relative to fused ones."""
    network: float = 0.80
    """Share of a link that large collectives reach."""
    inside: float = 0.84
    """The same inside a node relative to that: four H100 of Snellius reach 300.8 of 450 GB/s (all-reduce), 0.67 = 0.80 x 0.84."""
    overlap: float = 0.95
    """Share of compute behind which data-parallel traffic can hide."""
    contention: float = 0.50
    """What hidden traffic still costs, relative to its time on the links inside a node: collectives take multiprocessors and bandwidth."""
    tensor_overlap: float = 0.2
    """Share of tensor-parallel traffic that hides behind the products it belongs to, in engines that try."""
    launch_us: float = 12.5
    """Host time to launch one kernel."""
    fixed_ms: float = 5.0
    """Per step outside the model: data, logging, clipping, synchronisation."""
    host_gbs: float = 20.0
    """GB/s of one device to and from host memory, and of the cores that update its share there: PCIe 4 reaches about 25, and the devices
    of a socket share its memory. Textbook, not fitted: no published row offloads."""
    straggle: float = 0.005
    """Relative slowdown per doubling of nodes: the slowest of many decides."""
    fp8: float = 0.75
    """Share of the 8-bit rate that remains when casts and scales are paid."""
    own_edge: float = 130.0
    """`edge` in our own engine, whose products are those of current libraries on Hopper."""
    own_fixed_ms: float = 0.7
    """`fixed_ms` in our own engine: nothing in its step waits for the device."""
    own_narrow: float = 1.15
    """What attention with heads of 64 costs relative to heads of 128 with cuDNN's kernels."""
    own_eager: float = 3.3
    """Passes over a layer's element-wise bytes, forward and backward, when nothing is compiled."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    seconds: float
    terms: dict[str, float]
    """Seconds by cause; sums to `seconds`."""
    tokens_per_second_per_device: float
    mfu: float | None
    mfu_convention: str
    hfu: float | None
    exposed_communication: float
    """Seconds in which devices wait for data of others."""
    bubble: float
    """Seconds in which pipeline stages are idle."""


def estimate(
    shape: Shape,
    work: Work,
    layout: Degrees,
    device: Device,
    links: Links,
    devices_per_node: int,
    efficiency: Efficiency | None = None,
    *,
    constants: Constants | None = None,
    convention: Convention = DEFAULT,
) -> StepEstimate:
    """One optimizer step."""
    c = constants or DEFAULTS
    if efficiency is not None:
        c = with_efficiency(c, efficiency)
    if work.native:
        c = replace(c, edge=c.own_edge, fixed_ms=c.own_fixed_ms)
    rates = _rates(device, links, devices_per_node, work, c, layout)
    tokens = work.micro_batch * work.seq_len / layout.context
    micro = _micro_batch(shape, work, layout, rates, tokens, c)
    m, p = work.accumulation, layout.pipeline
    stage = micro["layers"]
    busy = sum(stage.values()) * m
    idle = bubble_share(layout, m) * busy
    terms = {name: value * m for name, value in stage.items()}
    # With a pipeline only the last stage has the head; half of it is taken to be balanced away by giving that stage fewer layers.
    terms["head and loss"] = sum(micro["head"].values()) * m * (1.0 if p == 1 else 0.5)
    terms["pipeline bubble"] = idle
    terms["optimizer"] = _optimizer(shape, work, layout, rates, devices_per_node)
    terms["shard copies"] = _shard_copies(shape, work, layout, rates)
    compute = sum(terms.values())
    traffic, size = _data_traffic(shape, work, layout, rates, devices_per_node)
    terms["data-parallel traffic"] = _exposed(traffic, size, compute, work, layout, rates, c)
    terms["host memory"] = _host_seconds(shape, work, layout, c, devices_per_node)
    terms["fixed"] = c.fixed_ms / 1000.0
    nodes = layout.devices / devices_per_node
    if nodes > 1:
        terms["stragglers"] = c.straggle * _log2(nodes) * compute
    seconds = sum(terms.values())
    rate = tokens * m * layout.data * layout.context / seconds / layout.devices
    peak = device.bf16_tflops
    model = per_token(shape, work.seq_len, convention) * rate / 1e12
    hardware = hardware_per_token(shape, work.seq_len, work.recompute, convention) * rate / 1e12
    exposed = (
        terms["data-parallel traffic"]
        + terms.get("tensor-parallel traffic", 0.0)
        + terms.get("context-parallel traffic", 0.0)
        + terms.get("pipeline traffic", 0.0)
    )
    return StepEstimate(
        seconds=seconds,
        terms={k: v for k, v in terms.items() if v > 0},
        tokens_per_second_per_device=rate,
        mfu=model / peak if peak else None,
        mfu_convention=convention,
        hfu=hardware / peak if peak else None,
        exposed_communication=exposed,
        bubble=idle,
    )


def bubble_share(layout: Degrees, micro_batches: int) -> float:
    """Idle time of a pipeline relative to its busy time: (p - 1) / (m v)."""
    p, v = layout.pipeline, layout.chunks if layout.schedule in ("interleaved", "1f1b") else 1
    if p == 1:
        return 0.0
    share = (p - 1) / (micro_batches * max(1, v))
    return share / 3 if layout.schedule == "zbv" else share


@dataclass(frozen=True, slots=True)
class _Rates:
    matmul: float
    """FLOP/s of large matrix products in the precision of the blocks."""
    wide: float
    """The same in bf16 (fp32 where all is fp32)."""
    attention: float
    memory: float
    """Bytes/s of element-wise kernels."""
    intra: float
    inter: float
    """Bytes/s of one device inside a node, and of one device into the fabric when all of a node send."""
    intra_latency: float
    inter_latency: float
    per_node: int


AMD_BURST = 0.6
"""Best matrix product relative to the peak that training on a part of AMD shows, where none is stated: 758 of 1,307 TFLOP/s on MI300X;
OLMo's 9,500 tokens/s of a 1.2B model on LUMI's MI250X (36 % MFU) and ORNL's 22B on Frontier (38 %) agree. A burst of 147 of 191.5 was
measured on a GCD (ml-engineering, ROCm 6.2), and MosaicML's MPT-7B on MI250 needs about 130: there the estimate is a fifth too slow."""


def sustained_tflops(device: Device, precision: str = "bf16", constants: Constants | None = None) -> float:
    """Matrix rate that a device holds for hours inside a model: a share of the dense peak, within the power limit."""
    c = constants or DEFAULTS
    peak = device.peak_tflops
    if peak is None or device.bf16_tflops is None:
        raise PlanError(
            "cost.matrix-rate-unknown",
            f"the matrix rate of {device.name} is unknown",
            hint="give bf16_tflops in devices.toml",
        )
    if precision == "fp32":
        return (device.fp32_tflops or peak / 16) * c.matmul
    rate = min(c.matmul * peak, _power_limited(device, c))
    burst = device.matmul_tflops or (AMD_BURST * peak if device.vendor == "amd" else None)
    if burst is not None and c.tflops_per_watt != math.inf:
        rate = min(rate, 0.9 * burst)  # a model holds less than the best burst that was measured
    if precision in ("fp8", "mxfp8", "nvfp4") and device.fp8_tflops:
        narrow = (
            device.fp8_tflops / device.bf16_tflops * (1.75 if precision == "nvfp4" else 1.0)
        )  # 4 bits: twice 8 on paper
        return rate * (1 + (narrow - 1) * c.fp8)
    return rate


def _power_limited(device: Device, c: Constants) -> float:
    """Dense rate at which a Hopper part meets its power limit; older and other parts have not shown one."""
    if device.tdp_watts is None or device.generation != "hopper":
        return float("inf")
    return c.tflops_per_watt * device.tdp_watts


def _rates(device: Device, links: Links, per_node: int, work: Work, c: Constants, layout: Degrees) -> _Rates:
    if device.bandwidth_gbs is None:
        raise PlanError(
            "cost.memory-bandwidth-unknown",
            f"the memory bandwidth of {device.name} is unknown",
            hint="give bandwidth_gbs in devices.toml",
        )
    if layout.devices > per_node and links.inter_gbs_per_node is None:
        raise PlanError(
            "cost.devices-need-nodes-but",
            f"{layout.devices} devices need {-(-layout.devices // per_node)} nodes, but the network of this cluster is unknown",
            hint="give links.inter_gbs_per_node in the cluster file",
        )
    intra = (links.intra_gbs or 25.0) * 1e9 * c.network * c.inside
    inter = (links.inter_gbs_per_node or 1.0) * 1e9 / per_node * c.network
    return _Rates(
        matmul=sustained_tflops(device, work.precision, c) * 1e12,
        wide=sustained_tflops(device, "fp32" if work.precision == "fp32" else "bf16", c) * 1e12,
        attention=_attention_rate(device, work, c),
        memory=device.bandwidth_gbs * 1e9 * c.memory,
        intra=intra,
        inter=inter,
        intra_latency=links.intra_latency_us * 1e-6,
        inter_latency=links.inter_latency_us * 1e-6,
        per_node=per_node,
    )


def _attention_rate(device: Device, work: Work, c: Constants) -> float:
    peak = (device.peak_tflops or 0.0) * 1e12
    generation = device.generation
    if work.precision == "fp32" or (work.native and not work.flash):
        return sustained_tflops(device, "fp32", c) * 1e12  # without a fused kernel torch computes scores in fp32
    if not work.flash:
        return sustained_tflops(device, "bf16", c) * 1e12
    if work.masked:  # the memory-efficient kernel: about half of flash attention's rate. Textbook, not measured.
        return 0.5 * peak * (c.flash if generation == "ampere" else c.flash_hopper)
    if work.kernel in ("te", "cudnn", "flash3") or (work.kernel == "auto" and generation in ("hopper", "blackwell")):
        share = c.attention  # "auto" takes cuDNN where it is faster
    else:
        foreign = generation in ("hopper", "blackwell") or device.vendor == "amd"
        share = c.flash_hopper if foreign else c.flash
    return peak * share * (0.65 if work.kernel == "flash1" else 1.0)  # version 1 and its Triton relative


def with_efficiency(c: Constants, e: Efficiency) -> Constants:
    """The constants with a machine's own in their place; a measured matrix rate already contains the power limit."""
    given = {k: v for k in ("matmul", "memory", "network", "overlap") if (v := getattr(e, k)) is not None}
    if "matmul" in given:
        given["tflops_per_watt"] = math.inf
    return replace(c, **given) if given else c


def _product(m: float, n: float, k: float, r: _Rates, c: Constants) -> float:
    """Seconds of an m x k by k x n product: tiles at the edges and the start of the pipeline count as if the sides were longer."""
    e = c.edge
    penalty = c.misaligned if n % 64 or k % 64 else 1.0
    return 2.0 * (m + e) * (n + e) * (k + e) * penalty / r.matmul


def _micro_batch(
    s: Shape, work: Work, layout: Degrees, r: _Rates, tokens: float, c: Constants
) -> dict[str, dict[str, float]]:
    """Seconds of one micro-batch on one pipeline stage, and of the head."""
    t = layout.tensor
    layers = s.layers / layout.pipeline
    forward = _layer_products(s, tokens, t, r, c)
    attention = _attention(s, work, tokens, t, r, c)
    elementwise = _elementwise_bytes(s, work, tokens, t, layout, c) / r.memory
    again = _again(s, work)
    terms = {
        "matrix products": layers * forward * (3.0 + again.products),
        # Fused kernels work the scores out again on their way back; a stored square needs no second pass.
        "attention": layers * attention * ((3.0 if work.native and not work.flash else 3.5) + again.attention),
        "element-wise": layers * elementwise * (3.0 + again.elementwise),
        "casts to 8 bits": layers * _cast_bytes(s, work, tokens, t) / r.memory,
        "tensor-parallel traffic": layers
        * _tensor_traffic(s, work, layout, tokens, r)
        * (2.0 + (1.0 if work.recompute == "full" else 0.0))
        * (1 - (c.tensor_overlap if work.compile else 0.0)),
        "context-parallel traffic": layers * _context_traffic(s, work, layout, tokens, r) * 3.0,
        "pipeline traffic": _pipeline_traffic(s, work, layout, tokens, r),
    }
    each = 20.0 if work.compile else 100.0 if work.native else 60.0
    kernels = (each + (8.0 if t > 1 else 0.0)) * layers * (3.0 + again.elementwise) * c.launch_us * 1e-6
    gpu = sum(terms.values())
    if kernels > gpu:
        terms["kernel launches"] = kernels - gpu
    # Our own head stays in 16 bits whatever the blocks do.
    wide = replace(r, matmul=r.wide) if work.native else r
    product = _product(tokens, s.padded_vocab / t, s.width, wide, c) * 3.0
    logits = (
        tokens
        * s.padded_vocab
        / t
        * (12.0 if work.loss in ("chunked", "fused", "compiled", "inplace") else 28.0)
        / r.memory
    )
    return {"layers": {k: v for k, v in terms.items() if v}, "head": {"products": product, "loss": logits}}


@dataclass(frozen=True, slots=True)
class _Again:
    """Share of the forward pass that runs a second time."""

    products: float
    attention: float
    elementwise: float


def _again(s: Shape, work: Work) -> _Again:
    """Full recompute runs all of it again; in our own engine the compiler leaves out the last product, which nobody reads, and most
    element-wise work goes into the backward kernels."""
    if work.recompute == "budget":
        return _Again(*[1.0 - work.recompute_budget] * 3)
    if work.recompute not in ("full", "selective"):
        return _Again(0.0, 0.0, 0.0)
    if not work.native:
        share = 0.35 if work.engine == "torch" else 0.0
        return _Again(share, 0.0, share) if work.recompute == "selective" else _Again(1.0, 1.0, 1.0)
    if work.recompute == "full":
        return _Again(1.0 - s.ffn / product_widths(s)[2], 1.0, 0.5)
    # Retention is made of batched products, which the policy does not keep.
    return _Again(selective_products(s), 1.0 if s.arch == "retnet" else 0.0, 0.0)


def _cast_bytes(s: Shape, work: Work, tokens: float, t: int) -> float:
    """Bytes that FP8 casts of one layer move: largest magnitude and cast of every product's input (forward, and again for the weights'
    gradient) and of its gradient, which is also turned. In other engines the share `fp8` stands for this."""
    if not work.native or work.precision != "fp8":
        return 0.0
    mixed = s.value_width if s.arch == "retnet" else s.attention_width
    first = 2 * (s.width + s.value_width) if s.arch == "retnet" else s.attention_width + 2 * s.kv_width
    ins = 2.0 * s.width + mixed + s.ffn
    outs = first + 2.0 * s.width + (2.0 if s.glu else 1.0) * s.ffn
    rows = 2.0 if work.fp8_rows else 0.0  # scales by row are found once more, along the other side
    return tokens * ((10.0 + rows) * ins + (8.0 + rows) * outs) / t


def _layer_products(s: Shape, tokens: float, t: int, r: _Rates, c: Constants) -> float:
    if s.arch == "retnet":
        qkvg, out = 2 * s.width + 2 * s.value_width, s.value_width
    else:
        qkvg, out = s.attention_width + 2 * s.kv_width, s.attention_width
    inner = s.ffn / t
    return (
        _product(tokens, qkvg / t, s.width, r, c)
        + _product(tokens, s.width, out / t, r, c)
        + _product(tokens, inner * (2 if s.glu else 1), s.width, r, c)
        + _product(tokens, s.width, inner, r, c)
    )


def _attention(s: Shape, work: Work, tokens: float, t: int, r: _Rates, c: Constants) -> float:
    """Forward seconds of one layer: two products over the (causal half of the) square, or the square through memory."""
    if s.arch == "retnet":
        span = s.chunk if s.chunk and s.chunk < work.seq_len else work.seq_len
        flops = 2.0 * tokens * span * (s.width + s.value_width) / t
        if span < work.seq_len:  # each chunk writes its state and reads the one before it
            flops += 4.0 * tokens * s.width * s.value_width / s.heads / t
        return flops / r.attention + 4.0 * tokens * span * s.heads / t / r.memory
    flops = 4.0 * tokens * work.seq_len * s.attention_width / t
    if work.flash:
        narrow = (
            (c.own_narrow if work.native else 1.25) if s.head_dim < 96 else 1.0
        )  # heads of 64 fill the units less well
        return (1.0 if work.masked else 0.5) * flops * narrow / r.attention  # behind a mask nothing is left out
    # Our own: the square of scores passes through memory nine times in fp32, three of them forward.
    moved = 3.0 * SQUARE_BYTES if work.native else work.bytes_per_value * c.square
    traffic = tokens * s.heads / t * work.seq_len * moved
    slow = (
        6.0 if s.head_dim % 8 else 1.0
    )  # tensor cores need rows of 16 bytes; other head widths fall back to ordinary units
    return flops * slow / r.attention + traffic / r.memory


def _elementwise_bytes(s: Shape, work: Work, tokens: float, t: int, layout: Degrees, c: Constants) -> float:
    """Bytes that norms, rotary, activation and residuals of one layer move in a forward pass."""
    spread = t if layout.sequence_parallel else 1
    if work.native and not work.compile:
        return tokens * _eager_bytes(s, t, spread) * c.own_eager / 3.0
    if (
        s.arch == "retnet"
    ):  # queries and keys are turned by neighbours; values, gate and output change between layouts of heads
        values = (
            6.0 * s.width / spread + (3.0 if s.glu else 2.0) * s.ffn / t + (8.0 * s.width + 10.0 * s.value_width) / t
        )
        return tokens * work.bytes_per_value * values * (1.0 if work.compile else c.eager)
    values = 6.0 * s.width / spread + (3.0 if s.glu else 2.0) * s.ffn / t + 2.0 * (s.attention_width + s.kv_width) / t
    return tokens * work.bytes_per_value * values * (1.0 if work.compile else c.eager)


def _eager_bytes(s: Shape, t: int, spread: int) -> float:
    """Per token, forward, op by op: norms in fp32 (36 bytes a value) and residual sums (6), rotation in fp32 (58), gate (10)."""
    turned = 2 * s.width + 2 * s.value_width if s.arch == "retnet" else s.attention_width + s.kv_width
    return 84.0 * s.width / spread + (58.0 * turned + 10.0 * s.ffn) / t


def _exposed(
    seconds: float, size: float, compute: float, work: Work, layout: Degrees, r: _Rates, c: Constants
) -> float:
    """Seconds of data-parallel traffic that the step pays: what finds no compute to hide behind, and what it takes from compute."""
    if work.engine == "deepspeed" and layout.shard != "full":
        return seconds  # reduced after the last backward pass, gathered after the step
    local = min(seconds, size / r.intra)
    taken = c.contention * (
        local + 0.3 * (seconds - local)
    )  # while the fabric is the narrow place, kernels mostly wait
    return taken + max(0.0, seconds - taken - c.overlap * compute)


def _ring(size: float, ranks: int, r: _Rates, span: int = 1, messages: float = 1.0, *, tree: bool = False) -> float:
    """Seconds for all-gathers or reduce-scatters of `size` bytes in all, sent as `messages` collectives over `ranks`.

    An all-reduce is two of them. `span` is how far apart the ranks of the group are in devices (1: neighbours). A ring passes every
    other rank, so its latency grows with their number: this is what makes full sharding collapse at thousands of devices. An all-reduce
    may use a `tree`, whose latency grows with the logarithm."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks
    inside = max(1, r.per_node // span)  # ranks of the group in one node
    if ranks <= inside:
        return size * share / r.intra + messages * (ranks - 1) * r.intra_latency
    hop = (r.inter_latency + (inside - 1) * r.intra_latency) / inside
    # A node passes the whole message once; the devices of a node that belong to the group share its links, the others have their own.
    steps = 2.0 * _log2(ranks) if tree else ranks - 1.0
    return max(size * share / (r.inter * inside), size * share / r.intra) + messages * steps * (
        r.inter_latency if tree else hop
    )


def _log2(x: float) -> float:
    return math.log2(x) if x > 1 else 0.0


def _tensor_traffic(s: Shape, work: Work, layout: Degrees, tokens: float, r: _Rates) -> float:
    """One pass (forward or backward) of one layer: two all-gathers and two reduce-scatters of the activations."""
    return _ring(4.0 * tokens * s.width * work.bytes_per_value, layout.tensor, r, 1, 4.0)


def _context_traffic(s: Shape, work: Work, layout: Degrees, tokens: float, r: _Rates) -> float:
    if layout.context == 1:
        return 0.0
    return 0.3 * _ring(
        2.0 * tokens * layout.context * s.kv_width / layout.tensor * work.bytes_per_value,
        layout.context,
        r,
        layout.tensor,
    )


def _pipeline_traffic(s: Shape, work: Work, layout: Degrees, tokens: float, r: _Rates) -> float:
    if layout.pipeline == 1:
        return 0.0
    size = tokens * s.width * work.bytes_per_value / (layout.tensor if layout.sequence_parallel else 1)
    rate = r.inter if layout.devices > r.per_node else r.intra
    return 2.0 * layout.chunks * (size / rate + r.inter_latency) * 0.5


def _optimizer(s: Shape, work: Work, layout: Degrees, r: _Rates, per_node: int) -> float:
    """Reads and writes of weights, gradients and moments of this device's share (fused: once; list by list: about three times), and the norm."""
    mine = count(s).stored / (layout.tensor * layout.pipeline)
    if layout.offload != "none":
        update, norm = 0.0, 4.0  # the states lie on the host: _host_seconds
    elif work.native:
        update, norm = _update_bytes(work, layout)
    else:
        update, norm = 34.0 if work.compile or work.engine != "torch" else 90.0, 4.0
    return (mine / layout.state_shards(per_node) * update + mine / layout.shards(per_node) * norm) / r.memory


def _host_seconds(s: Shape, work: Work, layout: Degrees, c: Constants, per_node: int) -> float:
    """Offload: gradients go down and 16-bit weights come back once a step, and the cores read and write the states; parameters on the host
    are also read in every forward and backward pass. Nothing of it is taken to hide behind compute."""
    if layout.offload == "none":
        return 0.0
    mine = count(s).stored / (layout.tensor * layout.pipeline) / layout.state_shards(per_node)
    moved = (4.0 + 2.0 + 34.0) * mine
    if layout.offload == "parameters":
        moved += 2.0 * 4.0 * mine * (work.accumulation if layout.pipeline == 1 else 1)
    return moved / (c.host_gbs * 1e9)


def _update_bytes(work: Work, layout: Degrees) -> tuple[float, float]:
    """Per parameter, in one compiled kernel: weights and moments read and written, gradients read, 16-bit copy written; and the norm."""
    pure = work.precision == "bf16_pure"
    single = layout.devices == 1 and work.precision in ("bf16", "fp8")
    gradient = 2.0 if pure or (single and work.accumulation == 1) else 4.0
    moments = 2.0 * (2.0 if work.moments == "bf16" else 4.0) * (2.0 if work.optimizer.startswith("adam") else 1.0)
    return (4.0 if pure else 8.0) + moments + gradient + (2.0 if single else 0.0), gradient


def _data_traffic(s: Shape, work: Work, layout: Degrees, r: _Rates, per_node: int) -> tuple[float, float]:
    """Gathering weights and reducing gradients of one optimizer step: seconds if nothing hides them, and bytes through a device."""
    group = layout.data * layout.context
    if group == 1:
        return 0.0, 0.0
    mine = count(s).stored / (layout.tensor * layout.pipeline)
    span = layout.tensor
    layers = s.layers / layout.pipeline + 1
    gradient = _gradient_bytes(work)
    every = work.accumulation if layout.pipeline == 1 else 1
    syncs = every if layout.sync == "every" else 1
    if layout.shard == "zero2" and work.native:  # gradients stay divided, so each micro-batch gathers once and reduces
        size, messages = (2.0 * every + syncs * gradient) * mine, (every + syncs) * layers
        return _ring(size, group, r, span, messages), size
    if layout.shard not in ("full", "hybrid"):
        buckets = max(1.0, mine * gradient / 200e6)
        size = (gradient + (gradient if layout.shard == "none" else 2.0)) * mine
        return _ring(size, group, r, span, 2.0 * buckets, tree=layout.shard == "none"), size
    size, messages = (4.0 * every + syncs * gradient) * mine, (2.0 * every + syncs) * layers
    if layout.shard == "full":
        return _ring(size, group, r, span, messages), size
    inside = layout.shards(per_node)
    copies = 2.0 * gradient * mine / inside
    seconds = _ring(size, inside, r, span, messages) + _ring(
        copies, max(1, group // inside), r, span * inside, layers, tree=True
    )
    return seconds, size + copies


def _shard_copies(s: Shape, work: Work, layout: Degrees, r: _Rates) -> float:
    """FSDP unpacks every gathered layer (read and write 16-bit weights, twice) and packs gradients for their reduction."""
    if layout.shard not in ("full", "hybrid") or work.engine != "torch" or layout.data * layout.context == 1:
        return 0.0
    mine = count(s).stored / (layout.tensor * layout.pipeline)
    every = work.accumulation if layout.pipeline == 1 else 1
    syncs = every if layout.sync == "every" else 1
    return (8.0 * every + 6.0 * syncs) * mine / r.memory


def _gradient_bytes(work: Work) -> float:
    """Precision in which gradients travel; our own engine reduces in fp32."""
    if work.native:
        return 4.0
    if work.gradients == "fp32" or (work.gradients is None and work.engine == "megatron" and work.precision == "bf16"):
        return 4.0
    return 4.0 if work.precision == "fp32" else 2.0


DEFAULTS = Constants()
