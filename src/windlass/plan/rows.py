"""What does a row of published measurements say about its layout? A CSV row -> model, work, layout and machine, or a reason why not.

Only columns that a planner's user could state are read: never tokens/s, MFU, TFLOPs, memory, source or notes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.clusters import find_device
from windlass.clusters.model import Device, Links
from windlass.cost.params import count
from windlass.cost.shapes import Shape, make_shape, pad
from windlass.cost.work import Degrees, Work

SHARDS = {
    "fsdp": "full",
    "fsdp2": "full",
    "full": "full",
    "zero3": "full",
    "zero-3": "full",
    "hsdp": "hybrid",
    "hybrid": "hybrid",
    "zero1": "zero1",
    "zero-1": "zero1",
    "zero2": "zero2",
    "zero-2": "zero2",
    "none": "none",
    "ddp": "none",
    "dp": "none",
    "": "none",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A row understood."""

    shape: Shape
    work: Work
    layout: Degrees
    device: Device
    links: Links
    devices_per_node: int
    assumed: tuple[str, ...]
    """Blank columns and what was taken for them."""


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str


def number(row: Mapping[str, str], key: str) -> float | None:
    """The value of a column, None when blank or not a number ("1 (5)" counts as 1)."""
    text = (row.get(key) or "").strip().replace(",", "")
    found = re.match(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", text)
    return float(found.group()) if found else None


def whole(row: Mapping[str, str], key: str) -> int | None:
    value = number(row, key)
    return None if value is None else round(value)


def understand(row: Mapping[str, str]) -> Case | Refusal:
    assumed: list[str] = []
    device = find_device(row.get("gpu") or "")
    if device is None:
        return Refusal(f"unknown device {row.get('gpu')!r}")
    shape = _shape(row, assumed)
    if isinstance(shape, Refusal):
        return shape
    gpus, seq_len = whole(row, "gpus"), whole(row, "seq_len")
    if not gpus or not seq_len:
        return Refusal("gpus or seq_len not stated")
    degrees = {k: _default(row, k, 1, assumed) for k in ("tp", "pp", "cp")}
    per_replica = degrees["tp"] * degrees["pp"] * degrees["cp"]
    data = gpus // per_replica if gpus >= per_replica else 1
    micro, accumulation = _batch(row, data, seq_len, assumed)
    work = _work(row, seq_len, micro, accumulation, assumed)
    per_node = whole(row, "gpus_per_node") or 8
    layout = _layout(row, work, data, degrees)
    if layout.shard == "hybrid":
        layout = replace(layout, shard_size=_group(shape, layout, device, per_node))
    return Case(
        shape, work, layout, device, links_of(device, row.get("interconnect") or "", per_node), per_node, tuple(assumed)
    )


def _default(row: Mapping[str, str], key: str, value: int, assumed: list[str]) -> int:
    given = whole(row, key)
    if given is None or given < 1:
        assumed.append(f"{key}={value}")
        return value
    return given


def _shape(row: Mapping[str, str], assumed: list[str]) -> Shape | Refusal:
    layers, width = whole(row, "layers"), whole(row, "hidden")
    if not layers or not width:
        return Refusal("layers or hidden not stated")
    arch = (row.get("arch") or "").strip().lower()
    glu, tied = (row.get("glu") or "").strip(), (row.get("tied") or "").strip()
    if arch not in ("llama", "gpt", "mpt", "bloom"):
        arch = "llama" if glu == "1" else "gpt"
        assumed.append(f"arch={arch}")
    heads = whole(row, "heads")
    if not heads:
        heads = max(1, width // 128)
        assumed.append(f"heads={heads}")
    vocab = whole(row, "vocab")
    if not vocab:
        vocab = 50_304
        assumed.append(f"vocab={vocab}")
    ffn = whole(row, "ffn")
    gated = arch == "llama" if glu == "" else glu == "1"
    if not ffn:
        ffn = 4 * width
        gated = False
        assumed.append(f"ffn={ffn}")
    shape = make_shape(
        arch=arch,
        layers=layers,
        width=width,
        ffn=ffn,
        heads=heads,
        kv_heads=whole(row, "kv_heads") or heads,
        head_dim=max(1, width // heads),
        vocab=vocab,
        padded_vocab=pad(vocab),
        tied=None if tied == "" else tied == "1",
        glu=gated,
    )
    return _with_stated_size(shape, number(row, "params_b"))


def _with_stated_size(shape: Shape, billions: float | None) -> Shape:
    """Heads wider than width / heads (Qwen 3) show in the stated size: take 128 when that explains it."""
    if not billions or shape.head_dim == 128:
        return shape
    wide = replace(shape, head_dim=128)
    plain_error, wide_error = (abs(count(s).total / 1e9 / billions - 1) for s in (shape, wide))
    return wide if wide_error < 0.02 and plain_error > 0.03 else shape


def _batch(row: Mapping[str, str], data: int, seq_len: int, assumed: list[str]) -> tuple[int, int]:
    micro, accumulation, total = whole(row, "micro_batch"), whole(row, "grad_accum"), number(row, "global_batch_tokens")
    per_replica = max(1, round(total / seq_len / data)) if total else None
    if not micro:
        micro = max(1, per_replica // (accumulation or 1)) if per_replica and accumulation else 1
        assumed.append(f"micro_batch={micro}")
    if not accumulation:
        accumulation = max(1, per_replica // micro) if per_replica else 1
        assumed.append(f"grad_accum={accumulation}")
    return micro, max(1, accumulation)


def _work(row: Mapping[str, str], seq_len: int, micro: int, accumulation: int, assumed: list[str]) -> Work:
    precision = (row.get("precision") or "bf16").strip().lower()
    precision = "fp32" if "32" in precision and "fp8" not in precision else precision
    compile_text, flash_text = (row.get("compile") or "").strip().lower(), (row.get("flash") or "").strip().lower()
    recompute = (row.get("activation_ckpt") or "").strip().lower()
    if recompute not in ("none", "selective", "full"):
        recompute = "selective"  # the default of torchtitan and of Megatron's recipes
        assumed.append("activation_ckpt=selective")
    optimizer = (row.get("optimizer") or "adamw").lower()
    sharded = SHARDS.get((row.get("shard") or "").strip().lower(), "none") in ("full", "hybrid")
    kernel = _kernel(flash_text)
    compiled = compile_text == "y" or kernel == "te"
    # TransformerEngine recipes (NeMo, Megatron-Bridge) reduce and keep gradients in bf16.
    gradients = "fp32" if "fp32 grad" in optimizer else "bf16" if kernel == "te" and not sharded else None
    # torch.compile and PyTorch's own attention mark loops written in plain PyTorch (DDP where nothing is sharded).
    native = kernel != "te" and (compile_text == "y" or "sdpa" in flash_text)
    # Megatron accumulates bf16 gradients in fp32 and is what tensor and pipeline parallelism usually mean; DeepSpeed keeps 16 bits.
    model_parallel = (number(row, "tp") or 1) * (number(row, "pp") or 1) > 1
    megatron = (
        kernel == "te" or "distributed" in optimizer or (precision == "bf16" and model_parallel and gradients != "fp32")
    )
    return Work(
        seq_len=seq_len,
        micro_batch=micro,
        accumulation=accumulation,
        recompute=recompute,
        precision=precision,
        compile=compiled,
        # PyTorch's own attention has been fused since 2.0, so "no flash" means a stored square only in older engines.
        flash=kernel != "math" or sharded,
        kernel=kernel,
        loss=_loss(compiled, flash_text, sharded),
        optimizer="sgd" if "sgd" in optimizer else "adamw",
        moments="int8" if "8-bit" in optimizer else "fp32",
        gradients=gradients,
        engine="torch" if sharded or native else "megatron" if megatron else "deepspeed",
    )


def _loss(compiled: bool, flash_text: str, sharded: bool) -> str:
    """The flash-attn package brings a cross-entropy that overwrites the logits; tables that say "flash: yes" are of engines with both. The
    name of a kernel ("fa2", "sdpa") says nothing about the loss."""
    if sharded and not compiled and flash_text in ("y", "yes"):
        return "inplace"
    return "compiled" if compiled else "plain"


def _kernel(text: str) -> str:
    if text in ("n", "no", "none", "math", "eager"):
        return "math"
    if text == "te" or "transformer" in text or "cudnn" in text:
        return "te"
    if "3" in text:
        return "flash3"
    if "1" in text or text in ("y", "yes"):
        return "flash1"  # "flash: yes" without a version is how tables of before 2024 speak
    return "flash"


def _layout(row: Mapping[str, str], work: Work, data: int, degrees: dict[str, int]) -> Degrees:
    chunks = whole(row, "vp") or 1
    shard = SHARDS.get((row.get("shard") or "").strip().lower(), "none")
    return Degrees(
        data=data,
        shard=shard,
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        context=degrees["cp"],
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        # Sequence parallelism came to Megatron together with the kernels that made attention's square vanish (2022).
        sequence_parallel=work.kernel != "math",
    )


def _group(shape: Shape, layout: Degrees, device: Device, per_node: int) -> int:
    """Devices that share one copy, where a row says only "hybrid": a node's, or the next doubling that leaves half the memory free."""
    states = 16.0 * count(shape).stored / (layout.tensor * layout.pipeline)
    size = max(1, per_node // layout.tensor)
    while size < layout.data and states / size > 0.5 * device.memory:
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
"""GB/s of a node of eight into the fabric where a row does not say: one 200 or 400 Gb/s card per device, as vendors build them."""
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
"""The same for parts that are sold as cards for a PCIe slot."""


def links_of(device: Device, text: str, per_node: int) -> Links:
    node = _node_gbs(text, per_node)
    if node is None:
        node = NODE_GBS.get(device.generation, 200.0) * per_node / 8
    intra = 50.0 if "pcie" in device.name else CARDS.get(device.arch, INTRA_GBS.get(device.generation, 100.0))
    if "800" in device.name:  # A800 and H800: NVLink cut to 200 GB/s per direction
        intra = min(intra, 200.0)
    return Links(intra_gbs=intra, inter_gbs_per_node=node)


def _node_gbs(text: str, per_node: int) -> float | None:
    """GB/s of a node from words like "800 Gb/s InfiniBand per node", "4x NDR200", "400 Gb/s RDMA per GPU", "4 Omni-Path links"."""
    low = text.lower()
    found = re.search(r"(\d+(?:\.\d+)?)\s*(tb|gb)/s", low)
    if found:
        gbits = float(found.group(1)) * (1000 if found.group(2) == "tb" else 1)
        many = per_node if "per gpu" in low or "per device" in low else 1
        return gbits * many / 8
    found = re.search(r"(\d+)\s*x\s*(?:ndr|hdr)\s*(\d+)", low)
    if found:
        return int(found.group(1)) * int(found.group(2)) / 8
    found = re.search(r"(\d+)\s*omni-path", low)
    if found:
        return int(found.group(1)) * 12.5
    if "omni-path" in low:
        return 12.5 * max(1, per_node)
    if "efa" in low:
        return 400.0
    return None


def as_dict(row: Mapping[str, Any]) -> dict[str, str]:
    return {k: (v or "") for k, v in row.items() if isinstance(k, str)}
