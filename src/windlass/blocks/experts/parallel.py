"""Experts divided over ranks: their inner size by tensor parallelism; the router is the same on every rank."""

from functools import partial
from typing import Any

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from windlass.blocks.divide import Meshes
from windlass.blocks.experts.module import Experts


def parallelize(block: Experts, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.sum_loads = partial(sum_over, mesh=meshes.context)
    if meshes.tensor is None:
        return
    modules: list[tuple[nn.Module, dict[str, Any]]] = [
        (
            block,
            {"router": Replicate(), "w1": Shard(1), "w2": Shard(2)} | ({"w3": Shard(1)} if block.spec.gated else {}),
        )
    ]
    if block.shared is not None:
        for layer, dim in ((block.shared.w1, 0), (block.shared.w2, 1), (block.shared.w3, 0)):
            if layer is not None:
                modules.append((layer, {"weight": Shard(dim)}))
    for module, placements in modules:
        for name, placement in placements.items():
            weight = distribute_tensor(getattr(module, name).detach(), meshes.tensor, [placement])
            setattr(module, name, nn.Parameter(weight))
    block.enter = partial(gather_sequence, mesh=meshes.tensor)
    block.leave = partial(scatter_sequence, mesh=meshes.tensor)


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The full sequence on each rank, which computes its part of the gradient."""
    divided = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    return divided.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scatter_sequence(out: Tensor, mesh: DeviceMesh) -> Tensor:
    """The ranks' parts summed; each keeps its stretch of the sequence."""
    return DTensor.from_local(out, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()


def sum_over(loads: Tensor, mesh: DeviceMesh) -> Tensor:
    out: Tensor = collectives.all_reduce(loads, "sum", mesh.get_group())
    return out
