"""How is one step computed? The `[train]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from windlass.config.base import Table, Tokens


class TrainConfig(Table):
    engine: Literal["native", "deepspeed"] = "native"
    """PyTorch alone, or DeepSpeed's ZeRO under the same loop."""
    precision: Literal["bf16", "fp32", "fp8", "bf16_pure"] = "bf16"
    """bf16: bf16 compute, fp32 master weights and reduction. bf16_pure: bf16 weights with stochastic rounding."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """precision = "fp8": one scale per tensor, or one per row (finer, for the same speed of the products)."""
    fp8_backend: Literal["auto", "torch", "torchao"] = "auto"
    """Whose FP8 products: torch's own scaled matmul, or torchao's conversion where torch has none for the device."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of data.tokens, for short runs."""
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    """What the backward pass computes again to save memory: nothing, attention and cheap parts, whole blocks, or by `recompute_budget`."""
    recompute_budget: float = Field(default=0.5, ge=0, le=1)
    """recompute = "budget": share of activation memory that is kept."""
    compile: bool | None = None
    """torch.compile per block; None: on for GPUs, off on a CPU."""
    fuse: bool | None = None
    """Compute queries, keys and values in one product, and gate and up in one; None: only in FP8, where it pays."""
    attention: Literal["auto", "cudnn", "flash", "flash3", "efficient", "math"] = "auto"
    """Which kernel; auto takes the fastest that the device and the shape allow."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """How head and cross-entropy are computed. chunked: both as one function over chunks of tokens, so that logits never exist whole;
    fused is another name for it. auto: chunked unless a micro-batch's logits are small."""
    loss_chunk: PositiveInt = 4096
    """Tokens per chunk of the chunked loss."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-normaliser added to the loss; 0: off."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    eval_every: NonNegativeInt = 0
    """Steps between validation passes; 0: only at the end when a validation split exists."""
    eval_tokens: Tokens = 262_144
    """Tokens of one validation pass."""
    skip_nonfinite: bool = True
    """A step whose loss or gradient norm is not finite on any rank changes no weights."""
    skip_spike_sigma: NonNegativeFloat = 0.0
    """Skip a step whose loss or gradient norm lies this many standard deviations above its recent mean; 0: off."""
    max_skipped: PositiveInt = 10
    """Skipped steps in a row after which the run stops."""
    rollback: bool = False
    """After max_skipped, go back to an earlier checkpoint and skip the data range, once, instead of stopping."""
    gc_every: PositiveInt = 100
    """Steps between runs of Python's garbage collector, which is off otherwise."""
    deterministic: bool = False
    """Only kernels that give the same bits each time; slower."""
    watchdog_seconds: NonNegativeFloat = 600.0
    """A rank that makes no progress for this long ends the job and is named; 0: off."""
