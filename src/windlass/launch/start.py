"""Creates runs and binds their starts: the one place where a layout is chosen for workers.

A run is resolved once, at creation: the recipe with every default and a layout, written to config.json. Each start is
bound once, by one process: layout and step for the devices that are really there, written to
starts/<job>.<restart>.json."""

import contextlib
import importlib.metadata
import itertools
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.here import with_gpus
from windlass.config import LayoutConfig, Loaded, Recipe
from windlass.errors import ConfigError, WindlassError
from windlass.layout.resolve import complete_layout, job_size, resolve_step
from windlass.layout.rules import check_degrees, check_layout, check_step, violations
from windlass.models.presets import model_spec
from windlass.models.spec import ModelSpec
from windlass.planner import plan, write_plan
from windlass.planner.search import fill_recipe, on_devices
from windlass.runs.events import LayoutChanged, ProcessStart
from windlass.runs.folder import Run, create_run
from windlass.runs.starts import Start, last_start, write_start


def device_type() -> str:
    """The device type that workers on this machine will find: "cuda" (NVIDIA or AMD) or "cpu". Does not import
    torch."""
    hidden = any(os.environ.get(name) in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    if hidden or os.environ.get("WINDLASS_DEVICE") == "cpu":
        return "cpu"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "cpu"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() else "cpu"


def local_cluster(recipe: Recipe, devices_per_node: int) -> Cluster:
    """The recipe's cluster with as many devices per node as the start really uses."""
    cluster = load_cluster(recipe.cluster)
    with_local_gpus, _ = with_gpus(cluster)
    return on_devices(
        with_local_gpus if devices_per_node <= with_local_gpus.node.devices else cluster, devices_per_node
    )


def check_store(recipe: Recipe) -> None:
    """Refuse a missing or unsuitable token store before a run folder is made and torch is imported."""
    if recipe.data.store is not None:
        from windlass.data.stream import usable_store  # numpy: not for every start

        usable_store(recipe.data, recipe.model.vocab)


def resolve_recipe(loaded: Loaded, run: Run, cluster: Cluster, nodes: int) -> tuple[Loaded, str, str]:
    """The recipe with a layout, who chose it ("recipe" or "planner"), and the reason.

    A run that exists keeps the layout that the planner chose for it at creation.
    """
    if loaded.recipe.tune is not None:
        from windlass.data.complete_tune import complete_tune  # numpy: not for every start

        loaded = replace(loaded, recipe=complete_tune(loaded.recipe, nodes * cluster.node.devices))
    if loaded.recipe.layout is not None:
        size = job_size(loaded.recipe, nodes * cluster.node.devices, cluster.node.devices)
        model = model_spec(loaded.recipe.model)
        check_degrees(model, complete_layout(loaded.recipe.layout, size), size)
        check_step(loaded.recipe, model, tensor=loaded.recipe.layout.tensor)
        return loaded, "recipe", ""
    if run.layout_from() == "planner":
        before = run.recipe()
        train = loaded.recipe.train.model_copy(update={"recompute": before.train.recompute})
        recipe = loaded.recipe.model_copy(update={"layout": before.layout, "train": train})
        return replace(loaded, recipe=recipe), "planner", ""
    recipe, reason = fill_recipe(loaded.recipe, cluster, nodes=nodes)
    check_step(recipe, model_spec(recipe.model), tensor=1 if recipe.layout is None else recipe.layout.tensor)
    return replace(loaded, recipe=recipe), "planner", reason


def create_planned_run(folder: Path, loaded: Loaded, cluster: Cluster, nodes: int) -> tuple[Run, str]:
    """The run folder of a recipe, created or the existing one, and the reason for its layout; keeps the plan beside
    it."""
    loaded, layout_from, reason = resolve_recipe(loaded, Run(folder), cluster, nodes)
    run = create_run(folder, loaded, layout_from=layout_from)
    # What the planner expects is compared with measurements later; a recipe that it cannot price is trained all the
    # same.
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

    On another number of devices the layout keeps its tensor, pipeline, context and expert degrees, its sharding and its
    micro-batch; the data-parallel degree and accumulation follow. Where that is not valid, a layout of the planner is
    searched again and one of the recipe is refused with the nearest valid values. Global batch and data order never
    change."""
    recipe, device = run.recipe(), device or device_type()
    model, size = model_spec(recipe.model), job_size(recipe, devices, devices_per_node)
    layout = complete_layout(recipe.layout or LayoutConfig(), size)
    recompute: str = recipe.train.recompute
    if run.layout_from() != "planner":
        try:
            check_layout(model, layout, size, recipe.train.engine)
        except ConfigError as error:
            valid = " or ".join(map(str, valid_sizes(recipe, model, devices, devices_per_node)))
            hint = f"this layout is valid on {valid} devices" if valid else ""
            raise ConfigError(error.code, error.message, hint="; ".join(filter(None, (error.hint, hint)))) from None
    elif recipe.layout is None or violations(model, layout, size, recipe.train.engine):
        cluster = local_cluster(recipe, devices_per_node)
        best = plan(recipe.model_copy(update={"layout": None}), cluster, nodes=devices // devices_per_node).best
        layout, recompute, reason = best.layout, best.recompute, f"{best.candidate.describe()} ({best.reason})"
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
    # A layout that follows another number of devices is an event; one that the recipe changed was recorded with it.
    before = last_start(run)
    if before is not None:
        old_devices, old_per_node, old_layout = before.devices, before.devices_per_node, asdict(before.layout)
    else:  # a run folder of version 0.1 has only the events of its processes
        last = [ProcessStart(), *run.events(ProcessStart)][-1]
        old_devices, old_per_node, old_layout = last.world_size or devices, devices_per_node, last.layout or {}
    if (old_devices, old_per_node) != (devices, devices_per_node):
        change = f"{old_devices} -> {devices} devices"
        if old_devices == devices:
            change = f"{old_per_node} -> {devices_per_node} devices per node"
        run.record(LayoutChanged(old=old_layout, new=asdict(layout), reason=change))
    write_start(run, start)
    return start


def valid_sizes(recipe: Recipe, model: ModelSpec, devices: int, devices_per_node: int) -> list[int]:
    """The nearest smaller and the nearest larger number of devices for the recipe's layout, where there are such.

    On one node any number counts, on several nodes only full nodes; beyond four times the devices nobody looks.
    """

    def valid(count: int) -> bool:
        size = job_size(recipe, count, min(count, devices_per_node))
        layout = complete_layout(recipe.layout or LayoutConfig(), size)
        return not violations(model, layout, size, recipe.train.engine)

    step = devices_per_node if devices > devices_per_node else 1
    ranges = range(devices - step, 0, -step), range(devices + step, 4 * devices + 1, step)
    return [count for counts in ranges for count in itertools.islice(filter(valid, counts), 1)]
