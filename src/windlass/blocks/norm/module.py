"""RMSNorm and LayerNorm with their statistics in fp32."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.blocks.divide import LocalParameters
from windlass.blocks.norm.spec import NormSpec


class Norm(LocalParameters):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.eps, self.offset, self.scale = spec.eps, 1.0 if spec.zero_centred else 0.0, spec.scale
        self.weight = nn.Parameter(torch.full((spec.width,), 1.0 - self.offset))
        self.bias = nn.Parameter(torch.zeros(spec.width)) if spec.bias else None
        # Mean of squares over the last dimension; `parallel.py` replaces it where that dimension is divided.
        self.mean_square: Callable[[Tensor], Tensor] = mean_square

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.bias is not None:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        weight = self.local(self.weight)
        # Added in fp32: in bf16 a weight near zero would lose its last digits beside the one.
        out = (wide * (self.offset + weight.float())).to(x.dtype) if self.offset else wide.to(x.dtype) * weight
        out = out if self.bias is None else out + self.local(self.bias)
        return out if self.scale == 1.0 else out * self.scale

    def initial(self, parameter: str) -> float:
        """The value that a parameter of this norm begins with."""
        return 1.0 - self.offset if parameter == "weight" else 0.0


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)
