"""A training (in this process, or this rank's part of it) built as `windlass train` builds it, for benchmarks that time bare steps."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.blocks.attention.kernels import attention_kernel
from windlass.clusters.scheduler import Place
from windlass.config import LayoutConfig, Recipe
from windlass.layout.resolve import complete_layout, job_size, resolve_step
from windlass.layout.rules import check_layout
from windlass.models.presets import model_spec
from windlass.runs.folder import Run
from windlass.runs.starts import Start
from windlass.train import loop
from windlass.train.hooks import Say, Training
from windlass.train.mesh import device_type
from windlass.train.step import StepResult

ONE_PROCESS = Place(0, 1, 0, 1, 0, 1, None, None, "single")


def start_of(recipe: Recipe, place: Place = ONE_PROCESS) -> Start:
    """The recipe's layout and step on the devices of this machine."""
    device = device_type()
    devices, per_node = place.world_size, place.local_world_size
    model, size = model_spec(recipe.model), job_size(recipe, devices, per_node)
    layout = complete_layout(recipe.layout or LayoutConfig(), size)
    check_layout(model, layout, size, recipe.train.engine)
    step = resolve_step(recipe, model, layout, gpu=device == "cuda")
    return Start(job="benchmark", layout=layout, step=step, device=device, devices=devices, devices_per_node=per_node)


def open_training(
    recipe: Recipe, folder: Path | None = None, say: Say = lambda line: None, place: Place = ONE_PROCESS
) -> Training:
    """Model, optimizer and data of a recipe; `folder` is an empty one under the temporary folder where none is named."""
    path = folder or Path(tempfile.mkdtemp(prefix="windlass-benchmark-"))
    return loop.build(recipe, Run(path), start_of(recipe, place), place, say=say)


@contextlib.contextmanager
def stepping(training: Training) -> Iterator[Callable[[float], StepResult]]:
    """A function that takes the next batch and does one optimizer step with the given learning rate."""
    batches = loop.open_batches(training)

    def step(lr: float) -> StepResult:
        batch = next(batches)
        result: StepResult = training.stepper.step(batch, lr, measure=loop.measures_layers(training))
        training.progress.advance(training.plan)
        return result

    try:
        with attention_kernel(training.recipe.train.attention, training.world.device):
            yield step
    finally:
        batches.close()
