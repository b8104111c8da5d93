"""Retention divided over ranks: heads by tensor parallelism, positions by context parallelism.

A context rank needs only the state that the stretches before it leave: a matrix per head, however long the sequence is.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from windlass.blocks.divide import Meshes, divide_columns_then_rows, gather_with_gradient
from windlass.blocks.retention.module import Retention, retain_state, state_left


def parallelize(block: Retention, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.carried = partial(carried_retention, mesh=meshes.context)
    if meshes.tensor is not None:
        divide_columns_then_rows(block, meshes.tensor, ("wq", "wk", "wv", "wg"), "wo")
        block.first_head = meshes.tensor.get_local_rank() * (block.heads // meshes.tensor.size())


def carried_retention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """What all earlier ranks' positions add to this rank's. The first rank adds zeros, because every rank takes
    part."""
    left = gather_with_gradient(state_left(k, v, gamma).unsqueeze(0).contiguous(), 0, mesh.get_group())
    gap = mesh.get_local_rank() - 1 - torch.arange(left.shape[0], device=q.device)
    decay = gamma[None] ** (gap.clamp(min=0)[:, None] * q.shape[-2])
    weight = torch.where(gap[:, None] >= 0, decay, 0.0).to(q.dtype)
    return retain_state(q, (left * weight[:, None, :, None, None]).sum(0), gamma)
