"""Mamba-2 divided over ranks: heads and their groups by tensor parallelism, positions by context parallelism.

Each rank of a sequence computes what its positions leave behind; a state per head and the last inputs of the
convolutions are all that the ranks exchange, however long the sequence is."""

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from windlass.blocks.divide import Meshes, divide_columns_then_rows, gather_with_gradient, place_parameters
from windlass.blocks.mamba.module import Mamba


def parallelize(block: Mamba, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.stretch = meshes.context.get_local_rank()
        block.tail_before = partial(tail_of_rank_before, mesh=meshes.context)
        block.incoming = partial(state_of_ranks_before, mesh=meshes.context)
    if meshes.tensor is not None:
        divide_columns_then_rows(block, meshes.tensor, ("wz", "wx", "wb", "wc", "wt"), "wo")
        for module in (block, block.conv_x, block.conv_b, block.conv_c, block.norm):
            place_parameters(module, meshes.tensor, divided=True)


def tail_of_rank_before(tail: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Zeros on the first rank, which takes part because every rank must."""
    tails: Tensor = gather_with_gradient(tail.unsqueeze(0).contiguous(), 0, mesh.get_group())
    rank = mesh.get_local_rank()
    return tails[rank - 1] if rank else 0.0 * tails[0]


def state_of_ranks_before(left: Tensor, through: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """The sum of what the ranks before leave, each decayed by the ranks between."""
    group = mesh.get_group()
    lefts: Tensor = gather_with_gradient(left.unsqueeze(0).contiguous(), 0, group)
    throughs: Tensor = gather_with_gradient(through[..., None, None].unsqueeze(0).contiguous(), 0, group)
    state = 0.0 * lefts[0] * throughs[0]  # zeros that depend on both: every rank takes part in the backward pass too
    for rank in range(mesh.get_local_rank()):
        state = state * throughs[rank] + lefts[rank]
    return state
