"""Attention divided over ranks: heads by tensor parallelism, positions by context parallelism.

Under context parallelism each rank holds a contiguous stretch of positions, gathers keys and values, and keeps its
queries. torch's own context parallelism knows only CUDA's attention operators; this runs on any device and over gloo.
The last rank attends to more keys than the first; the planner counts that."""

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from windlass.blocks.attention.kernels import Scores, causal_attention
from windlass.blocks.attention.module import Attention
from windlass.blocks.divide import Meshes, by_rows, divide_columns_then_rows, gather_with_gradient
from windlass.blocks.norm import parallel as parallel_norm


def parallelize(block: Attention, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.core = partial(gathered_attention, mesh=meshes.context)
    if meshes.tensor is not None:
        divide_columns_then_rows(block, meshes.tensor, ("wq", "wk", "wv"), "wo")
        if block.sinks is not None:
            block.sinks = by_rows(block.sinks, meshes.tensor)
        for norm in (block.q_norm, block.k_norm):
            if norm is not None and block.norms_heads:
                parallel_norm.parallelize_heads(norm, meshes.tensor)
            elif norm is not None:
                parallel_norm.divide_width(norm, meshes.tensor)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Tensor | None, sinks: Tensor | None, *, mesh: DeviceMesh
) -> Tensor:
    """Causal attention of this rank's queries over the keys and values of all ranks up to it."""
    start = mesh.get_local_rank() * q.shape[2]
    k, v = (gather_with_gradient(part.contiguous(), 2, mesh.get_group())[:, :, : start + q.shape[2]] for part in (k, v))
    return causal_attention(q, k, v, scores, documents, sinks, start=start)
