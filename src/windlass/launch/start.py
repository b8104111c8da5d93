"""Creates runs and binds their starts: the one place where a layout is chosen for workers.

A run is resolved once, at creation: the recipe with every default and a layout, written to config.json. Each start is bound
once, by one process: layout and step for the devices that are really there, written to starts/<job>.<restart>.json.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.here import with_gpus
from windlass.config import LayoutConfig, Loaded, Recipe
from windlass.errors import WindlassError
from windlass.layout.resolve import complete_layout, job_size, resolve_step
from windlass.layout.rules import check_layout, violations
from windlass.layout.types import Layout
from windlass.models.presets import model_spec
from windlass.planner import plan, write_plan
from windlass.planner.search import fill_recipe, on_devices
from windlass.runs.events import LayoutChanged
from windlass.runs.folder import Run, create_run
from windlass.runs.starts import Start, last_start, write_start


def device_type() -> str:
    """The device type that workers on this machine will find: "cuda" (NVIDIA or AMD) or "cpu". Does not import torch."""
    if os.environ.get("WINDLASS_DEVICE") == "cpu":
        return "cpu"
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "cpu"
    return "cuda" if has_gpu else "cpu"


def local_cluster(recipe: Recipe, devices_per_node: int) -> Cluster:
    """The recipe's cluster with as many devices per node as the start really uses."""
    cluster = load_cluster(recipe.cluster)
    with_local_gpus, _ = with_gpus(cluster)
    return on_devices(
        with_local_gpus if devices_per_node <= with_local_gpus.node.devices else cluster, devices_per_node
    )


def resolve_recipe(loaded: Loaded, run: Run, cluster: Cluster, nodes: int) -> tuple[Loaded, str, str]:
    """The recipe with a layout, who chose it ("recipe" or "planner"), and the reason.

    A run that exists keeps the layout that the planner chose for it at creation.
    """
    if loaded.recipe.layout is not None:
        return loaded, "recipe", ""
    if run.layout_from() == "planner":
        before = run.recipe()
        train = loaded.recipe.train.model_copy(update={"recompute": before.train.recompute})
        recipe = loaded.recipe.model_copy(update={"layout": before.layout, "train": train})
        return replace(loaded, recipe=recipe), "planner", ""
    recipe, reason = fill_recipe(loaded.recipe, cluster, nodes=nodes)
    return replace(loaded, recipe=recipe), "planner", reason


def create_planned_run(folder: Path, loaded: Loaded, cluster: Cluster, nodes: int) -> tuple[Run, str]:
    """The run folder of a recipe, created or the existing one, and the reason for its layout; keeps the plan beside it."""
    loaded, layout_from, reason = resolve_recipe(loaded, Run(folder), cluster, nodes)
    run = create_run(folder, loaded, layout_from=layout_from)
    # What the planner expects is compared with measurements later; a recipe that it cannot price is trained all the same.
    with contextlib.suppress(WindlassError):
        if cluster.device != "cpu" or device_type() == "cpu":
            write_plan(run, plan(loaded.recipe, cluster, nodes=nodes))
    return run, reason


def bind_start(
    run: Run,
    *,
    devices: int,
    devices_per_node: int,
    job: str | None = None,
    restart: int = 0,
    reason: str = "",
    device: str | None = None,
) -> Start:
    """Write the start of a run on these devices.

    On another number of devices the layout keeps its tensor, pipeline and context degrees, its sharding and its micro-batch;
    the data-parallel degree and accumulation follow. Where that is not valid, a layout of the planner is searched again and
    one of the recipe is refused with the nearest valid values. Global batch and data order never change.
    """
    recipe, device = run.recipe(), device or device_type()
    model = model_spec(recipe.model)
    size = job_size(recipe, devices, devices_per_node)
    layout = complete_layout(recipe.layout or LayoutConfig(), size)
    recompute: str = recipe.train.recompute
    if violations(model, layout, size, recipe.train.engine):
        if run.layout_from() != "planner":
            check_layout(model, layout, size, recipe.train.engine)
        cluster = local_cluster(recipe, devices_per_node)
        best = plan(recipe.model_copy(update={"layout": None}), cluster, nodes=devices // devices_per_node).best
        layout, recompute = best.layout, best.recompute
        reason = f"{best.candidate.describe()} ({best.reason})"
    start = Start(
        job=job or f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        restart=restart,
        layout=layout,
        step=resolve_step(recipe, model, layout, gpu=device == "cuda", recompute=recompute),
        device=device,
        devices=devices,
        devices_per_node=devices_per_node,
        reason=reason,
    )
    _record_change(run, last_start(run), start)
    write_start(run, start)
    return start


def _record_change(run: Run, before: Start | None, start: Start) -> None:
    old: Layout | None = before.layout if before else None
    if before is not None and old != start.layout:
        reason = "the recipe's layout changed"
        if before.devices != start.devices:
            reason = f"{before.devices} -> {start.devices} devices"
        run.record(LayoutChanged(old=asdict(before.layout), new=asdict(start.layout), reason=reason))
