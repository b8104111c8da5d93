"""Head and loss with the vocabulary divided over tensor-parallel ranks: in chunks, with three small reductions each."""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from windlass.blocks.divide import by_rows, first_row, gathered
from windlass.blocks.head.loss import ChunkedLoss
from windlass.blocks.head.module import OutputHead
from windlass.blocks.initial_values import local_tensor


def parallelize(head: OutputHead, tensor_mesh: DeviceMesh) -> None:
    if head.weight is not None:  # else it is the embedding's, which is divided already
        head.weight = by_rows(head.weight, tensor_mesh)
    head.logits = partial(parallel_logits, mesh=tensor_mesh)


def full_sequence(hidden: Tensor) -> Tensor:
    """Sequence-sharded hidden states gathered on each rank; their gradients are partial sums over vocabulary parts."""
    hidden = gathered(hidden)
    return hidden.to_local(grad_placements=[Partial()]) if isinstance(hidden, DTensor) else hidden


def parallel_logits(hidden: Tensor, weight: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Full logits on each rank, for evaluation."""
    part = F.linear(full_sequence(hidden), local_tensor(weight))
    return DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False).full_tensor()


def parallel_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, mesh: DeviceMesh, chunk: int, z_loss: float
) -> Tensor:
    """Like `chunked_loss`, where each rank holds some rows of the head."""
    terms = partial(divided_terms, start=first_row(weight, mesh), vocab=vocab, z_loss=z_loss, group=mesh.get_group())
    arguments = (full_sequence(hidden).flatten(0, -2), local_tensor(weight), targets.flatten(), chunk, terms)
    out: Tensor = cast(Any, ChunkedLoss).apply(*arguments)
    return out


def divided_terms(
    logits: Tensor, targets: Tensor, *, start: int, vocab: int, z_loss: float, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and gradient of one chunk, from the logits of this rank's rows, which begin at `start`."""
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
    counted = targets[:, None] >= 0
    entropy = torch.where(counted.squeeze(1), lse.squeeze(1) - both[1], 0.0).sum()
    slope = exponent / both[0][:, None] * (1 + 2 * z_loss * lse) - hit.to(wide.dtype)
    total = entropy + z_loss * torch.where(counted, lse.pow(2), 0.0).sum()
    return total, entropy, torch.where(counted, slope, 0.0).to(logits.dtype)
