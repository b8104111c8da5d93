"""Properties of training engines that memory and step time depend on, as data: ours and those of published
measurements."""

from dataclasses import dataclass, replace

from windlass.layout.types import StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    # fp32 weights are the master and 16-bit copies are made when needed; False: 16-bit weights and a gradient buffer
    # stay resident, and fp32 masters belong to the optimizer.
    fp32_weights: bool
    # Of gradients that stay resident, in bf16 training, where a row does not state it.
    gradient_precision: str = "bf16"
    # Explicit fp32 accumulation lies beside the 16-bit gradients (nanotron, DeepSpeed's BF16Optimizer).
    keeps_both_gradients: bool = False
    # Reduce and all-gather buckets.
    bucket_bytes: float = 0.0
    # Bytes per logit that a plain loss holds at its peak.
    plain_loss_bytes: float = 8.0
    # The same where attention is not fused either: engines of before 2022 held logits, softmax and gradient apart.
    plain_loss_bytes_unfused: float = 8.0
    # More of them on a divided vocabulary, where softmax and its gradient are separate operations.
    divided_loss_bytes: float = 0.0
    # Share of products and element-wise work that selective recomputation repeats.
    selective_share: float = 0.0
    # Kernels of one layer's forward pass without compilation.
    eager_kernels: float = 60.0
    # Bytes per parameter that an optimizer update without compilation moves.
    eager_update_bytes: float = 34.0
    # Every gathered layer is unpacked and its gradients packed, by copies (FSDP).
    copies_shards: bool = False
    # In a pipeline, gathered weights stay until the step is done and gradients are summed undivided, in fp32 unless
    # another precision is stated.
    gathers_once_in_pipelines: bool = False
    # Experts run operation by operation even where layers are compiled.
    eager_experts: bool = False
    # Gradients of unsharded layouts are reduced while the backward pass runs.
    overlaps_reduction: bool = True
    # Values that a reduction holds at least, for each data-parallel rank: more ranks, fewer and larger reductions.
    bucket_values_per_rank: float = 0.0
    # Share of the exchange of experts' rows between nodes that interleaved pipelines leave exposed: the passes of two
    # micro-batches can run side by side. Not fitted.
    exposed_exchange: float = 1.0
    # What a search may propose when it plans for this engine (`windlass plan --engine-profile`).
    shards: tuple[str, ...] = ("none", "zero1", "zero2", "full")
    # Tensor and pipeline parallelism.
    divides_layers: bool = False


ENGINE_PROFILES = {
    # Softmax and two gradients in fp32: our plain loss is not compiled.
    "native": EngineProfile(
        fp32_weights=True,
        plain_loss_bytes=12.0,
        plain_loss_bytes_unfused=12.0,
        divided_loss_bytes=4.0,
        eager_kernels=100.0,
        copies_shards=True,
    ),
    # A plain loss holds 8 bytes (logits, softmax, two 16-bit gradients) or 12 (fp32); rows do not say which, so 10
    # are taken.
    "torch": EngineProfile(
        fp32_weights=True,
        plain_loss_bytes=10.0,
        plain_loss_bytes_unfused=10.0,
        divided_loss_bytes=4.0,
        selective_share=0.35,
        eager_update_bytes=90.0,
        copies_shards=True,
        gathers_once_in_pipelines=True,
        eager_experts=True,
        shards=("none", "zero2", "full", "hybrid", "hybrid_zero2"),  # FSDP's five strategies
    ),
    # Softmax overwrites the fp32 logits and is kept for the gradient.
    "megatron": EngineProfile(
        fp32_weights=False,
        gradient_precision="fp32",
        plain_loss_bytes_unfused=14.0,
        bucket_values_per_rank=1e6,  # of at least 40 million
        exposed_exchange=0.5,
        shards=("none", "zero1"),
        divides_layers=True,
    ),
    "deepspeed": EngineProfile(
        fp32_weights=False,
        keeps_both_gradients=True,
        bucket_bytes=2.0e9,  # twice 5e8 values of 16 bits
        plain_loss_bytes_unfused=14.0,
        overlaps_reduction=False,
    ),
}
# What `as_engine` takes for granted.
AS_IN_2024 = "as teams ran it in 2024 (not compiled, full logits, flash attention 2)"
OTHER_ENGINES = tuple(name for name in ENGINE_PROFILES if name != "native")


def as_engine(step: StepSpec, name: str) -> StepSpec:
    """The same step in another engine, `AS_IN_2024`; an attention kernel that the recipe names stays."""
    attention = "flash" if step.attention == "auto" else step.attention
    return replace(step, engine=name, compile=False, loss="plain", attention=attention, fused_projections=False)
