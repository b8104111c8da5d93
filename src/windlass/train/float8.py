"""How are matrix products done in FP8? Casts with scales found on the spot, torch's scaled product, for forward and both gradients.

Scales are dynamic: the largest magnitude of a tensor (or of each row) maps to FP8's largest number, so there is no history to
tune or to save. Inputs, weights and gradients are e4m3; sums are in fp32 inside the product. The head, the embedding and the
norms stay in bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from windlass.errors import ConfigError
from windlass.models.linear import Linear
from windlass.models.parts import Model

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def refuse(device: torch.device) -> None:
    """FP8 needs tensor cores that have it: compute capability 8.9 or later. MI250X has none."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise ConfigError(
        f'train.precision = "fp8", but {name} has no FP8 matrix units',
        hint='use train.precision = "bf16"; FP8 needs Hopper or Ada and later',
    )


def apply_float8(module: Model, device: torch.device, scaling: str = "tensor") -> None:
    """Give every product inside the blocks FP8 arithmetic, where its shape allows."""
    refuse(device)
    for block in module.layers.values():
        for part in block.modules():
            if isinstance(part, Linear) and part.weight.shape[0] % 16 == 0 and part.weight.shape[1] % 16 == 0:
                part.product = partial(float8_product, rows=scaling == "row")


def float8_product(x: Tensor, weight: Tensor, *, rows: bool = False) -> Tensor:
    """x W^T for x of any leading shape."""
    out: Tensor = Float8Product.apply(x.flatten(0, -2), weight, rows)
    return out.unflatten(0, x.shape[:-1])


def cast(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in FP8 and the factor that brings it back; one factor for all (dim None) or one per slice along `dim`."""
    size = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    back = size.float().clamp(min=1e-12) / LARGEST
    return (x.float() / back).to(E4M3), back


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a (rows first) times b (columns first). On a CPU, for tests, the same numbers through fp32."""
    if a.device.type == "cpu":
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(dtype)
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True)


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        along = 1 if rows else None
        x8, x_back = cast(x, along)
        w8, w_back = cast(weight, along)
        return scaled_product(x8, w8.t(), x_back, w_back.t() if rows else w_back, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return _input_gradient(grad, weight, ctx.rows), _weight_gradient(grad, x, ctx.rows), None


def _input_gradient(grad: Tensor, weight: Tensor, rows: bool) -> Tensor:
    g8, g_back = cast(grad, 1 if rows else None)
    w8, w_back = cast(weight, 0 if rows else None)
    # The product wants its second factor column by column: a copy of the FP8 weights, a quarter of an fp32 one.
    return scaled_product(g8, w8.t().contiguous().t(), g_back, w_back, grad.dtype)


def _weight_gradient(grad: Tensor, x: Tensor, rows: bool) -> Tensor:
    g8, g_back = cast(grad, 0 if rows else None)
    x8, x_back = cast(x, 0 if rows else None)
    return scaled_product(
        g8.t().contiguous(), x8.t().contiguous().t(), g_back.t() if rows else g_back, x_back, grad.dtype
    )
