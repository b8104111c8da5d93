"""Description of an optimizer without torch: which state it keeps for each parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

# Shorter rows or columns are those of convolutions and gates, not of a linear map between hidden states.
MIN_MATRIX_SIDE = 16


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """A linear map inside a numbered layer, or a stack of them (experts): not embeddings, head, norms, routers or
    biases, of which experts have a matrix."""
    parts = name.split(".")
    in_layer = any(part.isdigit() for part in parts) and not {"router", "gate"} & set(parts)
    in_layer = in_layer and not name.endswith("bias")
    return in_layer and len(shape) in (2, 3) and min(shape[-2:]) >= MIN_MATRIX_SIDE


@dataclass(frozen=True)
class OptimizerSpec:
    # Names of the tensors kept for each parameter; they are part of the checkpoint format.
    moments: tuple[str, ...]
    # Import path of the `windlass.train.optimizers.base.Optimizer` subclass, "package.module:Class".
    update: str
    # Those kept for the matrices of layers, where they are fewer.
    matrix_moments: tuple[str, ...] | None = None

    def moments_of(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Names of the tensors that are kept for one parameter."""
        return self.moments if self.matrix_moments is None or not is_matrix(name, shape) else self.matrix_moments

    def state_bytes(self, moment_bytes: float) -> float:
        """Bytes of state per parameter, where one moment takes `moment_bytes` (4 in fp32, 2 in bf16)."""
        return len(self.moments) * moment_bytes
