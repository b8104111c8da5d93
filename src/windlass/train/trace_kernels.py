"""What would a GPU's kernels, and compiled blocks, leave in memory? Stand-ins for the trace, which runs on fake tensors of a CPU."""

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
from windlass.train.parallelize import Parts

# -- what kernels of a device leave behind, where a CPU's would leave more ---------------------------------------------------


@contextlib.contextmanager
def device_kernels() -> Iterator[None]:
    """Loss, attention and FP8 products as their GPU kernels hold memory: outputs only, no wide copies on the way."""
    import windlass.models.attention as attention
    import windlass.models.llama as llama
    import windlass.models.loss as loss
    import windlass.train.float8 as float8
    import windlass.train.objectives.next_token as losses

    changes: list[tuple[Any, str, Any]] = [
        (loss, "_terms", lambda device: _loss_kernel), (loss, "add_outer", _add_outer), (losses, "add_outer", _add_outer),
        (llama, "causal_attention", fused_attention), (attention, "causal_attention", fused_attention),
        (float8, "choose_backend", lambda wish, device: ("torch", "traced")), (float8, "scaled_product", _scaled_product),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, new in changes:
            if hasattr(where, name):  # a name that a module does not import needs no stand-in there
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


def fused_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    out: Tensor = _attention(q, k, v)[0]
    return out


# -- compiled blocks ----------------------------------------------------------------------------------------------------------


class Fused(torch.autograd.Function):
    """An element-wise region as the compiler leaves it: its inputs are kept, its inner values are not. `like`: which input the output
    resembles, or its last dimension and type."""

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


class Turned(torch.autograd.Function):
    """Rotation: linear, so nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def _fused_norm(self: Any, x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        return DTensor.from_local(
            _norm_kernel(x.to_local(), self.weight.to_local()), x.device_mesh, x.placements, run_check=False
        )
    return _norm_kernel(x, self.weight)


def _norm_kernel(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = Fused.apply(x.detach(), x, weight)
    return out


def _fused_feed_forward(self: Any, x: Tensor) -> Tensor:
    from windlass.models.linear import together

    if self.w3 is None:
        hidden = self.w1(x)
        return self.w2(Fused.apply(hidden.detach(), hidden))
    gate, up = together(x, (self.w1, self.w3)) if self.fused else (self.w1(x), self.w3(x))
    return self.w2(Fused.apply(up.detach(), gate, up))


class Narrow(torch.autograd.Function):
    """An FP8 product in compiled code: its input is cast again in the backward pass from what others keep; of weights laid side by side
    the cast ones stay, of a parameter nothing."""

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
    out: Tensor = Turned.apply(x)
    return out


def _fused_head_norm(self: Any, out: Tensor) -> Tensor:
    """Worked out again from its input, which takes as much: one of the two stays."""
    return out


def _fused_parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """The decay is worked out where it is used, and linear: only decayed scores stay."""
    q, k, v = (part.contiguous() for part in (q, k, v))  # one copy in the layout that batched products read
    scores: Tensor = Turned.apply(q @ k.transpose(-1, -2))
    return scores @ v


def _fused_chunkwise(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, chunk: int) -> Tensor:
    """Decays are factors inside kernels: queries, keys, values, scores inside chunks and the states between them stay."""
    time = q.shape[-2]
    if time <= chunk:
        return _fused_parallel(q, k, v, gamma)
    if time % chunk:
        q, k, v = (torch.nn.functional.pad(part, (0, 0, 0, chunk - time % chunk)) for part in (q, k, v))
    q, k, v = (part.contiguous().unflatten(-2, (-1, chunk)) for part in (q, k, v))
    states = Turned.apply(k.transpose(-1, -2) @ v)
    return (_fused_parallel(q, k, v, gamma) + q @ states).flatten(-3, -2)[..., :time, :]


class _Silent:
    """torch.nn.functional for retention: the gate's activation is part of the product that follows."""

    pad = staticmethod(torch.nn.functional.pad)

    @staticmethod
    def silu(gate: Tensor) -> Tensor:
        return gate


def _products(recipe: Recipe) -> int:
    """Matrix products of a block: projections in, out, and the feed-forward part's."""
    if recipe.train.fuse and recipe.layout.tensor == 1:
        return 4
    return (5 if recipe.model.family == "retnet" else 4) + (3 if recipe.model.activation == "swiglu" else 2)


def _fused_selective(products: int) -> Any:
    """The engine's policy, less the block's last product: compiled code drops what nobody reads."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    from windlass.models.recompute import SAVED

    aten, seen = torch.ops.aten, {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in SAVED or op is torch.ops.windlass_trace.attention.default
        if op in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default):
            seen[context.is_recompute] += 1
            count = seen[context.is_recompute]
            saved = bool(count % 2) and count < products
        elif op is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            saved = seen[context.is_recompute] < products
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def compiled_blocks(recipe: Recipe) -> Iterator[None]:
    """The compiler does not run under fake tensors, so what it leaves alive is put in the blocks' place: element-wise regions fused."""
    if not recipe.train.compile:
        yield
        return
    import windlass.models.llama as llama
    import windlass.models.parts as parts
    import windlass.models.recompute as recompute
    import windlass.models.retnet as retnet
    import windlass.train.float8 as float8

    changes: list[tuple[Any, str, Any]] = [
        (float8, "local_product", _narrow_product), (parts.Norm, "forward", _fused_norm), (llama.FeedForward, "forward", _fused_feed_forward), (llama, "rotate", _fused_rotation),
        (retnet, "rotate_every_two", _fused_rotation), (retnet.Retention, "_norm", _fused_head_norm), (recompute, "selective", partial(_fused_selective, _products(recipe))),
        (retnet, "retain_parallel", _fused_parallel), (retnet, "retain_chunkwise", _fused_chunkwise), (retnet, "F", _Silent),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(mock.patch.object(where, name, new))
        yield


def carry(parts: Parts, recipe: Recipe) -> None:
    """As `parallelize` sets it for compiled blocks."""
    for module in parts.modules:
        for block in module.layers.values():
            block.carries = bool(recipe.train.compile) and recipe.train.recompute == "none"
