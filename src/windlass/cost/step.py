"""Time of one training step: matrix products, attention, memory traffic, collectives, pipeline bubble, each a term.

Work is divided by a rate that the device reaches. Values that do not follow from the hardware are in `Constants`,
fitted to published runs by benchmarks/planner_accuracy.py. A cluster's own `[efficiency]` table replaces the four that
depend on the machine."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from windlass.blocks.attention.spec import KEPT_SCORE_BYTES
from windlass.clusters.model import Device, Efficiency, Links
from windlass.cost.engines import ENGINE_PROFILES
from windlass.cost.flops import DEFAULT, Convention, hfu, mfu, recomputed_share
from windlass.cost.memory import layers_per_bucket
from windlass.cost.muon import grouped_iterations, square_products
from windlass.errors import PlanError
from windlass.layout.stages import layers_of_rank
from windlass.layout.types import AXES, Layout, StepSpec
from windlass.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Values that do not follow from the hardware: each a share or a small time, with its meaning."""

    # Share of the dense peak that large matrix products hold inside a model, where power allows it.
    matmul: float = 0.765
    # bf16 products per watt of the limit on Hopper: 500 W parts and, in long runs, 700 W parts are limited by power,
    # not by the peak.
    tflops_per_watt: float = 0.985
    # Products per watt on Blackwell relative to Hopper. GB300 (1,400 W) trains a fifth faster than GB200 (1,200 W) with
    # the same peak and bandwidth; fits the published runs of dense models on B200, GB200 and GB300.
    blackwell_per_watt: float = 1.37
    # Tile and pipeline-fill losses: a product costs as much as if each of its sides were this much longer.
    edge: float = 150.0
    # Slowdown of a product whose sides are not multiples of 64 values (the tile of the tensor cores' loads).
    misaligned: float = 1.45
    # Share of the dense peak in flash attention (version 2) on the generation it was written for (Ampere).
    flash: float = 0.52
    # The same kernel on Hopper, whose faster instructions it does not use.
    flash_hopper: float = 0.30
    # Share of the dense peak in attention written for the device (cuDNN, TransformerEngine, flash 3).
    attention: float = 0.51
    # Times that attention without fusion moves the square of scores through memory in a forward pass.
    square: float = 5.0
    # Share of the device's bandwidth that element-wise kernels reach.
    memory: float = 0.79
    # Bytes that unfused element-wise kernels move, relative to fused ones.
    eager: float = 2.23
    # Share of a link that large collectives reach.
    network: float = 0.80
    # The same inside a node relative to that: four H100 of Snellius reach 300.8 of 450 GB/s (all-reduce), 0.67 = 0.80
    # x 0.84.
    inside: float = 0.84
    # Share of compute behind which data-parallel traffic can hide.
    overlap: float = 0.95
    # What hidden traffic still costs, relative to its time on the links inside a node: collectives take
    # multiprocessors and bandwidth.
    contention: float = 0.50
    # Share of tensor-parallel traffic that hides behind the products it belongs to, in engines that try.
    tensor_overlap: float = 0.2
    # Host time to launch one kernel.
    launch_us: float = 12.5
    # Per step outside the model: data, logging, clipping, synchronisation.
    fixed_ms: float = 5.0
    # GB/s of one device to and from host memory, and of the cores that update its share there: PCIe 4 reaches about
    # 25, and the devices of a socket share its memory. Textbook, not fitted: no published row offloads.
    host_gbs: float = 20.0
    # Relative slowdown per doubling of nodes: the slowest of many decides.
    straggle: float = 0.005
    # Share of the 8-bit rate that remains when casts and scales are paid.
    fp8: float = 0.75
    # `edge` of experts' products in other engines: many small ones, of unequal sizes.
    expert_edge: float = 500.0
    # Share of a link that exchanges of experts' rows reach in other engines, relative to large collectives; kernels
    # made for it (DeepEP, HybridEP) reach all of it.
    exchange: float = 0.5
    # Rows of a layer's fullest expert-parallel rank relative to the mean, where routing is not forced to be even.
    imbalance: float = 1.35
    # Kernels in a layer with experts beside those of any layer, in other engines.
    expert_kernels: float = 160.0
    # `edge` in our own engine, whose products are those of current libraries on Hopper.
    own_edge: float = 130.0
    # `fixed_ms` in our own engine: nothing in its step waits for the device.
    own_fixed_ms: float = 0.7
    # What attention with heads of 64 costs relative to heads of 128 with cuDNN's kernels.
    own_narrow: float = 1.15
    # Passes over a layer's element-wise bytes, forward and backward, when nothing is compiled.
    own_eager: float = 3.3


@dataclass(frozen=True, slots=True)
class StepEstimate:
    seconds: float
    # Seconds by cause; sums to `seconds`.
    terms: dict[str, float]
    tokens_per_second_per_device: float
    mfu: float | None
    mfu_convention: str
    hfu: float | None
    # Seconds in which devices wait for data of others.
    exposed_communication: float
    # Seconds in which pipeline stages are idle.
    bubble: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices and links that a step runs on."""

    device: Device
    links: Links
    devices_per_node: int
    efficiency: Efficiency | None = None
    # Devices that the links inside a node join, where they reach beyond it (NVL72: 72); None: those of the node.
    linked_devices: int | None = None

    def __hash__(self) -> int:  # the rates of a machine are cached, and its parts hold dicts
        return hash((self.device.name, self.devices_per_node))


def estimate_step(
    model: ModelSpec,
    step: StepSpec,
    layout: Layout,
    machine: Machine,
    *,
    constants: Constants | None = None,
    convention: Convention = DEFAULT,
) -> StepEstimate:
    """One optimizer step."""
    if layout.devices > machine.devices_per_node and machine.links.inter_gbs_per_node is None:
        raise PlanError(
            "cost.network-unknown",
            f"{layout.devices} devices need {-(-layout.devices // machine.devices_per_node)} nodes, "
            "but the network of this cluster is unknown",
            hint="set links.inter_gbs_per_node in the cluster file",
        )
    masked_context = step.mask_documents and layout.context > 1
    r = _rates(machine, constants or DEFAULTS, step.native, step.precision, step.attention, masked_context)
    c = r.constants
    tokens = layout.micro_batch * step.seq_len / layout.context
    micro_batches = layout.accumulation
    # Parameters that a rank holds before sharding, with the layout that divides them further.
    divided = [(model.params.stored / (layout.tensor * layout.pipeline), layout)]
    if layout.expert_split != layout.tensor:
        dense = (model.params.stored - model.expert_params) / (layout.tensor * layout.pipeline)
        experts = model.expert_params / (layout.expert_split * layout.pipeline)
        divided = [(dense, layout), (experts, layout.for_experts)]
    stored = sum(size for size, _ in divided)
    stage = _micro_batch(model, step, layout, r, tokens)
    bubble = bubble_share(layout) * sum(stage.values()) * micro_batches
    terms = {name: value * micro_batches for name, value in stage.items()}
    rows = model.embedding.rows / layout.tensor
    # Our own head stays in 16 bits whatever the blocks do.
    head = _product_seconds(tokens, rows, model.width, r.wide if step.native else r.matmul, c) * 3.0
    # Our own kernel of the chunked loss reads logits twice and writes their gradient: 0.31 ms for 4,096 x 50,304.
    head += tokens * rows * (28.0 if step.loss == "plain" else 6.0 if step.native else 12.0) / r.memory
    # With a pipeline only the last stage has the head; half of it is taken to be balanced away by fewer layers there.
    terms["head and loss"] = head * micro_batches * (1.0 if layout.pipeline == 1 else 0.5)
    terms["pipeline bubble"] = bubble
    terms["optimizer"] = sum(_optimizer_seconds(size, step, part, r) for size, part in divided)
    if step.optimizer == "muon":
        terms["orthogonalisation"] = _orthogonal_seconds(model, layout, r)
    gathers = micro_batches if layout.pipeline == 1 else 1
    reductions = gathers if step.sync.every_micro_batch else 1
    unpacked = 2 if layout.shard in ("full", "hybrid") else 1 if layout.divides_gradients_only else 0
    if unpacked and ENGINE_PROFILES[step.engine].copies_shards and layout.replicas > 1:
        # FSDP unpacks every gathered layer (read and write 16-bit weights; for the forward pass, and for the backward
        # pass if they were freed) and packs gradients for their reduction.
        terms["shard copies"] = (4.0 * unpacked * gathers + 6.0 * reductions) * stored / r.memory
    compute = sum(terms.values())
    layers = model.num_layers / layout.pipeline + 1
    buckets = model.num_layers / layout.pipeline / layers_per_bucket(model, layout) + 1
    terms["data-parallel traffic"] = _data_traffic(
        layers, buckets, divided, compute, step, layout, r, gathers, reductions
    )
    if layout.offload != "none":
        # Gradients go down and 16-bit weights come back once a step, and the cores read and write the states.
        # Parameters on the host are also read in every forward and backward pass. Nothing of it is taken to hide behind
        # compute.
        moved = 4.0 + 2.0 + 34.0 + (2.0 * 4.0 * gathers if layout.offload == "parameters" else 0.0)
        terms["host memory"] = moved * sum(size / part.shard_size for size, part in divided) / (c.host_gbs * 1e9)
    terms["fixed"] = c.fixed_ms / 1000.0
    nodes = layout.devices / machine.devices_per_node
    if nodes > 1:
        terms["stragglers"] = c.straggle * math.log2(nodes) * compute
    seconds = sum(terms.values())
    rate = tokens * micro_batches * layout.replicas / seconds / layout.devices
    peak = machine.device.bf16_tflops
    waiting = ("data-parallel traffic", *(f"{axis}-parallel traffic" for axis in AXES), "pipeline traffic")
    return StepEstimate(
        seconds=seconds,
        terms={name: value for name, value in terms.items() if value > 0},
        tokens_per_second_per_device=rate,
        mfu=mfu(model, step.seq_len, rate, peak, convention=convention).value,
        mfu_convention=convention,
        hfu=hfu(model, step.seq_len, rate, peak, recompute=step.recompute, convention=convention).value,
        exposed_communication=sum(terms.get(name, 0.0) for name in waiting),
        bubble=bubble,
    )


def bubble_share(layout: Layout) -> float:
    """Idle time of a pipeline relative to its busy time: (p - 1) / (m v)."""
    chunks = layout.chunks if layout.schedule in ("interleaved", "1f1b") else 1
    share = (layout.pipeline - 1) / (layout.accumulation * max(1, chunks))
    return share / 3 if layout.schedule == "zbv" else share


@dataclass(frozen=True, slots=True)
class _Rates:
    constants: Constants
    # FLOP/s of large matrix products in the precision of the blocks.
    matmul: float
    # The same in bf16 (fp32 where all is fp32).
    wide: float
    attention: float
    # Bytes/s of element-wise kernels.
    memory: float
    intra: float
    # Bytes/s of one device inside a node, and of one device into the fabric when all of a node send.
    inter: float
    intra_latency: float
    inter_latency: float
    per_node: int
    # Devices that the links inside a node join.
    linked: int


# Best matrix product relative to the peak that training on a part of AMD shows, where none is stated: 758 of 1,307
# TFLOP/s on MI300X; OLMo's 9,500 tokens/s of a 1.2B model on LUMI's MI250X (36 % MFU) and ORNL's 22B on Frontier (38
# %) agree. A burst of 147 of 191.5 was measured on a GCD (ml-engineering, ROCm 6.2), and MosaicML's MPT-7B on MI250
# needs about 130: there the estimate is a fifth too slow.
AMD_BURST = 0.6


def sustained_tflops(device: Device, precision: str = "bf16", constants: Constants | None = None) -> float:
    """Matrix rate that a device holds for hours inside a model: a share of the dense peak, within the power limit."""
    c = constants or DEFAULTS
    peak = device.peak_tflops
    if peak is None or device.bf16_tflops is None:
        raise PlanError(
            "cost.matrix-rate-unknown",
            f"the matrix rate of {device.name} is unknown",
            hint="set bf16_tflops in devices.toml",
        )
    if precision == "fp32":
        return (device.fp32_tflops or peak / 16) * c.matmul
    rate = c.matmul * peak
    per_watt = {"hopper": 1.0, "blackwell": c.blackwell_per_watt}  # other parts have not shown a power limit
    if device.tdp_watts is not None and device.generation in per_watt:
        rate = min(rate, c.tflops_per_watt * per_watt[device.generation] * device.tdp_watts)
    burst = device.matmul_tflops or (AMD_BURST * peak if device.vendor == "amd" else None)
    if burst is not None and c.tflops_per_watt != math.inf:
        rate = min(rate, 0.9 * burst)  # a model holds less than the best burst that was measured
    if precision in ("fp8", "mxfp8", "nvfp4") and device.fp8_tflops:
        # 4 bits are twice as fast as 8 on paper.
        narrow = device.fp8_tflops / device.bf16_tflops * (1.75 if precision == "nvfp4" else 1.0)
        return rate * (1 + (narrow - 1) * c.fp8)
    return rate


@lru_cache(maxsize=64)
def _rates(
    machine: Machine, c: Constants, native: bool, precision: str, attention_kernel: str, masked_context: bool
) -> _Rates:
    device, links, per_node = machine.device, machine.links, machine.devices_per_node
    if device.bandwidth_gbs is None:
        raise PlanError(
            "cost.memory-bandwidth-unknown",
            f"the memory bandwidth of {device.name} is unknown",
            hint="set bandwidth_gbs in devices.toml",
        )
    if machine.efficiency is not None:
        c = with_efficiency(c, machine.efficiency)
    if native:
        c = replace(c, edge=c.own_edge, fixed_ms=c.own_fixed_ms)
    wide = sustained_tflops(device, "fp32" if precision == "fp32" else "bf16", c) * 1e12
    peak, modern = (device.peak_tflops or 0.0) * 1e12, device.generation in ("hopper", "blackwell")
    if precision == "fp32" or attention_kernel == "math":
        # Without a fused kernel torch computes scores in fp32.
        attention = sustained_tflops(device, "fp32", c) * 1e12 if native else wide
    elif masked_context:  # the memory-efficient kernel: about half of flash attention's rate. Textbook, not measured.
        attention = 0.5 * peak * (c.flash if device.generation == "ampere" else c.flash_hopper)
    elif attention_kernel in ("te", "cudnn", "flash3") or (attention_kernel == "auto" and modern):
        attention = peak * c.attention  # "auto" takes cuDNN where it is faster
    else:
        attention = peak * (c.flash_hopper if modern or device.vendor == "amd" else c.flash)
        attention *= 0.65 if attention_kernel == "flash1" else 1.0  # version 1 and its Triton relative
    return _Rates(
        constants=c,
        matmul=sustained_tflops(device, precision, c) * 1e12,
        wide=wide,
        attention=attention,
        memory=device.bandwidth_gbs * 1e9 * c.memory,
        intra=(links.intra_gbs or 25.0) * 1e9 * c.network * c.inside,
        inter=(links.inter_gbs_per_node or 1.0) * 1e9 / per_node * c.network,
        intra_latency=links.intra_latency_us * 1e-6,
        inter_latency=links.inter_latency_us * 1e-6,
        per_node=per_node,
        linked=machine.linked_devices or per_node,
    )


def with_efficiency(c: Constants, efficiency: Efficiency) -> Constants:
    """The constants with a machine's own in their place; a measured matrix rate already contains the power limit."""
    measured = {
        name: value
        for name in ("matmul", "memory", "network", "overlap")
        if (value := getattr(efficiency, name)) is not None
    }
    if "matmul" in measured:
        measured["tflops_per_watt"] = math.inf
    return replace(c, **measured) if measured else c


def _product_seconds(m: float, n: float, k: float, rate: float, c: Constants) -> float:
    """Seconds of an m x k by k x n product: edges of tiles and pipeline fill count as if the sides were longer."""
    penalty = c.misaligned if n % 64 or k % 64 else 1.0
    return 2.0 * (m + c.edge) * (n + c.edge) * (k + c.edge) * penalty / rate


def _micro_batch(model: ModelSpec, step: StepSpec, layout: Layout, r: _Rates, tokens: float) -> dict[str, float]:
    """Seconds of one micro-batch on the fullest pipeline rank, without the head."""
    # Rows of other engines do not say how an uneven pipeline is split: the mean is taken.
    held = layers_of_rank(model.num_layers, layout, 0) if step.native else model.num_layers / layout.pipeline
    terms: dict[str, float] = {}
    for group in model.distinct_layers:
        count = held * group.count / model.num_layers
        for name, seconds in _layer_seconds(group.layer, step, layout, r, tokens).items():
            terms[name] = terms.get(name, 0.0) + count * seconds
    launches = terms.pop("kernel launches")
    if layout.pipeline > 1:
        size = tokens * model.width * step.bytes_per_value / layout.sequence_split
        rate = r.inter if layout.devices > r.linked else r.intra
        terms["pipeline traffic"] = 2.0 * layout.chunks * (size / rate + r.inter_latency) * 0.5
    terms["kernel launches"] = max(0.0, launches - sum(terms.values()))  # those that the device has to wait for
    return {name: value for name, value in terms.items() if value}


def _layer_seconds(layer: LayerSpec, step: StepSpec, layout: Layout, r: _Rates, tokens: float) -> dict[str, float]:
    """Forward and backward seconds of one layer, with what is recomputed."""
    c, t, width = r.constants, layout.tensor, layer.products[-1][0].outputs
    products = 0.0
    uneven = c.imbalance if layout.expert > 1 and not step.balanced else 1.0  # the fullest rank decides
    local_experts = 0.0
    for group in layer.product_groups:
        first, grouped = group[0], group[0].experts > 1
        parts = layout.expert_split // layout.expert if grouped else t
        by_outputs, by_inputs = (first.top_k * parts if first.divided == side else 1 for side in ("outputs", "inputs"))
        outputs, inputs = sum(p.outputs for p in group) / by_outputs, first.inputs / by_inputs
        if not grouped:
            products += _product_seconds(tokens, outputs, inputs, r.matmul, c)
            continue
        # Each expert of this rank multiplies its share of the copies; our FP8 leaves experts in 16 bits.
        local_experts = first.experts / layout.expert
        rows = tokens * layout.expert_row_share * first.top_k / local_experts
        rate, grouped_c = (r.wide, c) if step.native else (r.matmul, replace(c, edge=c.expert_edge))
        products += uneven * local_experts * _product_seconds(rows, outputs, inputs, rate, grouped_c)
    again_products, again_mixing, again_elementwise = _recomputed(layer, step)
    # Our own: the square of scores passes through memory nine times in fp32, three of them forward.
    score_bytes = 3.0 * KEPT_SCORE_BYTES if step.native else step.bytes_per_value * c.square
    mixing = moved = 0.0
    for branch in layer.branches:
        moved += branch.block.moved_bytes(step, layout) + sum(norm.moved_bytes(step, layout) for norm in branch.norms)
        work = branch.block.mixing(step)
        if work is not None:
            narrow = (c.own_narrow if step.native else 1.25) if work.narrow_heads else 1.0
            score_seconds = (work.scores * score_bytes + work.extra_bytes) / r.memory
            mixing += tokens / t * (work.flops * narrow / r.attention + score_seconds)
    # Fused kernels compute the scores again in the backward pass; a stored square needs no second pass.
    passes = 3.0 if step.native and not step.flash else 3.5
    if not step.compile:
        moved *= c.own_eager / 3.0 if step.native else c.eager
    cast = 0.0
    if step.native and step.precision == "fp8":
        # Largest magnitude and cast of every product's input (forward, and again for the weights' gradient) and of its
        # gradient, which is also transposed. In other engines the constant `fp8` stands for this.
        inputs = float(sum(group[0].inputs for group in layer.product_groups if group[0].experts == 1))
        outputs = float(sum(product.outputs for product, _ in layer.products if product.experts == 1))
        rows = 2.0 if step.fp8_scaling == "row" else 0.0  # scales by row are found once more, along the other side
        cast = tokens * ((10.0 + rows) * inputs + (8.0 + rows) * outputs) / t / r.memory
    # Each branch gathers its input and reduce-scatters its output over the tensor-parallel ranks, in every pass.
    branches = float(len(layer.branches))
    gathered = _ring_seconds(2.0 * branches * tokens * width * step.bytes_per_value, t, r, 1, 2.0 * branches)
    hidden = c.tensor_overlap if step.compile else 0.0
    context = 0.0
    if layout.context > 1:
        size = sum(branch.block.context_bytes(step, layout) or 0.0 for branch in layer.branches)
        context = 0.3 * _ring_seconds(size * tokens * layout.context, layout.context, r, t)
    exchange = 0.0
    if layout.expert > 1 and local_experts:
        exchange = _exchange_seconds(layer, tokens, step, layout, r) * uneven
    exchanged_again = float(step.recompute in ("full", "selective")) if step.native else again_elementwise
    kernels = (20.0 if step.compile else ENGINE_PROFILES[step.engine].eager_kernels) + (8.0 if t > 1 else 0.0)
    if local_experts and not step.native:
        kernels += c.expert_kernels * (c.eager if ENGINE_PROFILES[step.engine].eager_experts else 1.0)
    return {
        "matrix products": products * (3.0 + again_products),
        "attention": mixing * (passes + again_mixing),
        "element-wise": tokens * moved / r.memory * (3.0 + again_elementwise),
        "casts to 8 bits": cast,
        "tensor-parallel traffic": gathered * (3.0 if step.recompute == "full" else 2.0) * (1 - hidden),
        "context-parallel traffic": context * 3.0,
        "expert-parallel traffic": exchange * (2.0 + exchanged_again),
        "kernel launches": kernels * (3.0 + again_elementwise) * c.launch_us * 1e-6,
    }


def _recomputed(layer: LayerSpec, step: StepSpec) -> tuple[float, float, float]:
    """Shares of a forward pass that run a second time: products, mixing between positions, element-wise work."""
    if step.recompute not in ("full", "selective"):
        return (1.0 - step.recompute_budget if step.recompute == "budget" else 0.0,) * 3
    if not step.native:
        share = ENGINE_PROFILES[step.engine].selective_share
        return (share, 0.0, share) if step.recompute == "selective" else (1.0, 1.0, 1.0)
    products = recomputed_share(layer, step.recompute)
    if step.recompute == "full":
        return products, 1.0, 0.5  # most element-wise work goes into the backward kernels
    return products, 0.0 if all(b.block.kept_by_selective for b in layer.branches) else 1.0, 0.0


def _ring_seconds(
    size: float, ranks: int, r: _Rates, span: int = 1, messages: float = 1.0, *, tree: bool = False
) -> float:
    """Seconds for all-gathers or reduce-scatters of `size` bytes in total, sent as `messages` collectives over `ranks`.

    An all-reduce is two of them. `span` is how far apart the ranks of the group are in devices (1: neighbours). A
    ring's latency grows with the number of ranks, which is what makes full sharding collapse at thousands of devices.
    An all-reduce may use a `tree`, whose latency grows with the logarithm."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks
    inside = max(1, r.linked // span)  # ranks of the group that the links inside a node join
    if ranks <= inside:
        return size * share / r.intra + messages * (ranks - 1) * r.intra_latency
    hop = (r.inter_latency + (inside - 1) * r.intra_latency) / inside
    # A node passes the whole message once; its devices in the group share its links, the others have their own.
    latency = 2.0 * math.log2(ranks) * r.inter_latency if tree else (ranks - 1.0) * hop
    return max(size * share / (r.inter * inside), size * share / r.intra) + messages * latency


def _exchange_seconds(layer: LayerSpec, tokens: float, step: StepSpec, layout: Layout, r: _Rates) -> float:
    """Seconds to send rows to the ranks of their experts and the results back, once. The products wait for the rows:
    hidden only where an engine runs two micro-batches side by side."""
    ranks, c = layout.expert, r.constants
    inside = min(ranks, max(1, r.linked * ranks // layout.expert_split))  # ranks that the links inside a node join

    def sent(groups: int) -> float:
        """Bytes that a rank sends to the others of `groups` equal groups of ranks."""
        divided = replace(layout, expert=groups)
        size = 2.0 * tokens * sum(branch.block.exchanged_bytes(step, divided) for branch in layer.branches)
        return size * (groups - 1) / groups

    share = 1.0 if step.native or step.dispatch == "fused" else c.exchange
    across = sent(math.ceil(ranks / inside)) / r.inter / share if inside < ranks else 0.0
    local = sent(ranks) * (inside - 1) / (ranks - 1) / r.intra / share
    latency = 2.0 * ((inside - 1) * r.intra_latency + math.log2(ranks / inside) * r.inter_latency)
    if layout.chunks > 1:
        across *= ENGINE_PROFILES[step.engine].exposed_exchange
    return max(local, across) + latency


def _optimizer_seconds(stored: float, step: StepSpec, layout: Layout, r: _Rates) -> float:
    """Reads and writes of weights, gradients and moments of this device's share, and the gradient norm."""
    engine = ENGINE_PROFILES[step.engine]
    if layout.offload != "none":
        update, norm = 0.0, 4.0  # the states lie on the host
    elif step.native:
        # One compiled kernel: weights and moments read and written, gradients read, the 16-bit copy written.
        pure = step.precision == "bf16_pure"
        single = layout.devices == 1 and step.precision in ("bf16", "fp8")
        norm = 2.0 if pure or (single and layout.accumulation == 1) else 4.0
        moments = 2.0 * (2.0 if step.moments == "bf16" else 4.0) * step.moment_tensors
        update = (4.0 if pure else 8.0) + moments + norm + (2.0 if single else 0.0)
    else:
        update, norm = 34.0 if step.compile else engine.eager_update_bytes, 4.0
    return (stored / layout.shard_size * update + stored / layout.weight_shards * norm) / r.memory


def _orthogonal_seconds(model: ModelSpec, layout: Layout, r: _Rates) -> float:
    """Muon: the iterations of each matrix of the layers, divided over all ranks of a stage; its parts go to one rank and
    the results back, in 16 bits."""
    seconds = 0.0
    for group in model.groups:
        for product, _ in group.layer.products:
            sides = [product.outputs, product.inputs]
            if product.experts > 1:  # the divided side is that of all experts which a token meets
                sides[0 if product.divided == "outputs" else 1] //= product.top_k
            short, long = sorted(sides)
            groups = grouped_iterations(short, long)
            squares = sum(square_products(iterations) for iterations in groups)
            one = 2.0 * len(groups) * _product_seconds(short, short, long, r.wide, r.constants)
            one += squares * _product_seconds(short, short, short, r.wide, r.constants)
            seconds += one * product.experts * group.count
    ranks = layout.replicas * layout.tensor
    parts = 2.0 * model.params.body / layout.pipeline / (layout.shard_size * layout.tensor)
    return seconds / layout.devices + 2.0 * _ring_seconds(parts, ranks, r, messages=4.0)


def _data_traffic(
    layers: float,
    buckets: float,
    divided: list[tuple[float, Layout]],
    compute: float,
    step: StepSpec,
    layout: Layout,
    r: _Rates,
    gathers: int,
    reductions: int,
) -> float:
    """Seconds of a step for gathering weights and reducing gradients: the part that does not overlap with computation,
    and the slowdown that the overlapped part causes."""
    engine, c = ENGINE_PROFILES[step.engine], r.constants
    if layout.replicas == 1:
        return 0.0
    # Our own engine reduces in fp32.
    habit = engine.gradient_precision if step.precision == "bf16" else "bf16"
    fp32 = step.native or step.precision == "fp32" or (step.gradient_precision or habit) == "fp32"
    gradient = 4.0 if fp32 else 2.0
    seconds = size = 0.0
    for stored, part in divided:
        more_seconds, more_bytes = _part_traffic(buckets, stored, gradient, step, part, r, gathers, reductions)
        seconds, size = seconds + more_seconds, size + more_bytes
    if not engine.overlaps_reduction and layout.shard != "full":
        return seconds  # reduced after the last backward pass, gathered after the step
    local = min(seconds, size / r.intra)
    taken = c.contention * (local + 0.3 * (seconds - local))  # where the fabric is the bottleneck, kernels mostly wait
    # The last bucket is complete when the backward pass is: what it holds beyond one layer has nothing to hide behind.
    tail = seconds * (1.0 / buckets - 1.0 / layers)
    behind = c.overlap * compute
    if layout.shard in ("none", "zero1") or layout.pipeline > 1:
        # What is sent once a step hides behind the first forward and the last backward pass; where stages are
        # interleaved, behind those of as many micro-batches as there are ranks in the pipeline.
        behind *= min(1.0, (layout.pipeline if layout.chunks > 1 else 1) / layout.accumulation)
    return taken + max(0.0, seconds - taken - behind, tail)


def _part_traffic(
    buckets: float,
    stored: float,
    gradient: float,
    step: StepSpec,
    layout: Layout,
    r: _Rates,
    gathers: int,
    reductions: int,
) -> tuple[float, float]:
    """Seconds and bytes of gathering `stored` weights and reducing their gradients of `gradient` bytes."""
    group, span = layout.replicas, layout.tensor
    inside = layout.shard_size if layout.is_hybrid else group
    if layout.shard in ("full", "hybrid"):
        size, messages = (4.0 * gathers + reductions * gradient) * stored, (2.0 * gathers + reductions) * buckets
    elif layout.divides_gradients_only and (step.native or layout.is_hybrid):
        # Gradients stay divided: each micro-batch gathers once and reduces.
        size, messages = (2.0 * gathers + reductions * gradient) * stored, (gathers + reductions) * buckets
    else:
        size = (gradient + (gradient if layout.shard == "none" else 2.0)) * stored
        # In buckets of the engine's own size where none is set.
        values = max(200e6 / gradient, ENGINE_PROFILES[step.engine].bucket_values_per_rank * group)
        messages = 2.0 * (max(1.0, stored / values) if layout.bucket is None else buckets)
    seconds = _ring_seconds(size, inside, r, span, messages, tree=layout.shard == "none")
    if layout.is_hybrid:
        copies = 2.0 * gradient * stored / inside
        seconds += _ring_seconds(copies, max(1, group // inside), r, span * inside, buckets, tree=True)
        size += copies
    return seconds, size if group > 1 else 0.0


DEFAULTS = Constants()
