"""How is a run put together? Everything before the first step, in order: mesh, model, parallelize, optimizer, stream, restore, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass import models
from windlass.checkpoint.load import find_latest, load_model_weights, restore
from windlass.checkpoint.save import Saver
from windlass.clusters.load import load_cluster
from windlass.clusters.scheduler import Place
from windlass.config import LayoutConfig, Recipe
from windlass.data.stream import open_stream
from windlass.energy.meter import Meter
from windlass.errors import WindlassError
from windlass.registry import ENGINES
from windlass.runs.folder import Run
from windlass.train.announce import announce
from windlass.train.check import check, check_metric, make_deterministic
from windlass.train.geometry import geometry_of
from windlass.train.hooks import Hook
from windlass.train.interval import SaveTimer
from windlass.train.job import Job, Say
from windlass.train.mesh import World, open_world
from windlass.train.metrics import Recorder
from windlass.train.signals import StopFlag
from windlass.train.state import after_restore
from windlass.train.validate import open_validator


def build(
    recipe: Recipe,
    run_folder: Run,
    where: Place,
    hooks: list[Hook],
    say: Say,
    *,
    announced: bool = True,
    beat: Callable[[str], None] = lambda phase: None,
) -> Job:
    """Everything before the first step, in order. Without `announced` nothing is written to the run folder."""
    recipe = recipe if recipe.layout is not None else recipe.model_copy(update={"layout": LayoutConfig()})
    torch.manual_seed(recipe.seed)
    if recipe.train.deterministic:
        make_deterministic()
    # mesh
    # The watchdog speaks first: torch's own limit would end the job without naming a rank.
    world = open_world(recipe.layout, where, timeout_seconds=max(600.0, 4 * recipe.train.watchdog_seconds))
    geometry = geometry_of(recipe, world.axes.data)
    check(recipe, world)
    # model
    with torch.device("meta"):
        model = models.build(recipe.model, seq_len=recipe.data.seq_len)
    # parallelize, optimizer
    parts, optimizer, stepper = ENGINES.load(recipe.train.engine)(model, recipe, world, geometry, beat)
    # stream
    stream = open_stream(recipe.data, seed=recipe.seed, split="train", vocab=model.vocab)
    # A run by train.steps names no tokens, so the stream could not know before how often it repeats a source.
    stream.check(geometry.total_tokens)
    job = Job(
        recipe, run_folder, world, geometry, parts, optimizer, stepper, stream, say, recorder=Recorder(),
        saver=Saver(run_folder, recipe.save, rank=world.rank, world_size=world.size, local_world_size=world.place.local_world_size),
        stop=StopFlag(run_folder, recipe.save, rank=world.rank, world_size=world.size),
        interval=SaveTimer(recipe.save), meter=open_meter(recipe, run_folder, world),
    )  # fmt: skip
    job.validator = open_validator(recipe, world, parts, stepper, model.vocab)
    check_metric(recipe, job.validator)
    # restore
    restored = resume(job)
    # hooks
    job.hooks = [job.recorder, *hooks]
    if announced:
        announce(job, restored)
    return job


def open_meter(recipe: Recipe, run_folder: Run, world: World) -> Meter | None:
    """One per node."""
    if world.place.local_rank != 0 or not recipe.energy.enabled:
        return None
    try:
        cluster = load_cluster(recipe.cluster)
    except WindlassError:
        cluster = None
    # A launcher may show each rank one device only; the node's meter wants those of all its ranks.
    devices = list(range(world.place.local_world_size)) if world.device.type == "cuda" else None
    return Meter(cluster, recipe.energy, run=run_folder, devices=devices)


def resume(job: Job) -> Any:
    """Go on from the newest whole checkpoint; else begin, from given weights if the recipe names some."""
    save = job.recipe.save
    found = find_latest(job.run, verify=save.verify)
    if found is not None:
        go_back(job, found)
        job.stop.measured(save_seconds=found.save_seconds)
    elif save.load is not None:
        for module in job.parts.modules:
            load_model_weights(save.load, module, verify=save.verify)
        job.optimizer.adopt()
    job.energy_carried = _energy_so_far(job)
    return found


def _energy_so_far(job: Job) -> float | None:
    """What the run has used: the steps since the checkpoint are lost, their energy is spent. Each total contains the ones before it."""
    last = job.run.last_metrics().energy_joules
    known = [value for value in (job.energy_carried, last) if isinstance(value, (int, float))]
    return max(known, default=None)


def go_back(job: Job, found: Any) -> dict[str, Any]:
    state = job.state()
    extra = restore(found, state, seed=job.recipe.seed)
    after_restore(job.optimizer, job.parts.tie)
    job.step, job.tokens, job.sequences = extra["step"], extra["tokens"], extra["sequences"]
    job.energy_carried, job.rolled_back = extra.get("energy_joules"), extra.get("rolled_back", False)
    job.best = [loss for loss in extra.get("best", []) if loss is not None]
    return extra
