"""What does the planner's arithmetic say of the step that runs here? The same numbers for the trial step and for the trace."""

from __future__ import annotations

from windlass.config import Recipe
from windlass.cost.memory import memory
from windlass.cost.shapes import shape_of
from windlass.cost.work import Degrees, Work
from windlass.models import padded_vocab
from windlass.train.geometry import Geometry
from windlass.train.mesh import Axes
from windlass.train.objectives.next_token import PLAIN_LOGITS_BYTES
from windlass.train.parallelize import choose_sync


def allocated(
    recipe: Recipe, axes: Axes, geometry: Geometry, devices_per_node: int, *, compiled: bool, fused: bool
) -> float:
    """Bytes at the allocator's peak on the fullest device."""
    work = work_of(recipe, geometry, compiled=compiled, fused=fused)
    return memory(shape_of(recipe.model), work, degrees_of(recipe, axes, geometry), devices_per_node).allocated


def work_of(recipe: Recipe, geometry: Geometry, *, compiled: bool, fused: bool) -> Work:
    layout, train, optim = recipe.layout, recipe.train, recipe.optim
    return Work(
        seq_len=geometry.seq_len, micro_batch=layout.micro_batch, accumulation=geometry.micro_batches, recompute=train.recompute,
        recompute_budget=train.recompute_budget, precision=train.precision, compile=compiled, flash=train.attention != "math",
        kernel=train.attention, loss=_loss(recipe), loss_chunk=train.loss_chunk, optimizer=optim.name, moments=optim.moments,
        native=recipe.model.family != "hf", fuse=fused, masked=recipe.data.mask_documents,
    )  # fmt: skip


def degrees_of(recipe: Recipe, axes: Axes, geometry: Geometry) -> Degrees:
    layout = recipe.layout
    # With one micro-batch the rule by layout is what counts: there is no second one that could find gradients.
    every = choose_sync(recipe, max(2, geometry.micro_batches)).every
    return Degrees(
        data=axes.data, shard=layout.shard, shard_size=axes.shard if layout.shard == "hybrid" else None, tensor=layout.tensor,
        pipeline=layout.pipeline, context=layout.context, schedule=layout.schedule, offload=layout.offload,
        chunks=layout.pipeline_chunks if layout.schedule == "interleaved" else 1, sync="every" if every else "last",
    )  # fmt: skip


def _loss(recipe: Recipe) -> str:
    """As `objectives.next_token` decides, where the model is not built."""
    if recipe.train.loss != "auto" or recipe.model.vocab is None:
        return "chunked" if recipe.train.loss == "auto" else recipe.train.loss
    tokens = recipe.layout.micro_batch * recipe.data.seq_len // recipe.layout.context
    return "plain" if tokens * padded_vocab(recipe.model.vocab) * 4 <= PLAIN_LOGITS_BYTES else "chunked"
