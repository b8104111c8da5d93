"""The scan by the kernels of the package mamba_ssm, where it is installed.

Operators of their own, so that a layer still compiles as one graph: the package's autograd function would break it. The
convolution needs no package (causal_conv1d): compiled, it is one kernel."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def is_installed() -> bool:
    return torch.cuda.is_available() and find_spec("mamba_ssm") is not None


def _kernels() -> Any:
    from mamba_ssm.ops.triton import ssd_combined

    return ssd_combined


# Arguments and results as of `scan.chunked_scan`, but documents are those of the positions (batch, time), as int32.
@torch.library.custom_op("windlass::mamba_scan", mutates_args=())
def fused_scan(
    values: Tensor, steps: Tensor, decay: Tensor, write: Tensor, read: Tensor, chunk: int, documents: Tensor | None
) -> Tensor:
    out: Tensor = _kernels()._mamba_chunk_scan_combined_fwd(
        values, steps, decay, write, read, chunk, seq_idx=documents
    )[0]
    return out


@torch.library.custom_op("windlass::mamba_scan_gradients", mutates_args=())
def fused_gradients(
    grad: Tensor,
    out: Tensor,
    values: Tensor,
    steps: Tensor,
    decay: Tensor,
    write: Tensor,
    read: Tensor,
    chunk: int,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = values, steps, decay, write, read
    gradients = _kernels()._mamba_chunk_scan_combined_bwd(grad, *inputs, out, chunk, seq_idx=documents)[:5]
    first, second, third, fourth, fifth = (g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
    return first, second, third, fourth, fifth


@fused_scan.register_fake
def _(
    values: Tensor, steps: Tensor, decay: Tensor, write: Tensor, read: Tensor, chunk: int, documents: Tensor | None
) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


@fused_gradients.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    values: Tensor,
    steps: Tensor,
    decay: Tensor,
    write: Tensor,
    read: Tensor,
    chunk: int,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    first, second, third, fourth, fifth = (
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in (values, steps, decay, write, read)
    )
    return first, second, third, fourth, fifth


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, chunk, documents = inputs
    ctx.save_for_backward(output, *tensors, documents)
    ctx.chunk = chunk


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *saved, documents = ctx.saved_tensors
    return (*fused_gradients(grad, *saved, ctx.chunk, documents), None, None)


fused_scan.register_autograd(_backward, setup_context=_save)
