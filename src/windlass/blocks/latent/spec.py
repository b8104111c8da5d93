"""Sizes and costs of multi-head latent attention: keys and values of all heads are made from one narrow vector."""

from dataclasses import dataclass

from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.interface import Mixing, Product
from windlass.blocks.norm.spec import NormSpec
from windlass.layout.types import Layout, StepSpec

# Of the norms of the narrow vectors; transformers does not take the model's.
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Attention of as many key as query heads. The last numbers of each head are turned (`rope.dim`); those of the keys
    are the same in all heads."""

    value_dim: int
    kv_rank: int
    q_rank: int = 0  # 0: queries are made from the block's input

    kind = "latent"

    @property
    def rope_dim(self) -> int:
        return self.rope.dim if self.rope is not None else 0

    @property
    def value_width(self) -> int:
        return self.heads * self.value_dim

    @property
    def expanded_width(self) -> int:
        """Keys without positions, and values, of all heads."""
        return self.heads * (self.head_dim - self.rope_dim + self.value_dim)

    @property
    def norms(self) -> tuple[NormSpec, NormSpec | None]:
        """Of the vector that keys and values are made from, and of that of the queries."""
        query = NormSpec(width=self.q_rank, eps=NORM_EPS) if self.q_rank else None
        return NormSpec(width=self.kv_rank, eps=NORM_EPS), query

    def params(self) -> dict[str, int]:
        weights = {product.name: product.weights for product in self.products()}
        return {**weights, "latent norms": self.kv_rank + self.q_rank}

    def products(self) -> tuple[Product, ...]:
        query: tuple[Product, ...] = (Product("query", self.query_width, self.width, "outputs", "query input"),)
        if self.q_rank:
            query = (
                Product("query down", self.q_rank, self.width, "", "query input"),
                Product("query up", self.query_width, self.q_rank, "outputs", "query latent"),
            )
        return (
            *query,
            Product("key and value down", self.kv_rank + self.rope_dim, self.width, "", "key input"),
            Product("key and value up", self.expanded_width, self.kv_rank, "outputs", "key latent"),
            Product("attention output", self.width, self.value_width, "inputs", "mixed"),
        )

    def mixing_flops(self, seq_len: int) -> float:
        return 2.0 * seq_len * (self.query_width + self.value_width)

    def mixing(self, step: StepSpec) -> Mixing:
        square = self.mixing_flops(step.seq_len)
        if step.flash:
            return Mixing(0.5 * square)
        return Mixing(square, scores=float(self.heads * step.seq_len))

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """On every rank the narrow vectors, before and after their norms; of its heads queries, keys, values, the
        output and its log-sums."""
        size, numbers = step.bytes_per_value, self.kv_rank + self.q_rank
        narrow = 2.0 * numbers + self.rope_dim
        if not step.compile:  # also what is multiplied with the weight; in 16 bits the input in fp32 instead
            narrow = 3.0 * numbers + self.rope_dim if step.precision == "fp32" else 4.0 * numbers
        projected = 0.0 if "mla_up_proj" in step.recomputed else 2.0 * self.query_width + self.value_width
        heads = size * (projected + self.value_width) + 4.0 * self.heads
        if not step.flash:
            heads += (4.0 if step.native else 2.0 * size) * self.heads * step.seq_len
        return size * narrow + heads / layout.tensor

    def selective_bytes(self, step: StepSpec, layout: Layout) -> float:
        return (step.bytes_per_value * self.value_width + 4.0 * self.heads) / layout.tensor

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Rotation, the keys put together from two parts, and the norms."""
        eager = step.native and not step.compile
        turned = (58.0 if eager else 2.0 * step.bytes_per_value) * (self.heads + layout.tensor) * self.rope_dim
        copied = 2.0 * step.bytes_per_value * 2.0 * self.query_width
        normed = (36.0 if eager else 2.0 * step.bytes_per_value) * (self.kv_rank + self.q_rank)
        return normed + (turned + copied) / layout.tensor

    def context_bytes(self, step: StepSpec, layout: Layout) -> float:
        """The narrow vector; every rank makes the keys and values of all positions up to its own from it, which is not
        counted."""
        return (self.kv_rank + self.rope_dim) * step.bytes_per_value

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        return (("model.heads", self.heads),) if axis == "tensor" else ()
