"""Attention divided over ranks: heads by tensor parallelism, positions by context parallelism.

Under context parallelism each rank holds a contiguous stretch of positions, gathers keys and values, and keeps its
queries. torch's own context parallelism knows only CUDA's attention operators; this runs on any device and over gloo.
The last rank attends to more keys than the first; the planner counts that."""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from windlass.blocks.attention.kernels import causal_attention, document_mask
from windlass.blocks.attention.module import Attention
from windlass.blocks.divide import Meshes, divide_columns_then_rows, gather_with_gradient


def parallelize(block: Attention, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.core = partial(gathered_attention, mesh=meshes.context)
    if meshes.tensor is not None:
        divide_columns_then_rows(block, meshes.tensor, ("wq", "wk", "wv"), "wo")


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, mesh: DeviceMesh) -> Tensor:
    """Causal attention of this rank's queries over the keys and values of all ranks up to it."""
    rank, width = mesh.get_local_rank(), q.shape[2]
    end = (rank + 1) * width
    k, v = (gather_with_gradient(part.contiguous(), 2, mesh.get_group())[:, :, :end] for part in (k, v))
    numbers = documents if documents is not None else q.new_zeros((1, end), dtype=torch.long)
    mask = document_mask(numbers[:, rank * width : end], numbers[:, :end], query_start=rank * width)
    return causal_attention(q, k, v, mask)
