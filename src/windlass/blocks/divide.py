"""How weights and inputs are divided over tensor-parallel ranks: what several blocks share."""

from dataclasses import dataclass
from typing import Any

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

# The name before torch 2.13, which still works there and warns on every rank.
gather_with_gradient: Any = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)


@dataclass(frozen=True)
class Meshes:
    """The axes that divide a block; None: that axis has one rank."""

    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None


def by_rows(weight: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Each rank holds some rows of the vocabulary."""
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))


def first_row(weight: Tensor, mesh: DeviceMesh) -> int:
    """The first row of the full weight that this rank holds."""
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())


def divide_columns_then_rows(block: nn.Module, mesh: DeviceMesh, columns: tuple[str, ...], row: str) -> None:
    """The sequence is gathered before the block, `columns` divide their outputs, `row` sums over ranks and scatters
    again."""
    # A block takes (x, context); only x is divided along the sequence.
    parallelize_module(
        block,
        mesh,
        PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    )
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    parallelize_module(block, mesh, {**plan, row: RowwiseParallel(output_layouts=Shard(1))})
