"""How is one layer divided over a tensor-parallel group? Columns, then rows, with the sequence divided in between."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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
from windlass.train.losses import parallel_logits, parallel_loss
from windlass.train.mesh import World


def apply_tensor(module: Model, recipe: Recipe, world: World) -> None:
    mesh, size = world.mesh["tp"], world.axes.tensor
    time = recipe.data.seq_len // world.axes.context
    if time % size:
        raise ConfigError(
            f"layout.tensor ({size}) does not divide the {time} positions a rank holds",
            hint="sequence parallelism divides the sequence: choose a seq_len that is a multiple",
        )
    if module.tied:
        raise ConfigError("model.tied is not supported with layout.tensor > 1", hint="set model.tied = false")
    if not hasattr(module, "tensor_plan"):
        raise ConfigError("this model family has no tensor-parallel plan", hint="set layout.tensor = 1")
    top: dict[str, object] = {}
    if module.embed is not None:
        top["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if module.norm is not None:
        top["norm"] = SequenceParallel()
    if top:
        parallelize_module(module, mesh, top)
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


def _head(module: Model, recipe: Recipe, mesh: DeviceMesh) -> None:
    head = module.head
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    head.loss = partial(parallel_loss, mesh=mesh, chunk=recipe.train.loss_chunk, z_loss=recipe.train.z_loss)
    head.logits = partial(parallel_logits, mesh=mesh)
