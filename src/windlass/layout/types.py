"""How one training step is divided (`Layout`) and computed (`StepSpec`): the complete types that engine, planner and
launcher share."""

from dataclasses import dataclass, field, replace

from windlass.config import LayoutConfig

HYBRID_SHARDS = ("hybrid", "hybrid_zero2")
# Degrees that multiply to the devices of one replica, and all degrees: experts are divided over replicas.
REPLICA_AXES = ("tensor", "pipeline", "context")
AXES = (*REPLICA_AXES, "expert")
# A target that does not count in a loss.
IGNORED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism, sharding and batch division; every value is set. The user's request is
    `config.LayoutConfig`."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    # Of the replicas, ranks that share the experts of one copy; each holds some of them completely.
    expert: int = 1
    # Ranks over which each expert is divided; None: as `tensor`. Only other engines set them apart.
    expert_tensor: int | None = None
    # Ranks (or groups of ranks) that read different sequences.
    data: int = 1
    shard: str = "none"
    # Ranks that share one copy of whatever `shard` divides; 1 for shard "none".
    shard_size: int = 1
    micro_batch: int = 1
    # Micro-batches of one optimizer step on each replica; in a pipeline those that flow through it.
    accumulation: int = 1
    schedule: str = "1f1b"
    # interleaved: model chunks per pipeline rank.
    chunks: int = 1
    offload: str = "none"
    # The requested gradient reduction under accumulation; `StepSpec.sync` is the result.
    sync: str = "auto"
    # Largest size in bytes of the fp32 gradients that one collective reduces; None: one collective per layer.
    bucket: int | None = None
    # Tensor parallelism also divides norms and residuals along the sequence; only other engines switch it off.
    sequence_parallel: bool = True

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights before sharding: data-parallel and context-parallel ones."""
        return self.data * self.context

    @property
    def expert_split(self) -> int:
        """Ranks over which the experts of a layer are divided, completely or in parts."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def expert_row_share(self) -> float:
        """Share of a tensor-parallel group's tokens whose copies each of its ranks holds."""
        return (self.expert_tensor or self.tensor) / self.tensor

    @property
    def expert_shard_size(self) -> int:
        """`shard_size` of the experts: the part of it that expert parallelism does not use."""
        return 1 if self.shard == "none" else max(1, self.shard_size * self.tensor // self.expert_split)

    @property
    def for_experts(self) -> "Layout":
        """The layout of the experts' weights: divided further, as by tensor parallelism, over fewer replicas."""
        return replace(
            self,
            tensor=self.expert_split,
            data=self.replicas * self.tensor // self.expert_split,
            context=1,
            expert=1,
            expert_tensor=None,
            shard_size=self.expert_shard_size,
        )

    @property
    def is_hybrid(self) -> bool:
        """Groups of `shard_size` ranks each hold a copy."""
        return self.shard in HYBRID_SHARDS

    @property
    def weight_shards(self) -> int:
        """Ranks over which weights are divided while a layer is computed."""
        return self.shard_size if self.shard in ("full", "hybrid") else 1

    @property
    def divides_gradients_only(self) -> bool:
        """Gradients are divided after each micro-batch; weights stay gathered from its forward to its backward pass."""
        return self.shard in ("zero2", "hybrid_zero2")

    @property
    def sequences_per_step(self) -> int:
        return self.data * self.micro_batch * self.accumulation

    @property
    def stages_per_rank(self) -> int:
        return 1 if self.pipeline == 1 else {"interleaved": self.chunks, "zbv": 2}.get(self.schedule, 1)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def sequence_split(self) -> int:
        """Ranks over which norms and residuals are divided along the sequence."""
        return self.tensor if self.sequence_parallel else 1

    def config(self) -> LayoutConfig:
        """The same as a `[layout]` table."""
        return LayoutConfig.model_validate(
            {
                "shard": self.shard,
                "shard_size": self.shard_size if self.is_hybrid else None,
                "micro_batch": self.micro_batch,
                "tensor": self.tensor,
                "pipeline": self.pipeline,
                "context": self.context,
                "expert": self.expert,
                "schedule": self.schedule,
                "pipeline_chunks": max(2, self.chunks),
                "offload": self.offload,
                "sync": self.sync,
                "bucket": self.bucket,
            }
        )

    def describe(self, *, micro_batch: bool = True) -> str:
        """`hybrid 4, tensor 2, micro_batch 2`: only what differs from the default layout."""
        parts = [f"{self.shard} {self.shard_size}" if self.is_hybrid else self.shard]
        for axis in AXES:
            if (degree := getattr(self, axis)) > 1:
                schedule = f" {self.schedule}" if axis == "pipeline" and self.schedule != "1f1b" else ""
                parts.append(f"{axis} {degree}{schedule}")
        parts += [f"micro_batch {self.micro_batch}"] if micro_batch else []
        parts += [f"offload {self.offload}"] if self.offload != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class GradientSync:
    """When gradients are reduced under accumulation."""

    # Reduce-scatter after each micro-batch, so that gradients stay divided; False: once per step.
    every_micro_batch: bool = True
    # Only the all-reduce across copies (hybrid, hybrid_zero2) waits for the last micro-batch.
    defer_replicas: bool = False
    # Weights stay gathered between micro-batches.
    keep_weights: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """How one training step is computed: precision, kernels, loss, recomputation, gradient synchronisation."""

    seq_len: int
    # bf16, fp32, bf16_pure or fp8; rows of other engines also fp16, mxfp8 and nvfp4.
    precision: str = "bf16"
    # native: our own. torch: other loops on FSDP or DDP (also ours around a Hugging Face model). megatron and
    # deepspeed keep 16-bit weights resident.
    engine: str = "native"
    compile: bool = True
    # Attention kernel: auto, cudnn, flash, flash3, efficient, math; rows of other engines also flash1 and te.
    attention: str = "auto"
    # plain: whole fp32 logits. chunked: head and cross-entropy over chunks of tokens. Rows of other engines also:
    # compiled (plain in one fused pass), inplace (the gradient overwrites 16-bit logits).
    loss: str = "chunked"
    loss_chunk: int = 4096
    z_loss: float = 0.0
    recompute: str = "none"
    # recompute = "budget": share of activation memory that is kept.
    recompute_budget: float = 0.5
    optimizer: str = "adamw"
    # Optimizer states per parameter, the mean over the model's.
    moment_tensors: float = 2
    # Precision of these states: fp32, bf16 or int8.
    moments: str = "fp32"
    # fp32 or bf16 where another engine's row states it; None: the engine's default.
    gradient_precision: str | None = None
    # Products of the same input run as one (query, key and value; gate and up).
    fused_projections: bool = False
    fp8_scaling: str = "tensor"
    fp8_backend: str = "auto"
    # Attention does not cross document borders.
    mask_documents: bool = False
    # Keys and values are repeated for every query head, because the attention kernel does not take groups.
    expand_kv_heads: bool = False
    # How rows reach their experts on other ranks: alltoall (a copy for each expert). Rows of other engines also:
    # allgather (all rows to all ranks), fused (kernels such as DeepEP's: a copy for each rank).
    dispatch: str = "alltoall"
    # Modules that another engine recomputes, by Megatron's names (moe_act, mla_up_proj, moe).
    recomputed: tuple[str, ...] = ()
    # Every expert gets the same number of rows: forced by a benchmark, or the others are dropped.
    balanced: bool = False
    sync: GradientSync = field(default_factory=GradientSync)
    # Of all weights, those that have gradients and optimizer states; below 1 with LoRA.
    trained_share: float = 1.0

    @property
    def native(self) -> bool:
        return self.engine == "native"

    @property
    def flash(self) -> bool:
        """A fused attention kernel: the square of scores is never in memory."""
        return self.attention != "math"

    @property
    def bytes_per_value(self) -> int:
        """Size of an activation value."""
        return 4 if self.precision == "fp32" else 2

    @property
    def bytes_per_input(self) -> int:
        """Size of a value that other engines keep as the input of a product."""
        narrow = self.precision in ("fp8", "mxfp8", "nvfp4") and not self.native
        return 1 if narrow else self.bytes_per_value

    @property
    def compiled_fp8(self) -> bool:
        """Our FP8 products, whose inputs the compiler recomputes from what is kept anyway."""
        return self.native and self.precision == "fp8" and self.compile
