"""Feed-forward block: gated (SwiGLU) or plain (GELU)."""

import torch.nn.functional as F
from torch import Tensor

from windlass.blocks.base import Block, BlockContext
from windlass.blocks.linear import Linear, project
from windlass.blocks.mlp.spec import MlpSpec


class Mlp(Block):
    last_weight = "w2.weight"

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.w1 = Linear(spec.width, spec.hidden)
        self.w2 = Linear(spec.hidden, spec.width)
        self.w3 = Linear(spec.width, spec.hidden) if spec.gated else None

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        if self.w3 is None:
            return self.w2(F.gelu(self.w1(x)))
        gate, up = project(x, (self.w1, self.w3), self.fused)
        return self.w2(F.silu(gate) * up)


BLOCK = Mlp
