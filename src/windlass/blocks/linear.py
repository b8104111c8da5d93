"""Matrix product whose arithmetic can be replaced (bf16, FP8) without a change of parameter names."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MatrixProduct = Callable[[Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """`product` computes x W^T; FP8 replaces it."""

    __call__: Callable[..., Tensor]
    product: MatrixProduct | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None:
            return F.linear(x, self.weight, self.bias)
        out = self.product(x, self.weight)
        return out if self.bias is None else out + self.bias


def project(x: Tensor, layers: Sequence[Linear], fused: bool) -> tuple[Tensor, ...]:
    """Several products of the same input; `fused` as one.

    The weights are laid side by side on the fly: cheap beside the product, and forward and backward then read x and
    write its gradient once."""
    if not fused:
        return tuple(layer(x) for layer in layers)
    product: MatrixProduct = layers[0].product or F.linear
    out = product(x, torch.cat([layer.weight for layer in layers]))
    if layers[0].bias is not None:
        out = out + torch.cat([layer.bias for layer in layers])
    return tuple(out.split([layer.weight.shape[0] for layer in layers], dim=-1))
