"""What a block tells the planner and the layout rules. Torch-free; every block folder has a `spec.py` that implements
it."""

from dataclasses import dataclass
from typing import Protocol

from windlass.layout.types import Layout, StepSpec


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a block: (tokens x inputs) by (inputs x outputs)."""

    name: str
    outputs: int
    inputs: int
    divided: str  # the side that tensor parallelism divides: "outputs" (by columns) or "inputs" (by rows)
    reads: str  # which tensor it multiplies; products of the same tensor can run as one
    # A mixture of experts: sets of weights, of which each token meets `top_k`; the divided side is that of all `top_k`.
    experts: int = 1
    top_k: int = 1

    @property
    def weights(self) -> int:
        """That one token multiplies."""
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class Mixing:
    """Work between positions (attention, retention) of one token in a forward pass."""

    flops: float  # that the kernel really does (half of the square where a causal kernel skips the other half)
    scores: float = 0.0  # that pass through memory; 0 in fused kernels
    extra_bytes: float = 0.0
    narrow_heads: bool = False  # heads under 96 values wide, which fill the matrix units less well


class BlockSpec(Protocol):
    """Sizes of one block. All byte figures are per token unless stated otherwise.

    A spec that derives from this class inherits the figures of a block that treats each position alone and keeps
    nothing beside its products.
    """

    kind: str  # the name of the block's folder
    kept_by_selective: bool  # selective recomputation keeps the output of the mixing kernel
    masks_documents: bool  # the block can keep positions of different documents apart

    def params(self) -> dict[str, int]:
        """Parameters by name of the part; sums to the block's total."""

    def active_params(self) -> int:
        """Parameters that multiply each token."""
        return sum(self.params().values())

    def expert_params(self) -> int:
        """Parameters that expert parallelism divides."""
        return 0

    def products(self) -> tuple[Product, ...]:
        """Matrix products in execution order."""

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs between positions in a forward pass, per token, by the convention of published MFU (not halved for
        causality)."""
        return 0.0

    def mixing(self, step: StepSpec) -> Mixing | None:
        """What the engine's kernel does for it; None for blocks that treat each position alone."""
        return None

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Activations kept for the backward pass without recomputation."""

    def selective_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Kept under selective recomputation beside the products' outputs."""
        return 0.0

    def transient_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Gradients that live only while this block's backward pass runs."""
        return 0.0

    def constant_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Bytes, once per model and not per token, of tables that all layers of this kind share."""
        return 0.0

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Bytes that element-wise kernels of a forward pass move."""

    def context_bytes(self, step: StepSpec, layout: Layout) -> float | None:
        """Bytes of this rank's positions that the other context ranks need; None: not known, so the planner does not
        rank it."""
        return None

    def exchanged_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Bytes of a token's rows that expert parallelism sends to the ranks of its experts."""
        return 0.0

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        """Sizes (recipe key, value) that a degree must divide; None: the block does not support the axis."""
