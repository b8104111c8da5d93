"""How weights and inputs are divided over tensor-parallel ranks: what several blocks share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
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
    # Axes "ep" and, with tensor parallelism, "tp": those over which the weights of experts lie.
    expert: DeviceMesh | None = None


def by_rows(weight: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Each rank holds some rows: of the vocabulary, or the numbers of some heads."""
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))


def first_row(weight: Tensor, mesh: DeviceMesh) -> int:
    """The first row of the full weight that this rank holds."""
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())


class LocalParameters(nn.Module):
    """A module that computes on plain tensors, of which a tensor-parallel rank may hold a part."""

    # The parameter as this rank multiplies it; set where parameters are divided or each rank's gradient is a part.
    local: Callable[[Tensor], Tensor] = staticmethod(lambda parameter: parameter)


def gathered(hidden: Tensor) -> Tensor:
    """The whole sequence on every rank, where each holds a stretch of it."""
    return hidden.redistribute(placements=[Replicate()]) if isinstance(hidden, DTensor) else hidden


def own_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def own_copy(parameter: Tensor) -> Tensor:
    """Every rank has the full parameter, or that of its experts, and its own part of the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=placements)


def place_parameters(module: LocalParameters, mesh: DeviceMesh, *, divided: bool) -> None:
    """Divide each parameter over the ranks, or give each rank a copy."""
    placement = [Shard(0)] if divided else [Replicate()]
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placement)))
    module.local = own_part if divided else own_copy


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
