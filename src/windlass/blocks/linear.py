"""Matrix product whose arithmetic can be replaced (bf16, FP8) without a change of parameter names."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.initial_values import Filler, fill_constant, fill_normal

MatrixProduct = Callable[[Tensor, Tensor], Tensor]


class Adapter(nn.Module):
    """LoRA: scale * B A x is added to a product whose weights do not change. B starts at zero."""

    __call__: Callable[..., Tensor]

    def __init__(self, a: Tensor, b: Tensor, scale: float, dropout: float) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.dropout = nn.Parameter(a), nn.Parameter(b), scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return F.linear(F.linear(x, self.a), self.b) * self.scale

    def filler(self, name: str) -> Filler:
        """peft's spread of A: that of a uniform distribution up to 1 / sqrt(inputs)."""
        return (
            partial(fill_constant, value=0.0)
            if name == "b"
            else partial(fill_normal, std=1 / math.sqrt(3 * self.a.shape[1]))
        )


class Linear(nn.Linear):
    """`product` computes x W^T; FP8 replaces it."""

    __call__: Callable[..., Tensor]
    product: MatrixProduct | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None:
            out = F.linear(x, self.weight, self.bias)
        else:
            out = self.product(x, self.weight)
            out = out if self.bias is None else out + self.bias
        return out if self.adapter is None else out + self.adapter(x)


def project(x: Tensor, layers: Sequence[Linear], fused: bool) -> tuple[Tensor, ...]:
    """Several products of the same input; `fused` as one.

    The weights are laid side by side on the fly: cheap beside the product, and forward and backward then read x and
    write its gradient once."""
    if not fused or any(layer.adapter is not None for layer in layers):
        return tuple(layer(x) for layer in layers)
    product: MatrixProduct = layers[0].product or F.linear
    out = product(x, torch.cat([layer.weight for layer in layers]))
    if layers[0].bias is not None:
        out = out + torch.cat([layer.bias for layer in layers])
    return tuple(out.split([layer.weight.shape[0] for layer in layers], dim=-1))
