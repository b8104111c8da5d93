"""PyTorch alone: FSDP2, tensor, pipeline and context parallelism with our own optimizers."""

from collections.abc import Callable

from windlass.config import Recipe
from windlass.layout.types import StepSpec
from windlass.models.decoder import DecoderModel
from windlass.train.batches import BatchPlan
from windlass.train.mesh import World
from windlass.train.optimizers.base import Optimizer, build_optimizer
from windlass.train.parallelize import ModelParts, parallelize
from windlass.train.step import Stepper


def assemble(
    model: DecoderModel, recipe: Recipe, step: StepSpec, world: World, plan: BatchPlan, beat: Callable[[str], None]
) -> tuple[ModelParts, Optimizer, Stepper]:
    parts = parallelize(model, recipe, step, world)
    for module in parts.modules:
        module.init_weights(recipe.seed)
    optimizer = build_optimizer(
        parts.named_parameters(),
        recipe.optim,
        master=parts.master_copy,
        offload=world.layout.offload == "optimizer",
        undecayed=model.undecayed,
    )
    if parts.master_copy:
        # The master copy starts from fp32 numbers, not from those that bf16 has rounded: the same as under sharding.
        for slot in optimizer.slots:
            parts.modules[0].fill(slot.name, slot.weights, recipe.seed)
        optimizer.refresh()
    return parts, optimizer, Stepper(parts, optimizer, recipe, step, world, plan, beat)
