"""Models of GPU kernels and compiled blocks for the trace: they allocate what the real ones keep in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.config import Recipe
from windlass.layout.types import StepSpec
from windlass.models.presets import model_spec
from windlass.train.parallelize import ModelParts

# GPU kernels keep less in memory than the CPU implementations that fake tensors would run.


@contextlib.contextmanager
def device_kernels() -> Iterator[None]:
    """Loss, attention and FP8 products allocate as their GPU kernels do: outputs only, no intermediate copies."""
    import windlass.blocks.attention.kernels as attention
    import windlass.blocks.head.loss as loss
    import windlass.train.float8 as float8

    changes: list[tuple[Any, str, Any]] = [
        (loss, "chunk_terms", lambda device: _loss_kernel), (loss, "add_outer", _add_outer), (attention, "causal_attention", fused_attention),
        (float8, "choose_backend", lambda wish, device: ("torch", "traced")), (float8, "scaled_product", _scaled_product),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(mock.patch.object(where, name, new))
        yield


def _loss_kernel(logits: Tensor, targets: Tensor, vocab: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    total = logits.new_zeros((), dtype=torch.float32)
    return total, total, torch.empty_like(logits)


def _add_outer(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """bf16: one product with an fp32 result, which is a new tensor also when it is added to a sum."""
    return left.new_empty((left.shape[1], right.shape[1]), dtype=torch.float32)


def _scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


@torch.library.custom_op("windlass_trace::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention_keeps(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Queries, keys, values, output and one number per row, as flash and cuDNN kernels do."""
    ctx.save_for_backward(*inputs, *output)


def _attention_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


_attention.register_autograd(_attention_back, setup_context=_attention_keeps)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, start: int = 0) -> Tensor:
    out: Tensor = _attention(q, k, v)[0]
    return out


class Fused(torch.autograd.Function):
    """A compiled element-wise region: inputs are kept, intermediate values are not. The output has shape and type of `like`."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return (
            None,
            *(torch.empty_like(t) if need else None for t, need in zip(kept, ctx.needs_input_grad[1:], strict=True)),
        )


class Rotated(torch.autograd.Function):
    """Rotary positions: linear, so nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def _fused_norm(self: Any, x: Tensor) -> Tensor:
    parameters = [p for p in (self.weight, self.bias) if p is not None]
    if isinstance(x, DTensor):
        out = _norm_kernel(x.to_local(), *(p.to_local() for p in parameters))
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)
    return _norm_kernel(x, *parameters)


def _norm_kernel(x: Tensor, *parameters: Tensor) -> Tensor:
    out: Tensor = Fused.apply(x.detach(), x, *parameters)
    return out


def _fused_feed_forward(self: Any, x: Tensor, context: Any) -> Tensor:
    from windlass.blocks.linear import project

    if self.w3 is None:
        hidden, activation = self.w1(x), self.activation
        own = list(map(activation.local, activation.parameters())) if isinstance(activation, torch.nn.Module) else []
        return self.w2(Fused.apply(hidden.detach(), hidden, *own))
    gate, up = project(x, (self.w1, self.w3), self.fused)
    return self.w2(Fused.apply(up.detach(), gate, up))


class Narrow(torch.autograd.Function):
    """An FP8 product in compiled code: the backward pass casts its input again; of concatenated weights the cast copy is kept, of a
    parameter nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        kept = (
            weight if weight.grad_fn is None and weight.is_leaf else torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        )
        ctx.save_for_backward(kept)
        ctx.shapes = x.shape, weight.shape, x.dtype
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, dtype = ctx.shapes
        return grads[0].new_empty(x, dtype=dtype), grads[0].new_empty(weight, dtype=dtype)


def _narrow_product(x: Tensor, weight: Tensor, *, rows: bool = False) -> Tensor:
    out: Tensor = Narrow.apply(x, weight)
    return out


def _fused_rotation(x: Tensor, *_: Tensor) -> Tensor:
    out: Tensor = Rotated.apply(x)
    return out


def _fused_head_norm(self: Any, out: Tensor) -> Tensor:
    """Recomputed from its input, which has the same size: only one of the two is kept."""
    return out


def _fused_parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """The decay is computed where it is used, and linear: only decayed scores are kept."""
    q, k, v = (part.contiguous() for part in (q, k, v))  # one copy in the layout that batched products read
    scores: Tensor = Rotated.apply(q @ k.transpose(-1, -2))
    return scores @ v


def _fused_chunkwise(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, chunk: int) -> Tensor:
    """Decays are factors inside kernels: queries, keys, values, scores inside chunks and the states between them are kept."""
    time = q.shape[-2]
    if time <= chunk:
        return _fused_parallel(q, k, v, gamma)
    if time % chunk:
        q, k, v = (torch.nn.functional.pad(part, (0, 0, 0, chunk - time % chunk)) for part in (q, k, v))
    q, k, v = (part.contiguous().unflatten(-2, (-1, chunk)) for part in (q, k, v))
    states = Rotated.apply(k.transpose(-1, -2) @ v)
    return (_fused_parallel(q, k, v, gamma) + q @ states).flatten(-3, -2)[..., :time, :]


class _Silent:
    """torch.nn.functional for retention: the gate's activation is part of the product that follows."""

    pad = staticmethod(torch.nn.functional.pad)

    @staticmethod
    def silu(gate: Tensor) -> Tensor:
        return gate


def _products(recipe: Recipe, step: StepSpec) -> int:
    """Number of matrix products of a block."""
    layer = model_spec(recipe.model).groups[0].layer
    return len(layer.product_groups if step.fused_projections else layer.products)


def _fused_selective(products: int) -> Any:
    """The engine's policy without the block's last product: compiled code drops what is not read again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    from windlass.models.decoder import SAVED

    aten, products_run = torch.ops.aten, {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in SAVED or op is torch.ops.windlass_trace.attention.default
        if op in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default):
            products_run[context.is_recompute] += 1
            count = products_run[context.is_recompute]
            saved = bool(count % 2) and count < products
        elif op is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            saved = products_run[context.is_recompute] < products
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def compiled_blocks(recipe: Recipe, step: StepSpec) -> Iterator[None]:
    """Blocks that keep what compiled blocks keep (the compiler does not run under fake tensors)."""
    if not step.compile:
        yield
        return
    import windlass.blocks.attention.module as attention
    import windlass.blocks.mlp.module as mlp
    import windlass.blocks.norm.module as norm
    import windlass.blocks.retention.module as retention
    import windlass.models.decoder as decoder
    import windlass.train.float8 as float8

    selective = partial(_fused_selective, _products(recipe, step))
    changes: list[tuple[Any, str, Any]] = [
        (float8, "local_product", _narrow_product),
        (norm.Norm, "forward", _fused_norm),
        (mlp.Mlp, "forward", _fused_feed_forward),
        (attention, "rotate", _fused_rotation),
        (retention, "rotate_every_two", _fused_rotation),
        (retention.Retention, "head_norm", _fused_head_norm),
        (decoder, "selective", selective),
        (retention, "retain_parallel", _fused_parallel),
        (retention, "retain_chunkwise", _fused_chunkwise),
        (retention, "F", _Silent),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(mock.patch.object(where, name, new))
        yield


def carry(parts: ModelParts, step: StepSpec) -> None:
    """Set `carries` as `parallelize` does for compiled layers."""
    for module in parts.modules:
        for layer in module.typed_layers():
            layer.carries = step.compile and step.recompute == "none"
