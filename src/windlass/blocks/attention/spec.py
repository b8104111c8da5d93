"""Sizes and costs of causal attention: grouped heads, rotary positions, windows, norms of queries and keys, sinks."""

from dataclasses import dataclass

from windlass.blocks.attention.rope import Rope
from windlass.blocks.interface import BlockSpec, Mixing, Product
from windlass.blocks.norm.spec import NormSpec
from windlass.layout.types import Layout, StepSpec

# Without a fused kernel torch computes scores in fp32 whatever the precision (69.0 GiB measured on an H200).
KEPT_SCORE_BYTES = 4.0


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(BlockSpec):
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None  # None: positions are not turned
    bias: str = "none"  # none, qkv (queries, keys and values) or all (also the output)
    sinks: bool = False  # a trained score of each head takes a share of the attention and adds nothing
    window: int = 0  # positions that a query sees, itself included; 0: all earlier ones
    # Norm of queries and keys, over each head or over all heads together.
    qk_norm: str = "none"
    qk_norm_eps: float = 1e-5
    qk_norm_zero_centred: bool = False
    scale: float | None = None  # of the scores; None: head_dim^-0.5
    softcap: float = 0.0  # scores pass through softcap * tanh(score / softcap); 0: they do not

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qk_norms(self) -> tuple[NormSpec, NormSpec] | None:
        """Norms of queries and of keys."""
        if self.qk_norm == "none":
            return None
        sizes = (self.query_width, self.kv_width) if self.qk_norm == "width" else (self.head_dim, self.head_dim)
        query, key = (
            NormSpec(width=size, eps=self.qk_norm_eps, zero_centred=self.qk_norm_zero_centred) for size in sizes
        )
        return query, key

    kind = "attention"

    def params(self) -> dict[str, int]:
        query = self.width * self.query_width
        terms = {"query": query, "key and value": 2 * self.width * self.kv_width, "attention output": query}
        if self.bias != "none":
            terms["biases"] = self.query_width + 2 * self.kv_width + (self.width if self.bias == "all" else 0)
        if self.sinks:
            terms["sinks"] = self.heads
        if self.qk_norms is not None:
            terms["query and key norms"] = sum(norm.params() for norm in self.qk_norms)
        return terms

    def products(self) -> tuple[Product, ...]:
        return (
            Product("query", self.query_width, self.width, "outputs", "input"),
            Product("key", self.kv_width, self.width, "outputs", "input"),
            Product("value", self.kv_width, self.width, "outputs", "input"),
            Product("attention output", self.width, self.query_width, "inputs", "mixed"),
        )

    def mixing_flops(self, seq_len: int) -> float:
        return 4.0 * (min(self.window, seq_len) or seq_len) * self.query_width

    def mixing(self, step: StepSpec) -> Mixing:
        square = self.mixing_flops(step.seq_len)
        if step.flash:
            # A causal kernel skips half of the square; in a window only the first positions see fewer keys than the
            # others. How long packed documents are is not known here, so they are priced as one.
            skipped = 0.5 * (min(self.window, step.seq_len) or step.seq_len) / step.seq_len
            return Mixing(square * (1.0 - skipped), narrow_heads=self.head_dim < 96)
        # Tensor cores need rows of 16 bytes; other head widths fall back to ordinary units.
        return Mixing(square * (6.0 if self.head_dim % 8 else 1.0), scores=float(self.heads * step.seq_len))

    masks_documents = True
    kept_by_selective = True

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Rotated queries and keys, values, the output and its log-sums; fused projections also keep the unrotated
        ones."""
        size = step.bytes_per_value
        keys = self.query_width if step.expand_kv_heads else self.kv_width
        kept = size * (2.0 * self.query_width + 2.0 * keys) + 4.0 * self.heads
        if step.fused_projections or self.qk_norm != "none":
            kept += size * (self.query_width + self.kv_width)
        if self.sinks:  # what is multiplied with the sinks' share; compiled code computes the product again
            kept += 4.0 * self.heads + (0.0 if step.compile else size * self.query_width)
        if not step.flash:
            kept += (KEPT_SCORE_BYTES if step.native else 2.0 * size) * self.heads * step.seq_len
        return kept / layout.tensor

    def selective_bytes(self, step: StepSpec, layout: Layout) -> float:
        """The attention output with its log-sums."""
        return (step.bytes_per_value * self.query_width + 4.0 * self.heads) / layout.tensor

    def transient_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Gradients of scores and of probabilities lie side by side where no fused kernel avoids them."""
        return 0.0 if step.flash else 2.0 * KEPT_SCORE_BYTES * self.heads * step.seq_len / layout.tensor

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Rotation and norms: in fp32, operation by operation, when nothing is compiled."""
        values = self.query_width + self.kv_width
        eager = step.native and not step.compile
        rotated = (58.0 if eager else 2.0 * step.bytes_per_value) if self.rope is not None else 0.0
        # Compiled, the norm runs in the kernel that turns the values.
        normed = 36.0 if eager and self.qk_norm != "none" else 0.0
        return (rotated + normed) * values / layout.tensor

    def context_bytes(self, step: StepSpec, layout: Layout) -> float:
        return 2.0 * self.kv_width / layout.tensor * step.bytes_per_value

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        return (("model.heads", self.heads), ("model.kv_heads", self.kv_heads)) if axis == "tensor" else ()
