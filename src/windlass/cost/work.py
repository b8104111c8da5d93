"""What is asked of the devices, and how is it divided? The two values that every estimate takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShardKind = Literal["none", "zero1", "zero2", "full", "hybrid"]
Recompute = Literal["none", "selective", "full", "budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One optimizer step of one model replica, and how it is computed."""

    seq_len: int
    micro_batch: int = 1
    accumulation: int = 1
    """Micro-batches per optimizer step (of a pipeline: those that flow through it)."""
    recompute: str = "none"
    recompute_budget: float = 0.5
    """recompute = "budget": share of activation memory that is kept."""
    precision: str = "bf16"
    """bf16, fp16, fp32, bf16_pure, fp8, mxfp8 or nvfp4."""
    compile: bool = True
    flash: bool = True
    """Fused attention: the square of scores never lies in memory."""
    kernel: str = "auto"
    """Attention kernel: auto, flash (version 2), flash1, flash3, cudnn, te, efficient, math."""
    loss: str = "chunked"
    """plain: whole logits in fp32. compiled: plain with one fused pass. inplace: the gradient overwrites 16-bit logits.
    chunked, fused: never the whole logits."""
    loss_chunk: int = 4096
    optimizer: str = "adamw"
    moments: str = "fp32"
    """Precision of the optimizer's moments: fp32, bf16 or int8."""
    gradients: str | None = None
    """Precision in which gradients are kept: fp32 or bf16; None: the habit of the engine."""
    engine: str = "torch"
    """torch: fp32 weights are the master, 16-bit copies are made when needed (FSDP2, DDP with autocast).
    megatron: 16-bit weights and a gradient buffer stay; fp32 masters belong to the optimizer. deepspeed: the same with 16-bit gradients."""

    native: bool = False
    """windlass's own engine, of which it is known by op what lives and when; else an engine that a published row describes."""
    fuse: bool = False
    """Native: queries, keys and values by one product, and gate and up by one, from weights laid side by side."""
    fp8_rows: bool = False
    """Native, FP8: a scale per row instead of one per tensor."""
    masked: bool = False
    """Native: borders between documents are given to attention as a mask, which only the memory-efficient kernel takes."""
    every_head: bool = False
    """Native: that kernel (masks, fp32 on a GPU) wants as many heads of keys and values as of queries, so they are repeated."""

    @property
    def bytes_per_value(self) -> int:
        """Size of an activation."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The degrees of parallelism; their product is the number of devices."""

    data: int = 1
    """Data-parallel ranks (sharded or not)."""
    shard: str = "none"
    shard_size: int | None = None
    """Devices that share one copy; None: all data-parallel ranks (full), a node's (hybrid)."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    """Model chunks per pipeline rank (interleaved)."""
    sequence_parallel: bool = True
    """Tensor parallelism also divides norms and residuals along the sequence."""
    offload: str = "none"
    sync: str = "every"
    """Under accumulation gradients are reduced after every micro-batch, or only after the last."""

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def shards(self, devices_per_node: int | None = None) -> int:
        """Devices over which weights are divided (full, hybrid); context ranks hold the same weights and share too."""
        group = self.data * self.context
        if self.shard == "full":
            return min(self.shard_size or group, group)
        if self.shard == "hybrid":
            fallback = max(1, (devices_per_node or 8) // self.tensor)
            return max(1, min(self.shard_size or fallback, group))
        return 1

    def state_shards(self, devices_per_node: int | None = None) -> int:
        """Devices over which optimizer states are divided."""
        if self.shard in ("zero1", "zero2"):
            return self.shard_size or self.data * self.context
        return self.shards(devices_per_node)
