"""A matrix product whose arithmetic can be exchanged (bf16, FP8) without a change of names; several may share one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """Without bias. `product` computes x W^T; `train.parallelize` sets it to FP8 where that is asked for."""

    product: Product | None = None

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.product is None else self.product(x, self.weight)


def together(x: Tensor, parts: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Several products of the same input as one. The weights are laid side by side on the fly: cheap beside the product,
    and forward and backward then read x and write its gradient once."""
    weight = torch.cat([part.weight for part in parts])
    product = parts[0].product or F.linear
    return product(x, weight).split([part.weight.shape[0] for part in parts], dim=-1)
