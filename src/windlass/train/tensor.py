"""How is one layer divided over a tensor-parallel group? Columns, then rows, with the sequence divided in between."""

from __future__ import annotations

import warnings
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.models.parts import Model
from windlass.registry import OBJECTIVES
from windlass.train.mesh import World
from windlass.train.objectives.next_token import parallel_logits

# The embedding hands out this rank's part of a divided tensor, which is a view; nothing here writes into it.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


def apply_tensor(module: Model, recipe: Recipe, world: World) -> None:
    mesh, size = world.mesh["tp"], world.axes.tensor
    time = recipe.data.seq_len // world.axes.context
    if time % size:
        raise ConfigError(
            "train.layout-tensor-does-divide",
            f"layout.tensor ({size}) does not divide the {time} positions a rank holds",
            hint="sequence parallelism divides the sequence: choose a seq_len that is a multiple",
        )
    if not hasattr(module, "tensor_plan"):
        raise ConfigError(
            "train.model-family-tensor-parallel",
            "this model family has no tensor-parallel plan",
            hint="set layout.tensor = 1",
        )
    if module.embed is not None:
        module.embed.weight = by_rows(module.embed.weight, mesh)
        module.embed.lookup = partial(parallel_lookup, mesh=mesh)
    if module.norm is not None:
        parallelize_module(module, mesh, {"norm": SequenceParallel()})
    for block in module.layers.values():
        parallelize_module(block, mesh, block_plan(module.tensor_plan))
    if hasattr(module, "divide_heads"):
        module.divide_heads(mesh.get_local_rank(), size)
    if module.head is not None:
        _head(module, recipe, mesh)


def block_plan(plan: dict[str, str]) -> dict[str, object]:
    """A family names each sub-module's role; this is what the roles mean."""
    roles = {
        "norm": SequenceParallel,
        "column": ColwiseParallel,
        "row": lambda: RowwiseParallel(output_layouts=Shard(1)),
        "mixer": lambda: PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "ffn": lambda: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    return {name: roles[role]() for name, role in plan.items()}


def by_rows(weight: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Each rank holds some rows of the vocabulary."""
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))


def parallel_lookup(tokens: Tensor, weight: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """This rank's stretch of the sequence, looked up by whichever rank holds the row.

    torch's own row-wise embedding has no rule for its backward pass that keeps rows divided: the gradient was as large as the
    whole table on every rank. Here it is made from the local rows and stays as small as they are.
    """
    part = weight.to_local()
    index = tokens - mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    elsewhere = (index < 0) | (index >= part.shape[0])
    found = F.embedding(index.masked_fill(elsewhere, 0), part).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()


def _head(module: Model, recipe: Recipe, mesh: DeviceMesh) -> None:
    head = module.head
    if head.weight is not None:  # else it is the embedding's, which is divided already
        head.weight = by_rows(head.weight, mesh)
    head.loss = OBJECTIVES.load(recipe.train.objective).parallel_loss(recipe.train, mesh)
    head.logits = partial(parallel_logits, mesh=mesh)
