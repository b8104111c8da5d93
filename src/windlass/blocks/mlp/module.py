"""Feed-forward block: gated (SwiGLU, GeGLU) or plain (GELU, squared ReLU, xIELU)."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.activations import ACTIVATIONS, gate_function
from windlass.blocks.base import Block, BlockContext
from windlass.blocks.divide import LocalParameters
from windlass.blocks.initial_values import Filler, fill_constant
from windlass.blocks.linear import Linear, project
from windlass.blocks.mlp.spec import MlpSpec

# Slope at zero of both sides of xIELU, and what the exponential's argument stays below.
XIELU_BETA, XIELU_EPS = 0.5, -1e-6
# Curvature of both sides at the beginning, as the paper has it (arXiv 2411.13010).
XIELU_CURVATURE = 0.8


class Xielu(LocalParameters):
    """Integral of ELU with one trained curvature for each sign; curvatures are stored before their softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = F.softplus(self.local(self.alpha_p)), XIELU_BETA + F.softplus(self.local(self.alpha_n))
        curved = (torch.expm1(x.clamp(max=XIELU_EPS)) - x) * negative
        return torch.where(x > 0, positive * x * x, curved) + XIELU_BETA * x


class Mlp(Block):
    last_weight = "w2.weight"

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.w1 = Linear(spec.width, spec.hidden)
        self.w2 = Linear(spec.hidden, spec.width)
        self.w3 = Linear(spec.width, spec.hidden) if spec.gated else None
        self.activation: Callable[..., Tensor]
        if spec.gated:
            self.activation = gate_function(spec.activation, spec.clamp)
        else:
            self.activation = Xielu() if spec.activation == "xielu" else ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        if self.w3 is None:
            return self.w2(self.activation(self.w1(x)))
        gate, up = project(x, (self.w1, self.w3), self.fused)
        return self.w2(self.activation(gate, up))

    def filler(self, name: str, std: float, num_layers: int) -> Filler:
        if not name.startswith("activation."):
            return super().filler(name, std, num_layers)
        softplus = XIELU_CURVATURE - (XIELU_BETA if name.endswith("alpha_n") else 0.0)
        return partial(fill_constant, value=math.log(math.expm1(softplus)))


BLOCK = Mlp
