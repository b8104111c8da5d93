"""RMSNorm with its statistics in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from windlass.blocks.norm.spec import NormSpec


class RmsNorm(nn.Module):
    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(spec.width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight
