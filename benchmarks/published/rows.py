"""A row of a table of published runs as model, training step, layout and machine, or the reason why it cannot be read.

Only columns that a user of the planner could state are read: never tokens/s, MFU, TFLOPs, memory, source or notes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.published.cells import NO, YES, Row, flag, lower_text, number, positive, product, text_of
from benchmarks.published.experts import dispatch_of, expert_model, is_balanced, recomputed_layers, recomputed_modules

from windlass.blocks.embedding.spec import padded_rows
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.clusters import cluster_names, find_device, load_cluster
from windlass.clusters.model import Device, Links
from windlass.cost.step import Machine
from windlass.layout.types import Layout, StepSpec
from windlass.models.presets.hf import classic_spec
from windlass.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A row that could be read."""

    model: ModelSpec
    step: StepSpec
    layout: Layout
    machine: Machine | None
    """None: the device is not in devices.toml; memory can be predicted, time cannot."""
    capacity: float | None
    """Bytes a program can use; for an unknown device taken from its name ("XPU-96GB")."""
    assumed: tuple[str, ...]
    """Blank columns and the values used for them."""
    parts: int = 1
    """Addressable devices that the row counts as one: 2 if it means an MI250X module."""


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str


FAMILIES = ("llama", "gpt", "mpt", "bloom")
DENSE = re.compile(
    r"((?P<gated>(tiny|code)?llama|mistral|qwen|gemma|olmo|yi|granite|internlm|baichuan|smollm|stablelm|phi(?=[-_ ]?3))"
    r"|phi|falcon|pythia|starcoder|gpt|opt)([-_ ]?(neo|neox|j))?([-_ ]?[1-3](\.\d)?)?"
)
"""Names of dense families; the column `glu` says better whether they are gated. Llama 4 and gpt-oss have experts."""
GATED, UNGATED = ("swiglu", "geglu", "reglu", "glu", "gated"), ("gelu", "relu", "relu2", "ungated")
"""Words of the column `glu` beside yes and no."""
IN_1024 = ("seq_len", "hidden", "ffn", "expert_ffn", "shared_ffn")
"""Columns in which 4k is 4,096."""
HYBRID = re.compile(r"hybrid|ssm|mamba|linear")
"""Architectures whose layers are not all attention."""
MOST_LAYERS = 10_000
"""A model with experts is assembled layer by layer."""
CONTRADICTION = 2.001
"""Ratio from which two cells cannot describe the same run. Published tables have labels that are off by up to two."""


class _UnreadableError(Exception):
    """A cell has content that cannot be read; a default in its place would give a wrong prediction."""


def read_run(row: Row) -> PublishedRun | Refusal:
    try:
        return _read_run(row)
    except _UnreadableError as problem:
        return Refusal(str(problem))


def _read_run(row: Row) -> PublishedRun:
    assumed: list[str] = []
    name = text_of(row, "gpu")
    device = find_device_cached(name)
    parts = _parts(device, name)
    model = _model(row, assumed)
    gpus, seq_len = _needed(row, "gpus"), _needed(row, "seq_len")
    degrees = {k: _default(row, k, 1, assumed) for k in ("tp", "pp", "cp")}
    group = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if gpus * parts % group:
        terms = " x ".join(f"{k} {v}" for k, v in degrees.items() if v > 1)
        raise _UnreadableError(f"{terms} = {group} does not divide {gpus * parts} devices")
    if degrees["pp"] > model.num_layers:
        raise _UnreadableError(f"pp {degrees['pp']} is more than {model.num_layers} layers")
    chunks = _optional(row, "vp") or 1
    if chunks > model.num_layers:
        raise _UnreadableError(f"vp {chunks} is more than {model.num_layers} layers")
    if (heads := positive(row, "heads")) and heads % degrees["tp"]:
        raise _UnreadableError(f"tp {degrees['tp']} does not divide heads {heads}")
    data = gpus * parts // group
    expert, expert_tensor = _expert_degrees(row, model, gpus * parts // degrees["pp"], degrees["tp"], assumed)
    micro, accumulation = _batch(row, data, seq_len, assumed)
    step, sequence_parallel = _step(row, seq_len, assumed)
    per_node = (positive(row, "gpus_per_node") or 0) * parts or _devices_per_node(device.name if device else "")
    capacity = _capacity(device, name)
    shard = lower_text(row, "shard")
    if not shard or _shard(shard) is None:
        assumed.append("shard=none" + _not_understood(row, "shard"))
    kind = shard_of(row)
    layout = Layout(
        data=data,
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        context=degrees["cp"],
        expert=expert,
        expert_tensor=expert_tensor,
        shard=kind,
        shard_size=1 if kind == "none" else data * degrees["cp"],
        micro_batch=micro,
        accumulation=accumulation,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        sequence_parallel=sequence_parallel,
        offload=("parameters" if "param" in shard else "optimizer") if "offload" in shard else "none",
    )
    if layout.is_hybrid:
        copies = positive(row, "dp_replicate")
        group = _group(model, layout, capacity or 80 * 2**30, per_node) if copies is None else layout.replicas // copies
        layout = replace(layout, shard_size=max(1, group))
    interconnect = text_of(row, "interconnect")
    links = links_of(device, interconnect, per_node)
    rack = RACK.search(interconnect.lower())
    # "NVLink/NVL72" also stands beside parts in servers; only Grace modules are built into such racks.
    linked = int(rack.group(1)) if rack and device is not None and device.name.startswith("g") else None
    machine = None if device is None else Machine(device, links, per_node, linked_devices=linked)
    return PublishedRun(model, step, layout, machine, capacity, tuple(assumed), parts)


def _needed(row: Row, key: str) -> int:
    text = text_of(row, key)
    value = product(row, key) if key == "gpus" else _count(row, key)
    if value is None or (key == "gpus" and "node" in text.lower()):
        raise _UnreadableError(f"{key} {text!r} is not a count" if text else f"{key} not stated")
    return value


def _count(row: Row, key: str) -> int | None:
    return positive(row, key, kilo=1024 if key in IN_1024 else 1000)


def _optional(row: Row, key: str) -> int | None:
    """A count; None if the cell is blank, no or zero."""
    stated, text = _count(row, key), text_of(row, key)
    if stated is None and text and text.lower() not in NO and number(row, key) != 0:
        raise _UnreadableError(f"{key} {text!r} is not a count")
    return stated


def _default(row: Row, key: str, value: int, assumed: list[str]) -> int:
    stated = _optional(row, key)
    if stated is not None:
        return stated
    assumed.append(f"{key}={value}")
    return value


find_device_cached = cache(find_device)


@cache
def _devices_per_node(device: str) -> int:
    """Devices of a node if the row does not state it: those of the first known cluster with this device, else eight."""
    clusters = (load_cluster(name) for name in cluster_names())
    return next((c.node.devices for c in clusters if c.device == device), 8)


STATED = re.compile(r"(?<![\d.])(\d+)\s*g(?:b|ib)?\b")


def _capacity(device: Device | None, name: str) -> float | None:
    """Bytes a program can use; a size in the name overrides ours if the part is sold with another one.

    Grace superchips are excluded: the larger size in their names is the CPU's memory."""
    match = STATED.search(name.lower())
    stated = float(match.group(1)) * 2**30 if match else None
    if device is None:
        return None if stated is None else 0.985 * stated
    module_bytes = device.memory * _parts(device, name)
    if stated is not None and abs(stated / module_bytes - 1) > 0.12 and "gh200" not in device.name:
        return 0.985 * stated
    return device.usable_memory or device.memory * 0.985


def _parts(device: Device | None, name: str) -> int:
    """Addressable devices that a row counts as one: "MI250X (1 GCD)" one, "MI250X-128GB" or "MI250X module" two."""
    if device is None or device.per_module == 1 or "gcd" in name.lower():
        return 1
    match = STATED.search(name.lower())
    module = re.search(r"module|oam|\bcard|mcm", name.lower()) or (
        match and float(match.group(1)) >= 1.5 * device.memory / 2**30
    )
    return device.per_module if module else 1


def _expert_degrees(row: Row, model: ModelSpec, ranks: int, tensor: int, assumed: list[str]) -> tuple[int, int | None]:
    """Ranks that share the experts, and those that share each of them."""
    counts = [block.count for block in model.blocks if isinstance(block, ExpertsSpec)]
    if not counts:
        return 1, None
    expert, parts = _default(row, "ep", 1, assumed), _default(row, "etp", 1, assumed)
    if counts[0] % expert:
        raise _UnreadableError(f"ep {expert} does not divide {counts[0]} experts")
    if ranks % (expert * parts):
        raise _UnreadableError(f"ep {expert} x etp {parts} does not divide {ranks} devices of a pipeline stage")
    return expert, parts


def _model(row: Row, assumed: list[str]) -> ModelSpec:
    if HYBRID.search(lower_text(row, "arch")):
        raise _UnreadableError(f"arch {lower_text(row, 'arch')!r}: layers other than attention are not predicted")
    if (positive(row, "experts") or 0) >= 2:
        return _expert_model(row, assumed)
    _refuse_experts(row)
    layers, width = _needed(row, "layers"), _needed(row, "hidden")
    arch, glu = lower_text(row, "arch"), _gated(row)
    if arch not in FAMILIES:
        known = DENSE.fullmatch(arch)
        if arch and known is None:
            raise _UnreadableError(f"arch {arch!r} is not one of {', '.join(FAMILIES)}")
        arch = "llama" if glu or (glu is None and known and known["gated"]) else "gpt"
        assumed.append(f"arch={arch}" + _not_understood(row, "arch"))
    heads = _default(row, "heads", max(1, width // 128), assumed)
    vocab = _default(row, "vocab", 50_304, assumed)
    stated = number(row, "ffn", kilo=1024)  # 8/3 of the width need not be an integer
    blank = stated is None or stated < 1
    if stated is not None and 1 <= stated < width / 8:  # a multiple of the width
        raise _UnreadableError(f"ffn {text_of(row, 'ffn')!r} is not a width")
    ffn = _default(row, "ffn", 4 * width, assumed) if stated is None or stated < 1 else round(stated)
    head_dim = _optional(row, "head_dim")
    if head_dim is None and width % heads:
        assumed.append(f"head_dim={width // heads}")
    kv_heads = _optional(row, "kv_heads") or heads
    if heads % kv_heads:
        raise _UnreadableError(f"kv_heads {kv_heads} does not divide heads {heads}")
    tied = flag(row, "tied")
    sizes: dict[str, Any] = {
        "family": arch,
        "layers": layers,
        "width": width,
        "hidden": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or max(1, width // heads),
        "vocab": vocab,
        "rows": padded_rows(vocab),
        "tied": arch != "llama" if tied is None else tied,
        # A blank ffn becomes 4 x width without a gate: as many weights as the usual gated block.
        "gated": False if blank else arch == "llama" if glu is None else glu,
    }
    billions = stated_billions(row)
    if billions and billions > 0:
        sizes = _with_stated_size(sizes, billions, positive(row, "kv_heads") is None)
        sizes = _with_stated_ffn(sizes, billions) if blank else sizes
        counted = _total(sizes) / 1e9
        _compare(row, "params_b", counted, billions, f"{counted:.3g}", assumed)
    return classic_spec(**sizes)


def _gated(row: Row) -> bool | None:
    text = lower_text(row, "glu")
    return True if text in GATED else False if text in UNGATED else flag(row, "glu")


def _refuse_experts(row: Row) -> None:
    """Rows that have experts but do not state how many; priced as dense they would look cheap."""
    for key, least in (("top_k", 1), ("ep", 2), ("expert_ffn", 1)):
        if (value := positive(row, key) or 0) >= least:
            raise _UnreadableError(f"{key} {value}: experts not stated")
    active, total = number(row, "active_params_b"), number(row, "params_b")
    if active and total and active < 0.8 * total:
        raise _UnreadableError(f"active_params_b {active:g} of {total:g}: experts not stated")
    if flag(row, "mla"):
        raise _UnreadableError("mla: latent attention is only predicted together with experts")


def _expert_model(row: Row, assumed: list[str]) -> ModelSpec:
    width, shared = _needed(row, "hidden"), number(row, "shared_ffn", kilo=1024)
    sizes = {key: _needed(row, key) for key in ("layers", "experts", "top_k")}
    sizes["expert_ffn"] = _optional(row, "expert_ffn") or _default(row, "expert_ffn", _needed(row, "ffn"), assumed)
    if sizes["layers"] > MOST_LAYERS:
        raise _UnreadableError(f"layers {sizes['layers']} is more than {MOST_LAYERS}")
    if sizes["top_k"] > sizes["experts"]:
        raise _UnreadableError(f"top_k {sizes['top_k']} is more than {sizes['experts']} experts")
    heads = _default(row, "heads", max(1, width // 128), assumed)
    kv_heads = _optional(row, "kv_heads") or heads
    if heads % kv_heads:
        raise _UnreadableError(f"kv_heads {kv_heads} does not divide heads {heads}")
    if shared is None:
        shared = (number(row, "shared_experts") or 0) * sizes["expert_ffn"]
    is_dense = positive(row, "dense_layers") or (positive(row, "moe_every") or 1) > 1
    model = expert_model(
        row,
        {
            **sizes,
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": _default(row, "head_dim", 128, assumed),
            "ffn": _default(row, "ffn", 4 * width, assumed) if is_dense else 0,
            "vocab": _default(row, "vocab", 50_304, assumed),
            "shared_ffn": round(shared),
        },
        flag(row, "tied") is True,
    )
    billions = stated_billions(row)
    if billions and billions > 0:
        counted = model.params.total / 1e9
        _compare(row, "params_b", counted, billions, f"{counted:.3g}", assumed)
    return model


def _compare(row: Row, key: str, counted: float, stated: float, text: str, assumed: list[str]) -> None:
    """Refuse a cell that disagrees with the other cells by more than a factor of two; name one that disagrees by 25 %."""
    ratio = max(counted / stated, stated / counted)
    if ratio > CONTRADICTION:
        raise _UnreadableError(f"{key} {text_of(row, key)!r} contradicts the {text} of the other columns")
    if ratio > 1.25:
        assumed.append(f"{key}={text}" + _not_understood(row, key))


def stated_billions(row: Row) -> float | None:
    """Stated parameter count in billions; "7B" and "560M" carry their own unit."""
    value = number(row, "params_b")
    return value / 1e9 if value and value > 1e5 else value


def _total(sizes: dict[str, Any]) -> int:
    return classic_spec(**sizes).params.total


def _with_stated_size(sizes: dict[str, Any], billions: float, kv_heads_blank: bool) -> dict[str, Any]:
    """Sizes corrected by the stated parameter count: heads wider than width / heads (Qwen 3), or grouped-query attention.

    Used only if it explains the count (within 2 %) and the plain sizes do not (3 % off)."""
    heads = sizes["heads"]
    others = [{**sizes, "head_dim": 128}] if sizes["head_dim"] != 128 else []
    if kv_heads_blank:
        others += [{**sizes, "kv_heads": k} for k in (8, 4, 2, 1) if k < heads and heads % k == 0]

    def off(candidate: dict[str, Any]) -> float:
        return abs(_total(candidate) / 1e9 / billions - 1)

    best = min(others, key=off, default=sizes)
    return best if off(best) < 0.02 and off(sizes) > 0.03 else sizes


def _with_stated_ffn(sizes: dict[str, Any], billions: float) -> dict[str, Any]:
    """The feed-forward width that the stated parameter count implies, if it is a usual one (two to eight times the width)."""
    without_ffn = _total({**sizes, "hidden": 0})
    per_column = _total({**sizes, "hidden": 1}) - without_ffn
    ffn = 256 * round((billions * 1e9 - without_ffn) / per_column / 256)
    return {**sizes, "hidden": ffn} if 2 * sizes["width"] <= ffn <= 8 * sizes["width"] else sizes


def _batch(row: Row, data: int, seq_len: int, assumed: list[str]) -> tuple[int, int]:
    micro, accumulation = _optional(row, "micro_batch"), _optional(row, "grad_accum")
    total = number(row, "global_batch_tokens")
    if re.search("seq|sample", lower_text(row, "global_batch_tokens")):
        raise _UnreadableError(f"global_batch_tokens {text_of(row, 'global_batch_tokens')!r} is not a number of tokens")
    per_replica = max(1, round(total / seq_len / data)) if total and total > 0 else None
    if not micro:
        micro = max(1, per_replica // (accumulation or 1)) if per_replica and accumulation else 1
        assumed.append(f"micro_batch={micro}")
    if not accumulation:
        accumulation = max(1, per_replica // micro) if per_replica else 1
        assumed.append(f"grad_accum={accumulation}")
    if total and total > 0:
        counted = micro * accumulation * data * seq_len
        _compare(row, "global_batch_tokens", counted, total, f"{counted:,}", assumed)
    return micro, max(1, accumulation)


def _step(row: Row, seq_len: int, assumed: list[str]) -> tuple[StepSpec, bool]:
    """How the row's engine computes a step, and whether it uses sequence parallelism."""
    precision, flash_text, compile_stated = precision_of(row), lower_text(row, "flash"), flag(row, "compile") is True
    recompute = _recompute(lower_text(row, "activation_ckpt"))
    if recompute is None:
        recompute = "selective"  # the default of torchtitan and of Megatron's recipes
        assumed.append("activation_ckpt=selective" + _not_understood(row, "activation_ckpt"))
    if not _stated_precision(row):
        assumed.append("precision=bf16" + _not_understood(row, "precision"))
    optimizer = lower_text(row, "optimizer") or "adamw"
    sharded = shard_of(row) in ("full", "hybrid")
    kernel, expert_layers = _kernel(flash_text), (positive(row, "experts") or 0) >= 2
    compiled = compile_stated or kernel == "te"
    dispatch, layers_again = dispatch_of(row) or "alltoall", recomputed_layers(row)
    balanced = is_balanced(row)
    if expert_layers:
        kernel = "flash" if kernel == "flash1" else kernel  # grouped products are younger than flash attention 2
        compiled = compiled or "distributed" in optimizer  # Megatron Core's experts need its fused kernels
        if (positive(row, "ep") or 1) > 1:
            if dispatch_of(row) is None:
                assumed.append(f"dispatcher={dispatch}" + _not_understood(row, "dispatcher"))
            if balanced is None:  # tables of speed are mostly measured with even routing, and seldom say so
                assumed.append("force_balance=1" + _not_understood(row, "force_balance"))
    if layers_again is not None and recompute == "selective":
        recompute = "budget"
    # TransformerEngine recipes (NeMo, Megatron-Bridge) reduce and keep gradients in bf16.
    gradients = (
        "fp32"
        if "fp32 grad" in optimizer
        else "bf16"
        if "bf16 states" in optimizer
        else "bf16"
        if kernel == "te" and not sharded
        else None
    )
    # torch.compile and PyTorch's own attention mark loops written in plain PyTorch (DDP where nothing is sharded).
    native = kernel != "te" and (compile_stated or "sdpa" in flash_text)
    # Megatron accumulates bf16 gradients in fp32 and is what tensor and pipeline parallelism usually mean; DeepSpeed keeps 16 bits.
    model_parallel = (number(row, "tp") or 1) * (number(row, "pp") or 1) > 1
    megatron = (
        kernel == "te" or "distributed" in optimizer or (precision == "bf16" and model_parallel and gradients != "fp32")
    )
    step = StepSpec(
        seq_len=seq_len,
        recompute=recompute,
        precision=precision,
        compile=compiled,
        # PyTorch's own attention has been fused since 2.0, so "no flash" means stored scores only in older engines.
        attention="flash" if kernel == "math" and sharded else kernel,
        loss=_loss(compiled, flash_text, sharded),
        optimizer="sgd" if "sgd" in optimizer else "adamw",
        moment_tensors=1 if "sgd" in optimizer else 2,
        moments="int8"
        if "8-bit" in optimizer or "8bit" in optimizer
        else "bf16"
        if "bf16 moments" in optimizer
        else "fp32",
        gradient_precision=gradients,
        recompute_budget=1.0 - (layers_again or 0.5),
        dispatch=dispatch,
        recomputed=recomputed_modules(row) if recompute == "selective" else (),
        balanced=balanced is not False,
        engine="torch" if sharded or native else "megatron" if megatron else "deepspeed",
    )
    # Megatron got sequence parallelism in 2022, together with selective recompute and before flash attention: a row with
    # neither is older.
    return step, kernel != "math" or recompute == "selective"


def _not_understood(row: Row, key: str) -> str:
    """The content of a cell that was not understood, for the list of assumptions."""
    return f" (not {text_of(row, key)!r})" if text_of(row, key) else ""


def precision_of(row: Row) -> str:
    """The precision by the names of `StepSpec`; bf16 if blank. Mixed precision is named by its narrower type."""
    return _stated_precision(row) or "bf16"


def _stated_precision(row: Row) -> str | None:
    text = re.sub(r"[\s-]+", "_", lower_text(row, "precision"))
    if "attention_only" in text:
        return "bf16"  # experts, most of the work, stay in 16 bits
    return next((name for name, marks in PRECISIONS.items() if any(mark in text for mark in marks)), None)


PRECISIONS = {
    "nvfp4": ("nvfp4", "fp4"),
    "mxfp8": ("mxfp8",),
    "fp8": ("fp8", "float8", "e4m3"),
    "bf16_pure": ("pure",),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "fp32": ("32",),
}
"""Names are tried in this order: "fp8 (bf16 elsewhere)" is fp8, "bf16_pure" is not bf16, "tf32/fp32" is fp32."""


def shard_of(row: Row) -> str:
    """none, zero1, zero2, full, hybrid or hybrid_zero2, from the names that engines use; none if not recognised."""
    return _shard(lower_text(row, "shard")) or "none"


@cache
def _shard(cell: str) -> str | None:
    text = re.sub(r"[\s_-]+", "", cell)
    return next((name for name, marks in SHARDS if re.search(marks, text)), None)


SHARDS = (
    ("none", r"noshard|unshard"),
    ("hybrid_zero2", r"hybrid(shard)?zero2"),
    ("hybrid", r"hsdp|hybrid|mics"),
    ("zero2", r"shardgradop|(zero|stage|zerostage)2|^2$"),
    ("zero1", r"(zero|stage|zerostage)1|^1$|dist(ributed)?opt(im)?"),
    ("full", r"fsdp|full|(zero|stage|zerostage)(3|\+\+)|^3$"),
    ("none", r"^(|0|-|no|none|off|ddp|dp|false|n|zero0|replicated?|dataparallel)$"),
)
"""Patterns are tried in this order on the text without spaces and dashes: "FSDP (SHARD_GRAD_OP)" is zero2."""


def _recompute(text: str) -> str | None:
    """none, selective or full; None: blank or not recognised."""
    if text.startswith(("sel", "sac")) or "selective" in text:
        return "selective"
    if text.startswith(("full", "all", "every", "uniform", "block")) or text in YES:
        return "full"  # "uniform" and "block" are Megatron's two ways to recompute whole layers
    if text in NO or re.match(r"(no|not|none|off|without|disabled)(?![a-z])", text):
        return "none"
    return None


def _loss(compiled: bool, flash_text: str, sharded: bool) -> str:
    """plain, compiled, chunked or inplace. The flash-attn package has a cross-entropy that overwrites the logits, and tables with "flash: yes" are
    of engines that use both. The name of a kernel ("fa2", "sdpa") says nothing about the loss."""
    if sharded and not compiled and flash_text in YES:
        return "inplace"
    if sharded and "flex" in flash_text:
        return "chunked"  # torchtitan
    return "compiled" if compiled else "plain"


def _kernel(text: str) -> str:
    """The attention kernel; of a version ("flash-attn 2.3") the first digit counts."""
    if text in NO or text in ("math", "eager", "naive", "vanilla", "unfused"):
        return "math"
    if re.search(r"\bte\b", text) or "transformer" in text or "cudnn" in text:
        return "te"
    version = re.search(r"\d", text)
    if version and version.group() == "3":
        return "flash3"
    if text in YES or "triton" in text or (version and version.group() == "1"):
        return "flash1"  # tables from before 2024 write "flash: yes" without a version
    return "flash"


def _group(model: ModelSpec, layout: Layout, capacity: float, per_node: int) -> int:
    """Devices that share one copy if a row only says "hybrid": a node, doubled until the states leave half the memory free."""
    states = 16.0 * model.params.stored / (layout.tensor * layout.pipeline)
    size = max(1, per_node // layout.tensor)
    while size < layout.data and states / size > 0.5 * capacity:
        size *= 2
    return min(size, layout.data)


NODE_GBS = {
    "volta": 25.0,
    "ampere": 200.0,
    "hopper": 400.0,
    "blackwell": 400.0,
    "cdna2": 100.0,
    "cdna3": 400.0,
    "cdna4": 400.0,
    "ada": 25.0,
    "turing": 12.5,
}
"""GB/s of a node of eight into the fabric if a row does not state it: one 200 or 400 Gb/s card per device, as vendors build them."""
INTRA_GBS = {
    "volta": 150.0,
    "ampere": 300.0,
    "hopper": 450.0,
    "blackwell": 900.0,
    "cdna2": 100.0,
    "cdna3": 448.0,
    "cdna4": 538.0,
    "ada": 25.0,
    "turing": 12.5,
}
"""GB/s from one device to the others of its node, one direction, as data sheets give NVLink, Infinity Fabric and PCIe (and as the
cluster files do); what collectives reach of it is the constant `network`."""
CARDS = {"sm_86": 25.0, "sm_120": 50.0}
"""The same for parts sold as PCIe cards."""


def links_of(device: Device | None, text: str, per_node: int) -> Links:
    node = _node_gbs(text, per_node)
    generation = device.generation if device else ""
    if node is None:
        node = NODE_GBS.get(generation, 200.0) * per_node / 8
    if device is None:
        return Links(inter_gbs_per_node=node)
    slot = 25.0 if generation == "ampere" else 50.0  # PCIe 4 and 5
    intra = slot if "pcie" in device.name else CARDS.get(device.arch, INTRA_GBS.get(generation, 100.0))
    if "800" in device.name:  # A800 and H800: NVLink cut to 200 GB/s per direction
        intra = min(intra, 200.0)
    return Links(intra_gbs=intra, inter_gbs_per_node=node)


RACK = re.compile(r"nvl(\d+)")
"""Racks whose devices are all joined by the links inside a node."""
INSIDE = re.compile(r"nvlink|nvswitch|xgmi|infinity fabric|pcie", re.I)
RATE = re.compile(r"(?:(\d+)\s*[x\u00d7]\s*)?(\d+(?:\.\d+)?)\s*(T|G)\s*(b/s|bps|bit/s|bits/s|B/s|bE\b)", re.I)
INFINIBAND = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}


def _node_gbs(text: str, per_node: int) -> float | None:
    """GB/s of a node from text like "800 Gb/s InfiniBand per node", "4x NDR200", "400 Gb/s RDMA per GPU", "4 Omni-Path links".

    Clauses about links inside the node are skipped. None: no rate in the text."""
    for clause in re.split(r"[;,+]|\band\b", text):
        if not INSIDE.search(clause) and (gbs := _clause_gbs(clause, per_node)) is not None:
            return gbs
    low = text.lower()
    if "omni-path" in low:
        count = re.search(r"(\d+)\s*omni-path", low)
        return 12.5 * (int(count.group(1)) if count else max(1, per_node))
    if "slingshot" in low:
        return 25.0 * max(1, per_node // 2)  # one card of 200 Gb/s per module of two
    return 400.0 if "efa" in low.split() else None


def _clause_gbs(clause: str, per_node: int) -> float | None:
    many = per_node if re.search(r"per (?:gpu|device)", clause, re.I) else 1
    if match := RATE.search(clause):
        number, rate, scale, unit = match.groups()
        gbits = float(rate) * (1000 if scale.upper() == "T" else 1) * (8 if unit[:2] == "B/" else 1)
        value = gbits * int(number or 1) * many / 8
    elif match := re.search(r"(\d+)\s*[x\u00d7]\s*(edr|hdr|ndr|xdr)\s*-?(\d+)?", clause, re.I):
        number, name, rate = match.groups()
        value = int(number) * int(rate or INFINIBAND[name.lower()]) / 8
    else:
        return None
    return value or None
