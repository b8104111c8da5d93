"""Sizes and costs of the Mamba-2 mixer: a state per head that decays by what it reads, computed chunk by chunk."""

from dataclasses import dataclass

from windlass.blocks.interface import BlockSpec, Mixing, Product
from windlass.layout.types import Layout, StepSpec


@dataclass(frozen=True, kw_only=True)
class MambaSpec(BlockSpec):
    width: int
    heads: int
    head_dim: int
    state: int  # numbers that a head keeps for each of its `head_dim` values
    groups: int  # groups of heads that share what is written and read (B and C)
    conv: int = 4  # positions that the convolution before the state sees, its own included
    chunk: int = 128
    dt_min: float = 0.001  # of time steps, and of those that training begins with
    dt_max: float = 0.1  # that training begins with
    norm_eps: float = 1e-5

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Width of B, and of C."""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """That the convolution runs over."""
        return self.inner + 2 * self.shared

    def span(self, seq_len: int) -> int:
        """Positions that are mixed as one square."""
        return min(self.chunk, seq_len)

    kind = "mamba"

    def params(self) -> dict[str, int]:
        return {
            "mamba input": self.width * (self.inner + self.channels + self.heads),
            "mamba output": self.inner * self.width,
            "convolution": self.channels * (self.conv + 1),
            "mamba state and norm": 3 * self.heads + self.inner,
        }

    def products(self) -> tuple[Product, ...]:
        return (
            Product("gate", self.inner, self.width, "outputs", "input"),
            Product("value", self.inner, self.width, "outputs", "input"),
            Product("write", self.shared, self.width, "outputs", "input"),
            Product("read", self.shared, self.width, "outputs", "input"),
            Product("time step", self.heads, self.width, "outputs", "input"),
            Product("mamba output", self.width, self.inner, "inputs", "mixed"),
        )

    def mixing_flops(self, seq_len: int) -> float:
        """The square of a chunk, and the state that it writes and reads. It does not grow with the sequence."""
        return 2.0 * self.span(seq_len) * (self.shared + self.inner) + 4.0 * self.inner * self.state

    def mixing(self, step: StepSpec) -> Mixing:
        """States pass from each chunk to all later ones in one product; scores and states pass through memory. A second
        run in the backward pass is counted as for attention's fused kernels."""
        span = self.span(step.seq_len)
        passed = 2.0 * self.inner * self.state * step.seq_len / span**2
        states = self.inner * self.state / span
        return Mixing(self.mixing_flops(step.seq_len) + passed, extra_bytes=4.0 * span * self.heads + 16.0 * states)

    masks_documents = True
    kept_by_selective = False  # it is made of batched products, which the policy does not keep

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Results of the first products and the input of the last; what lies between is computed again."""
        return step.bytes_per_value * (2.0 * self.inner + self.channels + self.heads) / layout.tensor

    def transient_bytes(self, step: StepSpec, layout: Layout) -> float:
        """What lies between the products, while the backward pass has it again: channels after the convolution,
        outputs, scores, and the states that chunks leave and find; eager code keeps fp32 copies of most of them. Then
        gradients of scores, in fp32 where they meet the decays. Tensors counted on a CPU, not measured on a GPU."""
        size, span = float(step.bytes_per_value), self.span(step.seq_len)
        states = self.inner * self.state / span
        if step.compile:
            inside = (
                size * (2.0 * self.channels + 3.0 * self.inner + self.heads * span) + 8.0 * self.inner + 6.0 * states
            )
        else:
            inside = 4.0 * (
                (3.0 + self.conv) * self.channels + 6.0 * self.inner + 4.0 * self.heads * span + 2.0 * states
            )
        return (inside + (size + 4.0) * self.heads * span) / layout.tensor

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Convolution, gate and norm, and a third for their second run in the backward pass."""
        if step.native and not step.compile:
            return 4.0 / 3.0 * (12.0 * (2 + self.conv) * self.channels + 60.0 * self.inner) / layout.tensor
        return 4.0 / 3.0 * step.bytes_per_value * (2.0 * self.channels + 6.0 * self.inner) / layout.tensor

    def context_bytes(self, step: StepSpec, layout: Layout) -> float:
        """The state in fp32 that a rank's positions leave, however many they are."""
        return 4.0 * self.inner * self.state / layout.tensor / (step.seq_len / layout.context)

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        return (("model.mamba.heads", self.heads), ("model.mamba.groups", self.groups)) if axis == "tensor" else ()
