"""Matrix products in FP8: torch's scaled product with dynamic scales, or torchao's conversion where torch has none.

The largest magnitude of a tensor (or of each row) maps to FP8's largest number, so there is no history to tune or to
save. Inputs, weights and gradients are e4m3; sums are in fp32 inside the product. The head, the embedding, the norms,
routers and routed experts stay in bf16. Under tensor parallelism each rank casts its own part of a weight, with a scale
of its own.
"""

import dataclasses
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from windlass.blocks.experts.module import Experts
from windlass.blocks.initial_values import local_tensor
from windlass.blocks.linear import Linear
from windlass.config import TrainConfig
from windlass.errors import ConfigError
from windlass.models.decoder import DecoderModel

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# MI300, MI350 and RDNA 4. MI250X is gfx90a and has none.
AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx12")


def torchao_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def choose_backend(setting: str, device: torch.device) -> tuple[str, str]:
    """ "torch" or "torchao", and why; refuses a device without FP8 and a missing package."""
    name, has_fp8_units = "a CPU", False
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        has_fp8_units = (
            torch.cuda.get_device_capability(device) >= (8, 9)
            if torch.version.hip is None
            else str(torch.cuda.get_device_properties(device).gcnArchName).startswith(AMD_WITH_FP8)
        )
    if not has_fp8_units:
        raise ConfigError(
            "train.fp8-device",
            f'train.precision = "fp8", but {name} has no FP8 matrix units',
            hint='use train.precision = "bf16"; FP8 needs Hopper, Ada, MI300 or later',
        )
    # MI300 has another FP8 number format than torch's product expects.
    torch_supported = torch.version.hip is None and hasattr(torch, "_scaled_mm")
    if setting != "torchao" and torch_supported:
        return "torch", "torch's scaled product" if setting == "auto" else "train.fp8_backend"
    if setting == "torch":
        raise ConfigError(
            "train.fp8-backend",
            f'train.fp8_backend = "torch", but torch {torch.__version__} has no scaled product for this device',
            hint='pip install \'windlass[fp8]\' and use train.fp8_backend = "auto", or train.precision = "bf16"',
        )
    if not torchao_installed():
        raise ConfigError(
            "train.torchao-not-installed",
            'train.precision = "fp8" needs the package torchao on this device, which is not installed',
            hint="pip install 'windlass[fp8]', or use train.precision = \"bf16\"",
        )
    return "torchao", "train.fp8_backend" if setting == "torchao" else "torch has no scaled product for this device"


def apply_float8(module: DecoderModel, device: torch.device, config: TrainConfig) -> str:
    """Compute every product inside the blocks in FP8, where its shape allows; returns the sentence for the log."""
    backend, reason = choose_backend(config.fp8_backend, device)
    # The scaled product needs multiples of 16; under tensor parallelism, of the part that this rank holds.
    linears: list[Any] = [
        part
        for layer in module.layer_modules()
        for part in layer.modules()
        if isinstance(part, Linear) and all(size % 16 == 0 for size in local_tensor(part.weight).shape)
    ]
    if backend == "torchao":
        _convert_by_torchao(module, linears, config.fp8_scaling, emulate=device.type == "cpu")
    else:
        for part in linears:
            part.product = partial(float8_product, rows=config.fp8_scaling == "row")
    note = f"fp8: {len(linears)} products of a rank by {backend}, one scale per {config.fp8_scaling} ({reason})"
    # torch's grouped scaled product takes 0.66, 0.77 and 0.70 ms (forward, input and weight gradient) where bf16 takes
    # 0.80, 0.94 and 0.89, for OLMoE's experts on an H200, and 0.63, 0.66 and 0.59 against 0.64, 0.72 and 0.68 for those
    # of Qwen3-30B-A3B: less than the casts of weights and rows, and their transposed copies, take.
    experts = sum(isinstance(block, Experts) for block in module.blocks())
    return note + (
        f"; the experts of {experts} layers stay in bf16, where grouped products are faster" if experts else ""
    )


def _convert_by_torchao(module: DecoderModel, linears: list[Any], scaling: str, *, emulate: bool) -> None:
    """torchao replaces the modules; parameters keep their names."""
    if any(isinstance(part.weight, DTensor) for part in linears):
        raise ConfigError(
            "train.fp8-tensor-parallel",
            "layout.tensor > 1 is not possible with FP8 by torchao",
            hint="set layout.tensor = 1, or use bf16",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe, selected = Float8LinearConfig.from_recipe_name(f"{scaling}wise"), set(map(id, linears))
    config = dataclasses.replace(recipe, emulate=emulate)
    for block in module.layer_modules():
        convert_to_float8_training(block, config=config, module_filter_fn=lambda part, _: id(part) in selected)
        part: Any
        for part in block.modules():
            if hasattr(part, "fused"):  # torchao supports one weight per product
                part.fused = False


def float8_product(x: Tensor, weight: Tensor, *, rows: bool = False) -> Tensor:
    """x W^T for x of any leading shape; for DTensors the product of their local parts."""
    if not isinstance(weight, DTensor):
        return local_product(x, weight, rows=rows)
    assert isinstance(x, DTensor)
    if weight.placements[0].is_replicate():  # every rank computes the same
        out = local_product(x.to_local(), weight.to_local(), rows=rows)
        return DTensor.from_local(out, weight.device_mesh, [Replicate()], run_check=False)
    # Columns: x is complete, its gradient a sum over ranks. Rows: x is divided like the weight, the product is the sum.
    by_column = weight.placements[0].is_shard(0)
    part = x.to_local(grad_placements=[Partial()]) if by_column else x.to_local()
    out = local_product(part, weight.to_local(), rows=rows)
    placement = Shard(out.ndim - 1) if by_column else Partial()
    return DTensor.from_local(out, weight.device_mesh, [placement], run_check=False)


def local_product(x: Tensor, weight: Tensor, *, rows: bool) -> Tensor:
    out: Tensor = Float8Product.apply(x.flatten(0, -2), weight, rows)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def cast(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in FP8 and the factor that scales it back; one factor for all (dim None) or one per slice along `dim`."""
    size = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    factor = size.float().clamp(min=1e-12) / LARGEST
    return (x.float() / factor).to(E4M3), factor


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a (row-major) times b (column-major). On a CPU, for tests, the same numbers through fp32."""
    if a.device.type == "cpu":
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(dtype)
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True)


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        x8, x_scale = cast(x, 1 if rows else None)
        w8, w_scale = cast(weight, 1 if rows else None)
        return scaled_product(x8, w8.t(), x_scale, w_scale.t() if rows else w_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), rows, grad = ctx.saved_tensors, ctx.rows, grads[0]
        along = 0 if rows else None
        g8, g_scale = cast(grad, 1 if rows else None)
        w8, w_scale = cast(weight, along)
        # The second factor must be column-major: a copy of the FP8 weights, a quarter of an fp32 one.
        input_gradient = scaled_product(g8, w8.t().contiguous().t(), g_scale, w_scale, grad.dtype)
        g8, g_scale = cast(grad, along)
        x8, x_scale = cast(x, along)
        g_scale = g_scale.t() if rows else g_scale
        weight_gradient = scaled_product(g8.t().contiguous(), x8.t().contiguous().t(), g_scale, x_scale, grad.dtype)
        return input_gradient, weight_gradient, None
