"""A run in training inside the test's own process: its place, start, run folder and first steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from windlass.clusters.scheduler import Place, place
from windlass.config import LayoutConfig, Recipe
from windlass.layout.resolve import complete_layout, job_size, resolve_step
from windlass.layout.rules import check_layout
from windlass.models.presets import model_spec
from windlass.runs.folder import Run
from windlass.runs.starts import Start
from windlass.train import loop
from windlass.train.hooks import Hook, Training
from windlass.train.mesh import device_type

NO_RUN = Run(Path("/nonexistent"))
"""For `loop.build`, which writes nothing."""


def place_here(devices_per_node: int | None = None) -> Place:
    """This process in the world that tests/multi's `spawn` (or nobody) made."""
    if devices_per_node is None:
        return place({name: value for name, value in os.environ.items() if not name.startswith("SLURM")})
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, node_rank = rank % devices_per_node, rank // devices_per_node
    nodes = world // devices_per_node
    return Place(rank, world, local_rank, devices_per_node, node_rank, nodes, None, None, "test")


def make_start(recipe: Recipe, here: Place) -> Start:
    """The start of a recipe on the devices of `here`, as `launch.start.bind_start` makes it; an invalid layout is refused."""
    model, device = model_spec(recipe.model), device_type()
    size = job_size(recipe, here.world_size, here.local_world_size)
    layout = complete_layout(recipe.layout or LayoutConfig(), size)
    check_layout(model, layout, size, recipe.train.engine)
    return Start(
        job="test",
        layout=layout,
        step=resolve_step(recipe, model, layout, gpu=device == "cuda"),
        device=device,
        devices=here.world_size,
        devices_per_node=here.local_world_size,
    )


def build(recipe: Recipe, here: Place | None = None) -> Training:
    """Everything before the first step, on this rank."""
    here = here or place_here()
    return loop.build(recipe, NO_RUN, make_start(recipe, here), here, say=lambda text: None)


def steps(training: Training, count: int, lr: float | None = None) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the next steps; none of them may be skipped."""
    values, batches = [], loop.open_batches(training)
    try:
        for _ in range(count):
            batch = next(batches)
            result = training.stepper.step(batch, training.recipe.optim.lr if lr is None else lr)
            training.progress.advance(training.plan)
            loss, norm, skipped, *_ = result.values.tolist()
            assert skipped == 0
            values.append((loss, norm))
    finally:
        batches.close()
    return values


def new_run(path: Path) -> Run:
    run = Run(path)
    for folder in (run.path, run.ranks, run.checkpoints, run.logs):
        folder.mkdir(parents=True, exist_ok=True)
    return run


def run_here(recipe: Recipe, run: Run, *hooks: Hook, say: Any = lambda text: None) -> int:
    """The whole loop on this rank; the exit code."""
    torch.set_num_threads(1)
    here = place_here()
    return loop.run(recipe, run, make_start(recipe, here), here, hooks, say)
