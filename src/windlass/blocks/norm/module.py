"""RMSNorm with its statistics in fp32."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.blocks.norm.spec import NormSpec


class RmsNorm(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(spec.width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight
