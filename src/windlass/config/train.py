"""The `[train]` table: how one step is computed, logged and guarded."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from windlass.config.base import Registered, Table, Tokens
from windlass.registry import ENGINES, OBJECTIVES


class TrainConfig(Table):
    engine: Annotated[str, Registered(ENGINES)] = "native"
    """native: PyTorch alone. deepspeed: DeepSpeed's ZeRO under the same loop."""
    objective: Annotated[str, Registered(OBJECTIVES)] = "next_token"
    """What training minimizes: next_token, or an objective of an installed package."""
    precision: Literal["bf16", "fp32", "fp8", "bf16_pure"] = "bf16"
    """bf16: bf16 compute, fp32 master weights and reduction. bf16_pure: bf16 weights with stochastic rounding."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """precision = "fp8": one scale per tensor, or one per row (finer, at the same speed)."""
    fp8_backend: Literal["auto", "torch", "torchao"] = "auto"
    """FP8 products by torch's scaled matmul, or by torchao where torch has none for the device."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of data.tokens, for short runs."""
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    """What the backward pass recomputes to save memory: nothing, attention and cheap parts, whole blocks, or by
    `recompute_budget`."""
    recompute_budget: float = Field(default=0.5, ge=0, le=1)
    """recompute = "budget": share of activation memory to keep."""
    compile: bool | None = None
    """torch.compile per block; default: on for GPUs, off on a CPU."""
    fuse: bool | None = None
    """Compute queries, keys and values in one product, and gate and up in one; default: only in FP8, where it pays."""
    attention: Literal["auto", "cudnn", "flash", "flash3", "efficient", "math"] = "auto"
    """Attention kernel; auto uses the fastest that the device and the shape allow."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """How head and cross-entropy are computed. chunked: together, over chunks of tokens, so that all logits never
    exist at once; fused is another name for it. auto: chunked unless a micro-batch's logits are small."""
    loss_chunk: PositiveInt = 4096
    """Tokens per chunk of the chunked loss."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-normalizer added to the loss; 0: off."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    eval_every: NonNegativeInt = 0
    """Steps between validation passes; 0: only at the end, if there is a validation split."""
    eval_tokens: Tokens = 262_144
    """Tokens of one validation pass."""
    skip_nonfinite: bool = True
    """Skip the update of a step whose loss or gradient norm is not finite on any rank."""
    skip_spike_sigma: NonNegativeFloat = 0.0
    """Skip a step whose loss or gradient norm lies this many standard deviations above its recent mean; 0: off."""
    max_skipped: PositiveInt = 10
    """Stop the run after this many skipped steps in a row."""
    rollback: bool = False
    """After max_skipped, return to an earlier checkpoint and skip the data range, once, instead of stopping."""
    gc_every: PositiveInt = 100
    """Steps between runs of Python's garbage collector, which is otherwise off."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time; slower."""
    watchdog_seconds: NonNegativeFloat = 600.0
    """End the job and name the rank when a rank makes no progress for this long; 0: off."""
