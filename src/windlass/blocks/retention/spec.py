"""Sizes and costs of RetNet's retention: parallel or chunkwise form, with a decay per head."""

from dataclasses import dataclass

from windlass.blocks.interface import BlockSpec, Mixing, Product
from windlass.layout.types import Layout, StepSpec


@dataclass(frozen=True, kw_only=True)
class RetentionSpec(BlockSpec):
    width: int
    value_width: int
    heads: int
    chunk: int = 0  # length of the chunkwise form; 0: the parallel form

    def span(self, seq_len: int) -> int:
        """Positions that are mixed as one square."""
        return self.chunk if self.chunk and self.chunk < seq_len else seq_len

    kind = "retention"

    def params(self) -> dict[str, int]:
        square, wide = self.width * self.width, self.width * self.value_width
        return {"query": square, "key and value": square + wide, "gate": wide, "attention output": wide}

    def products(self) -> tuple[Product, ...]:
        return (
            Product("query", self.width, self.width, "outputs", "input"),
            Product("key", self.width, self.width, "outputs", "input"),
            Product("value", self.value_width, self.width, "outputs", "input"),
            Product("gate", self.value_width, self.width, "outputs", "input"),
            Product("attention output", self.width, self.value_width, "inputs", "mixed"),
        )

    def mixing_flops(self, seq_len: int) -> float:
        """The square of a span; each chunk also writes its state and reads the one before it."""
        span = self.span(seq_len)
        state = 4.0 * self.width * self.value_width / self.heads if span < seq_len else 0.0
        return 2.0 * span * (self.width + self.value_width) + state

    def mixing(self, step: StepSpec) -> Mixing:
        return Mixing(self.mixing_flops(step.seq_len), extra_bytes=4.0 * self.span(step.seq_len) * self.heads)

    masks_documents = False
    kept_by_selective = False  # retention is made of batched products, which the policy does not keep

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Rotated queries and keys; values, gate, output, its norm and the gated output; decayed scores; states
        between chunks."""
        size, span = step.bytes_per_value, self.span(step.seq_len)
        values = 2.0 * self.width + 4.0 * self.value_width
        if step.fused_projections:  # beside the gate, unrotated queries and keys and the values stay too
            values += 2.0 * self.width + self.value_width
        if not step.compile:
            values += 2.0 * self.value_width  # the norm's input in fp32
        states = self.width * self.value_width / (self.heads * span) if span < step.seq_len else 0.0
        return size * (values + self.heads * span + states) / layout.tensor

    def constant_bytes(self, step: StepSpec, layout: Layout) -> float:
        """The decay matrix of the parallel form, in fp32."""
        return 0.0 if self.chunk else 4.0 * self.heads / layout.tensor * step.seq_len**2

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Queries and keys are rotated pairwise; values, gate and output change between layouts of heads."""
        if step.native and not step.compile:
            return 58.0 * 2.0 * (self.width + self.value_width) / layout.tensor
        return step.bytes_per_value * (8.0 * self.width + 10.0 * self.value_width) / layout.tensor

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        return (("model.heads", self.heads),) if axis == "tensor" else ()
