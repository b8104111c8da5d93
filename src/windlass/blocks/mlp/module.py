"""Feed-forward block: gated (SwiGLU) or plain (GELU)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.context import BlockContext
from windlass.blocks.initial_values import Filler, residual_filler
from windlass.blocks.linear import Linear, project
from windlass.blocks.mlp.spec import MlpSpec


class Mlp(nn.Module):
    table_key = None
    prefill_chunk: int | None = None

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.w1 = Linear(spec.width, spec.hidden)
        self.w2 = Linear(spec.hidden, spec.width)
        self.w3 = Linear(spec.width, spec.hidden) if spec.gated else None
        self.fused = False
        """One product for gate and up (`StepSpec.fused_projections`)."""

    def forward(self, x: Tensor, context: BlockContext | None = None) -> Tensor:
        if self.w3 is None:
            return self.w2(F.gelu(self.w1(x)))
        gate, up = project(x, (self.w1, self.w3), self.fused)
        return self.w2(F.silu(gate) * up)

    def filler(self, name: str, std: float, num_layers: int) -> Filler:
        return residual_filler(name == "w2.weight", std, num_layers)

    def new_state(self, batch: int, limit: int) -> None:
        return None

    def decode(self, x: Tensor, state: None, places: Tensor, start: int | None, table: None) -> Tensor:
        return self.forward(x)

    def state_bytes(self, state: None, position: int) -> int:
        return 0


BLOCK = Mlp
