"""Sizes of normalisation layers."""

from dataclasses import dataclass

from windlass.layout.types import Layout, StepSpec


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    width: int
    eps: float = 1e-5
    bias: bool = False  # LayerNorm with weight and bias instead of RMSNorm with a weight
    zero_centred: bool = False  # the stored weight is added to one
    scale: float = 1.0  # of the output; in front of the head it is that of the logits

    def params(self) -> int:
        return self.width * (2 if self.bias else 1)

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Input and output of a norm in front of a block, per token.

        FP8 products compute the output again; eager code also keeps the input in fp32 and what is multiplied with the
        weight."""
        size = float(step.bytes_per_value)
        stream = size * self.width / layout.sequence_split
        if not step.native:
            return 2.0 * stream
        output = 0.0 if step.compiled_fp8 else stream
        if layout.tensor > 1:  # the products read the output gathered from all ranks, in FP8 as it was cast
            output = (1.0 if step.compiled_fp8 else size) * self.width
        return output + (1.0 if step.compile else 2.0 if step.precision == "fp32" else 3.0) * stream

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Norm and residual sum around one block, per token; eager: 36 bytes a value in fp32 and 6 for the sum."""
        per_value = 42.0 if step.native and not step.compile else 3.0 * step.bytes_per_value
        return per_value * self.width / layout.sequence_split
