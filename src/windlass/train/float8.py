"""How are matrix products done in FP8? Casts with scales found on the spot, torch's scaled product, for forward and both gradients;
torchao's conversion where torch's product is not to be had.

Scales are dynamic: the largest magnitude of a tensor (or of each row) maps to FP8's largest number, so there is no history to
tune or to save. Inputs, weights and gradients are e4m3; sums are in fp32 inside the product. The head, the embedding and the
norms stay in bf16. Under tensor parallelism each rank casts its own part of a weight, with a scale of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from windlass.config import TrainConfig
from windlass.errors import ConfigError
from windlass.models.linear import Linear
from windlass.models.parts import Model

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx12")
"""MI300, MI350 and RDNA 4. MI250X is gfx90a and has none."""


def has_units(device: torch.device) -> bool:
    """Matrix units that multiply FP8: compute capability 8.9 or later, or CDNA 3 and later."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).startswith(AMD_WITH_FP8)
    return torch.cuda.get_device_capability(device) >= (8, 9)


def torch_can() -> bool:
    """Our own products: NVIDIA's number format (MI300 has another), and a torch that knows the scaled product."""
    return torch.version.hip is None and hasattr(torch, "_scaled_mm")


def torchao_there() -> bool:
    return importlib.util.find_spec("torchao") is not None


def choose_backend(wish: str, device: torch.device) -> tuple[str, str]:
    """Whose products, and why; refuses a device without FP8 and a package that is not there."""
    if not has_units(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise ConfigError(
            "train.train-precision-fp-but",
            f'train.precision = "fp8", but {name} has no FP8 matrix units',
            hint='use train.precision = "bf16"; FP8 needs Hopper, Ada, MI300 or later',
        )
    if wish != "torchao" and torch_can():
        return "torch", "torch's scaled product" if wish == "auto" else "train.fp8_backend"
    if wish == "torch":
        raise ConfigError(
            "train.train-fp-backend-torch",
            f'train.fp8_backend = "torch", but torch {torch.__version__} has no scaled product for this device',
            hint='pip install \'windlass[fp8]\' and use train.fp8_backend = "auto", or train.precision = "bf16"',
        )
    if torchao_there():
        return "torchao", "train.fp8_backend" if wish == "torchao" else "torch has no scaled product for this device"
    raise ConfigError(
        "train.train-precision-fp-needs",
        'train.precision = "fp8" needs the package torchao here, which is not installed',
        hint="pip install 'windlass[fp8]', or use train.precision = \"bf16\"",
    )


def apply_float8(module: Model, device: torch.device, config: TrainConfig) -> str:
    """Give every product inside the blocks FP8 arithmetic, where its shape allows; the sentence for the log."""
    backend, why = choose_backend(config.fp8_backend, device)
    chosen = [part for block in module.layers.values() for part in block.modules() if fits(part)]
    if backend == "torchao":
        _convert(module, chosen, config.fp8_scaling, emulate=device.type == "cpu")
    else:
        for part in chosen:
            part.product = partial(float8_product, rows=config.fp8_scaling == "row")
    return f"fp8: {len(chosen)} products of a rank by {backend}, one scale per {config.fp8_scaling} ({why})"


def fits(part: nn.Module) -> bool:
    """The scaled product wants multiples of 16; under tensor parallelism of the part that this rank holds."""
    if not isinstance(part, Linear):
        return False
    weight = part.weight.to_local() if isinstance(part.weight, DTensor) else part.weight
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def _convert(module: Model, chosen: list[Linear], scaling: str, *, emulate: bool) -> None:
    """torchao exchanges the modules; parameters keep their names."""
    if any(isinstance(part.weight, DTensor) for part in chosen):
        raise ConfigError(
            "train.layout-tensor-possible-fp",
            "layout.tensor > 1 is not possible with FP8 by torchao",
            hint="set layout.tensor = 1, or use bf16",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    name = {"tensor": "tensorwise", "row": "rowwise"}[scaling]
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=emulate)
    wanted = set(map(id, chosen))
    for block in module.layers.values():
        convert_to_float8_training(block, config=config, module_filter_fn=lambda part, _: id(part) in wanted)
        for part in block.modules():
            if hasattr(part, "fused"):  # torchao knows one weight per product
                part.fused = False


def float8_product(x: Tensor, weight: Tensor, *, rows: bool = False) -> Tensor:
    """x W^T for x of any leading shape; of DTensors the product of their local parts."""
    return (_divided_product if isinstance(weight, DTensor) else local_product)(x, weight, rows=rows)


def local_product(x: Tensor, weight: Tensor, *, rows: bool) -> Tensor:
    out: Tensor = Float8Product.apply(x.flatten(0, -2), weight, rows)
    return out.unflatten(0, x.shape[:-1])


def _divided_product(x: Tensor, weight: DTensor, *, rows: bool) -> Tensor:
    """Columns: x is whole and its gradient a sum over ranks. Rows: x is divided like the weight and the product is the sum."""
    by_column = weight.placements[0].is_shard(0)
    part = x.to_local(grad_placements=[Partial()]) if by_column else x.to_local()
    out = local_product(part, weight.to_local(), rows=rows)
    placement = Shard(out.ndim - 1) if by_column else Partial()
    return DTensor.from_local(out, weight.device_mesh, [placement], run_check=False)


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
