"""Description of an optimizer without torch: which state it keeps for each parameter."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSpec:
    # Names of the tensors kept for each parameter; they are part of the checkpoint format.
    moments: tuple[str, ...]
    # Import path of the `windlass.train.optimizers.base.Optimizer` subclass, "package.module:Class".
    update: str

    def state_bytes(self, moment_bytes: float) -> float:
        """Bytes of state per parameter, where one moment takes `moment_bytes` (4 in fp32, 2 in bf16)."""
        return len(self.moments) * moment_bytes
