"""How is the loss computed when the vocabulary is divided over ranks? In chunks, with three small reductions each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from windlass.config import TrainConfig
from windlass.models.loss import chunked_loss, forward_in_chunks, kept_gradients, next_token_loss

WHOLE_LOGITS = 64 * 2**20
"""Bytes of a micro-batch's fp32 logits up to which they are made whole."""


def choose_loss(config: TrainConfig, device: torch.device, rows: int, tokens: int) -> tuple[Any, str]:
    """The loss function of a recipe and the reason for it."""
    kind, why = config.loss, "as the recipe says"
    if kind == "auto":
        small = tokens * rows * 4 <= WHOLE_LOGITS
        kind = "plain" if small else "chunked"
        why = f"logits of a micro-batch would take {tokens * rows * 4 / 2**20:.0f} MiB"
    if kind == "plain":
        return partial(next_token_loss, z_loss=config.z_loss), f"loss: plain ({why})"
    return partial(
        chunked_loss, chunk=config.loss_chunk, z_loss=config.z_loss
    ), f"loss: in chunks of {config.loss_chunk} tokens ({why})"


def whole_sequence(hidden: Tensor) -> Tensor:
    """Sequence-sharded hidden states made whole on each rank; their gradients are partial sums over vocabulary parts."""
    if not isinstance(hidden, DTensor):
        return hidden
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def parallel_logits(hidden: Tensor, weight: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Whole logits on each rank, for evaluation."""
    part = F.linear(whole_sequence(hidden), weight.to_local())
    return DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False).full_tensor()


def parallel_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, mesh: DeviceMesh, chunk: int, z_loss: float
) -> Tensor:
    """Like `chunked_loss`, where each rank holds some rows of the head."""
    whole = whole_sequence(hidden).flatten(0, -2)
    part = weight.to_local()
    start = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    out: Tensor = ParallelLoss.apply(whole, part, targets.flatten(), (start, vocab), chunk, z_loss, mesh.get_group())
    return out


class ParallelLoss(torch.autograd.Function):
    """`ChunkedLoss` with each chunk's terms brought together over the ranks that hold the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, span: tuple[int, int], chunk: int, z_loss: float, group: Any,
    ) -> Tensor:  # fmt: skip
        return forward_in_chunks(ctx, hidden, weight, targets, chunk, lambda x, y: _chunk(x, y, span, z_loss, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grads[0]), None, None, None, None, None


def _chunk(
    logits: Tensor, targets: Tensor, span: tuple[int, int], z_loss: float, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    start, vocab = span
    column = start + torch.arange(logits.shape[1], device=logits.device)
    wide = torch.where(column < vocab, logits.float(), float("-inf"))
    # A rank may hold padding only; its maximum is minus infinity, the group's is not.
    top = wide.amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    exponent = torch.exp(wide - top)
    hit = column == targets[:, None]
    both = torch.stack((exponent.sum(-1), torch.where(hit, wide, 0.0).sum(-1)))
    dist.all_reduce(both, group=group)
    lse = top + both[0][:, None].log()
    entropy = (lse.squeeze(1) - both[1]).sum()
    slope = exponent / both[0][:, None] * (1 + 2 * z_loss * lse) - hit.to(wide.dtype)
    return entropy + z_loss * lse.pow(2).sum(), entropy, slope.to(logits.dtype)
