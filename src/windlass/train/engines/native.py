"""PyTorch alone: FSDP2, tensor, pipeline and context parallelism with our own optimizers."""

from __future__ import annotations

from collections.abc import Callable

from windlass.config import Recipe
from windlass.models.parts import Model
from windlass.train.geometry import Geometry
from windlass.train.mesh import World
from windlass.train.optimizers.base import Optimizer, build_optimizer
from windlass.train.parallelize import Parts, parallelize
from windlass.train.step import Stepper


def assemble(
    model: Model, recipe: Recipe, world: World, geometry: Geometry, beat: Callable[[str], None]
) -> tuple[Parts, Optimizer, Stepper]:
    parts = parallelize(model, recipe, world)
    for module in parts.modules:
        module.init_weights(recipe.seed)
    optimizer = build_optimizer(
        parts.named_parameters(),
        recipe.optim,
        master=parts.shadow,
        offload=recipe.layout is not None and recipe.layout.offload == "optimizer",
        undecayed=model.undecayed,
    )
    if parts.shadow:
        # The master copy starts from fp32 numbers, not from those that bf16 has rounded: the same as under sharding.
        for slot in optimizer.slots:
            parts.modules[0].fill(slot.name, slot.master, recipe.seed)
        optimizer.refresh()
    return parts, optimizer, Stepper(parts, optimizer, recipe, world, geometry, beat)
