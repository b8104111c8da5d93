"""Latent attention divided over ranks: heads by tensor parallelism, positions by context parallelism.

Every tensor-parallel rank computes the narrow vectors. Context ranks exchange these and not the keys and values, which
are many times as wide (70 times in DeepSeek-V3) and cheap to make again."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from windlass.blocks.attention.kernels import Scores, causal_attention
from windlass.blocks.divide import Meshes, divide_columns_then_rows, gather_with_gradient
from windlass.blocks.latent.module import LatentAttention


def parallelize(block: LatentAttention, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.share = partial(gather_earlier, mesh=meshes.context)
        block.core = later_attention
    if meshes.tensor is None:
        return
    divide_columns_then_rows(block, meshes.tensor, ("wq" if block.wq_up is None else "wq_up", "wkv"), "wo")
    for module in (block.wq_down, block.q_norm, block.wkv_down, block.kv_norm):
        if module is not None:
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), meshes.tensor, [Replicate()]))


def gather_earlier(narrow: Tensor, mesh: DeviceMesh) -> Tensor:
    """The positions (batch, positions, numbers) of all ranks up to this one."""
    parts: Tensor = gather_with_gradient(narrow.contiguous(), 1, mesh.get_group())
    return parts[:, : (mesh.get_local_rank() + 1) * narrow.shape[1]]


def later_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention of this rank's queries, which stand at the end of the keys."""
    return causal_attention(q, k, v, scores, documents, sinks, start=k.shape[2] - q.shape[2])
