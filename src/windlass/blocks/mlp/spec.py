"""Sizes and costs of the feed-forward block: gated (SwiGLU, GeGLU) or plain (GELU, squared ReLU, xIELU)."""

from dataclasses import dataclass

from windlass.blocks.interface import BlockSpec, Product
from windlass.config.model import GATED
from windlass.layout.types import Layout, StepSpec


@dataclass(frozen=True, kw_only=True)
class MlpSpec(BlockSpec):
    width: int
    hidden: int
    activation: str = "swiglu"
    clamp: tuple[float, float] = (1.702, 7.0)  # of `clamped_swiglu`: alpha and limit
    bias: bool = False

    kind = "mlp"

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def params(self) -> dict[str, int]:
        terms = {"feed-forward": (3 if self.gated else 2) * self.width * self.hidden}
        if self.bias:
            terms["biases"] = (2 if self.gated else 1) * self.hidden + self.width
        if self.activation == "xielu":
            terms["activation"] = 2
        return terms

    def products(self) -> tuple[Product, ...]:
        up = (Product("up", self.hidden, self.width, "outputs", "input"),) if self.gated else ()
        return (
            Product("gate", self.hidden, self.width, "outputs", "input"),
            *up,
            Product("down", self.width, self.hidden, "inputs", "hidden"),
        )

    masks_documents = True
    kept_by_selective = True

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Gate, up and their product, which FP8 computes again; eager code also keeps the activated gate."""
        eager = 7.0 if self.activation == "clamped_swiglu" else 4.0
        gated = eager if not step.compile else 2.0 if step.compiled_fp8 else 3.0
        return step.bytes_per_value * self.hidden / layout.tensor * (gated if self.gated else 2.0)

    def transient_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Gradient of gate or up; both when they were recomputed. Read off four H200 runs at two sizes."""
        return step.bytes_per_value * self.hidden / layout.tensor * (1.0 if step.recompute == "none" else 2.0)

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        if step.native and not step.compile:
            return 10.0 * self.hidden / layout.tensor
        return (3.0 if self.gated else 2.0) * step.bytes_per_value * self.hidden / layout.tensor

    def context_bytes(self, step: StepSpec, layout: Layout) -> float:
        return 0.0

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        return (("model.ffn", self.hidden),) if axis == "tensor" else ()
