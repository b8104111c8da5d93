"""Next-token cross-entropy: from all logits at once, in chunks of tokens, or with the vocabulary divided over ranks."""

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
from windlass.models.parts import LossFunction

PLAIN_LOGITS_BYTES = 64 * 2**20
"""loss = "auto": the largest fp32 logits of a micro-batch that are computed at once."""


class NextToken:
    def choose_loss(self, config: TrainConfig, *, rows: int, tokens: int) -> tuple[LossFunction, str]:
        kind, reason = config.loss, "as the recipe says"
        if kind == "auto":
            logits_bytes = tokens * rows * 4
            kind = "plain" if logits_bytes <= PLAIN_LOGITS_BYTES else "chunked"
            reason = f"logits of a micro-batch would take {logits_bytes / 2**20:.0f} MiB"
        if kind == "plain":
            return partial(next_token_loss, z_loss=config.z_loss), f"loss: plain ({reason})"
        loss = partial(chunked_loss, chunk=config.loss_chunk, z_loss=config.z_loss)
        return loss, f"loss: in chunks of {config.loss_chunk} tokens ({reason})"

    def parallel_loss(self, config: TrainConfig, mesh: DeviceMesh) -> LossFunction:
        return partial(parallel_loss, mesh=mesh, chunk=config.loss_chunk, z_loss=config.z_loss)


OBJECTIVE = NextToken()


def gather_sequence(hidden: Tensor) -> Tensor:
    """All positions of sequence-sharded hidden states on each rank; their gradients are partial sums over the vocabulary."""
    if not isinstance(hidden, DTensor):
        return hidden
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def parallel_logits(hidden: Tensor, weight: DTensor, *, mesh: DeviceMesh) -> Tensor:
    """All logits on each rank, for evaluation."""
    part = F.linear(gather_sequence(hidden), weight.to_local())
    return DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False).full_tensor()


def parallel_loss(
    hidden: Tensor, weight: DTensor, targets: Tensor, *, vocab: int, mesh: DeviceMesh, chunk: int, z_loss: float
) -> Tensor:
    """Like `chunked_loss`, where each rank holds some rows of the head."""
    first_row = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    rows = gather_sequence(hidden).flatten(0, -2)
    sums: Tensor = ParallelLoss.apply(
        rows, weight.to_local(), targets.flatten(), (first_row, vocab), chunk, z_loss, mesh.get_group()
    )  # type: ignore[no-untyped-call]
    return sums


class ParallelLoss(torch.autograd.Function):
    """`ChunkedLoss` with each chunk's terms combined over the ranks that hold the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        span: tuple[int, int],
        chunk: int,
        z_loss: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        return forward_in_chunks(
            ctx, hidden, weight, targets, chunk, lambda logits, ids: parallel_terms(logits, ids, span, z_loss, group)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, grads[0]), None, None, None, None, None


def parallel_terms(
    logits: Tensor, targets: Tensor, span: tuple[int, int], z_loss: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and gradient of one chunk's logits, by two small reductions; `span`: (first row, vocabulary)."""
    first_row, vocab = span
    column = first_row + torch.arange(logits.shape[1], device=logits.device)
    wide = torch.where(column < vocab, logits.float(), float("-inf"))
    # A rank may hold padding only; its maximum is minus infinity, the group's is not.
    top = wide.amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    exponent = torch.exp(wide - top)
    hit = column == targets[:, None]
    sums = torch.stack((exponent.sum(-1), torch.where(hit, wide, 0.0).sum(-1)))
    dist.all_reduce(sums, group=group)
    lse = top + sums[0][:, None].log()
    entropy = (lse.squeeze(1) - sums[1]).sum()
    slope = exponent / sums[0][:, None] * (1 + 2 * z_loss * lse) - hit.to(wide.dtype)
    return entropy + z_loss * lse.pow(2).sum(), entropy, slope.to(logits.dtype)
