"""A second opinion on memory: the engine's own step, at its true world size, on tensors that have shapes but no contents.

`windlass plan RECIPE --trace` parallelises the model as training would, on a process group that talks to nobody, and runs two steps
under fake tensors on a machine without GPUs. A tracker adds up every storage that lives. Layers are alike, so a few are traced and
the rest follows in a straight line. What lies outside the tensors (allocator rounding, communication buffers, the context) is not
in the number.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass import models
from windlass.clusters import Cluster, load_device
from windlass.clusters.scheduler import Place
from windlass.config import LayoutConfig, Recipe
from windlass.errors import PlanError
from windlass.train.geometry import Geometry, geometry_of
from windlass.train.mesh import World, axes_of, open_world
from windlass.train.optimizers.base import build_optimizer
from windlass.train.parallelize import Parts, parallelize
from windlass.train.predict import allocated
from windlass.train.step import Stepper
from windlass.train.trace_kernels import carry, compiled_blocks, device_kernels
from windlass.train.trace_tracker import Tracker

GIB = 2**30
MICRO_BATCHES = 3
"""Accumulation beyond this changes nothing: the third micro-batch finds what the second found."""


@dataclass(frozen=True)
class Trace:
    """Peak of the fullest rank that was traced."""

    name: str
    world_size: int
    layers: int
    traced_layers: tuple[int, ...]
    """Numbers of layers that were run; more than one: the peak was drawn on from them."""
    peak: float
    """Bytes of all tensors at once."""
    terms: dict[str, float]
    """Bytes by what they were made for, at the moment of the peak; sums to `peak`."""
    moment: str
    stage: int
    seconds: float
    """CPU seconds."""
    compiled: bool
    predicted: float | None = None
    """What the planner's arithmetic says of the same."""

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name, "world_size": self.world_size, "layers": self.layers, "traced_layers": list(self.traced_layers),
            "peak_gib": self.peak / GIB, "terms_gib": {k: v / GIB for k, v in self.terms.items()}, "moment": self.moment,
            "stage": self.stage, "compiled": self.compiled, "seconds": self.seconds,
            "predicted_gib": None if self.predicted is None else self.predicted / GIB, "difference_pct": self.difference,
        }  # fmt: skip

    @property
    def difference(self) -> float | None:
        """The planner's arithmetic against the trace, in percent."""
        return None if self.predicted is None else 100 * (self.predicted - self.peak) / self.peak

    def text(self) -> str:
        how = f"{self.layers} layers" + (
            f", drawn on from {' and '.join(map(str, self.traced_layers))}"
            if self.layers not in self.traced_layers
            else ""
        )
        lines = [
            f"{self.name}: {self.peak / GIB:.2f} GiB per rank at the peak ({self.moment}), {self.world_size:,} ranks, {how}"
        ]
        lines += [f"  {name:<24} {size / GIB:8.2f} GiB" for name, size in self.terms.items()]
        if self.predicted is not None:
            lines.append(f"the planner's arithmetic: {self.predicted / GIB:.2f} GiB ({self.difference:+.1f} %)")
        code = "stand-ins for compiled blocks" if self.compiled else "uncompiled blocks"
        lines.append(
            f"{code} on fake tensors, {self.seconds:.0f} s of CPU; without allocator slack, context and communication buffers"
        )
        return "\n".join(lines)


def trace(
    recipe: Recipe, cluster: Cluster, nodes: int | None = None, *, layers: tuple[int, ...] | None = None
) -> Trace:
    """Run the step of `recipe` on `nodes` of `cluster` without any of them. `layers`: how many to run; None: two numbers, drawn on."""
    _check(recipe)
    began = time.process_time()
    recipe = _as_on_device(recipe, cluster)
    size = (recipe.nodes if nodes is None else nodes) * cluster.node.devices
    stages = recipe.layout.pipeline * _chunks(recipe.layout)
    wanted = layers or _few(recipe.model.layers, stages)
    best: list[_Run] | None = None
    elsewhere = 0.0
    for stage in (0,) if recipe.layout.pipeline == 1 else (0, recipe.layout.pipeline - 1):
        runs = _stage_runs(recipe, cluster, size, stage, wanted)
        if best is None or _line(runs, wanted, recipe.model.layers)[0] > _line(best, wanted, recipe.model.layers)[0]:
            best = runs
        elsewhere += sum(run.seconds for run in runs if run.apart)
    assert best is not None
    peak, terms, moment = _line(best, wanted, recipe.model.layers)
    return Trace(
        name=recipe.name, world_size=size, layers=recipe.model.layers, traced_layers=wanted, peak=peak, terms=terms,
        moment=moment, stage=best[-1].stage, seconds=time.process_time() - began + elsewhere, compiled=bool(recipe.train.compile),
        predicted=_predicted(recipe, cluster, size),
    )  # fmt: skip


def _check(recipe: Recipe) -> None:
    if recipe.layout is None:
        raise PlanError(
            "train.trace-needs-layout",
            "a trace needs a layout",
            hint="give [layout], or call windlass.planner.fill_recipe first",
        )
    if recipe.train.engine != "native":
        raise PlanError(
            "train.trace-runs-windlass-s",
            f"--trace runs windlass's own step, not train.engine = {recipe.train.engine!r}",
            hint="trace with train.engine=native; the plan without --trace counts DeepSpeed's buffers",
        )
    if recipe.model.family == "hf":
        raise PlanError(
            "train.trace-does-know-blocks",
            "--trace does not know the blocks of a Hugging Face model",
            hint="describe it as family llama or retnet; the plan without --trace reads its config.json",
        )
    if recipe.layout.offload != "none":
        raise PlanError(
            "train.trace-counts-one-device",
            f"--trace counts one device's memory and cannot tell it from the host's (layout.offload = {recipe.layout.offload!r})",
            hint='trace with layout.offload=none and take its "optimizer states" off (parameters: also its "weights")',
        )
    if recipe.train.recompute == "budget":
        raise PlanError(
            "train.trace-cannot-follow-train",
            '--trace cannot follow train.recompute = "budget": torch\'s compiler decides what to keep, and it does not run here',
            hint="trace train.recompute=none and train.recompute=full: a budget lies between them, and the plan's arithmetic says where",
        )
    if dist.is_available() and dist.is_initialized():
        raise PlanError(
            "train.trace-makes-process-group",
            "--trace makes a process group of its own, and one is there already",
            hint="run it apart",
        )


def _as_on_device(recipe: Recipe, cluster: Cluster) -> Recipe:
    """What the engine would choose by itself on the cluster's devices."""
    gpu = load_device(cluster.device).vendor != "cpu"
    train = recipe.train
    fuse = train.fuse if train.fuse is not None else gpu and train.precision == "fp8"
    compile_ = train.compile if train.compile is not None else gpu
    return recipe.model_copy(update={"train": train.model_copy(update={"fuse": fuse, "compile": compile_})})


def _chunks(layout: LayoutConfig) -> int:
    return {"interleaved": layout.pipeline_chunks, "zbv": 2}.get(layout.schedule, 1) if layout.pipeline > 1 else 1


def _few(layers: int, stages: int) -> tuple[int, ...]:
    few = (2 * stages, 4 * stages) if stages == 1 else (stages, 2 * stages)
    return (layers,) if layers <= few[1] else few


def _with_layers(recipe: Recipe, layers: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": layers})})


def _line(runs: list[_Run], traced: tuple[int, ...], layers: int) -> tuple[float, dict[str, float], str]:
    """Peak, terms and moment at `layers`. Each phase of a step has a peak of its own that grows in a straight line; the highest of them
    need not be the one that is highest with few layers."""
    found = []
    for phase in dict.fromkeys(p for run in runs for p in run.phases):
        at = [run.phases.get(phase, {}) for run in runs]
        if len(runs) == 1:
            terms = {k: float(v) for k, v in at[0].items() if v}
        else:
            (low, high), (few, more) = at[-2:], traced[-2:]
            step = (layers - few) / (more - few)
            names = dict.fromkeys([*low, *high])
            drawn = {n: low.get(n, 0) + (high.get(n, 0) - low.get(n, 0)) * step for n in names}
            terms = {n: v for n, v in drawn.items() if v > 0}
        found.append((sum(terms.values()), terms, phase))
    return max(found, key=lambda f: f[0])


# -- one run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    phases: dict[str, dict[str, int]]
    """Terms at the highest moment of each phase."""
    stage: int
    seconds: float
    apart: bool = False
    """Run in a process of its own."""


def _stage_runs(recipe: Recipe, cluster: Cluster, size: int, stage: int, wanted: tuple[int, ...]) -> list[_Run]:
    """Torch remembers groups by name, and two ranks of a pipeline name theirs differently: each run gets a process of its own."""
    if recipe.layout.pipeline == 1:
        return [_run(_with_layers(recipe, n), cluster, size, stage) for n in wanted]
    runs = []
    for n in wanted:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            run = pool.submit(_run, _with_layers(recipe, n), cluster, size, stage).result()
        runs.append(replace(run, apart=True))
    return runs


def _run(recipe: Recipe, cluster: Cluster, size: int, stage: int) -> _Run:
    began = time.process_time()
    per_node = min(size, cluster.node.devices)
    axes = axes_of(recipe.layout, size, per_node)
    rank = stage * (size // axes.pipeline)
    with (
        _no_peers(rank, size),
        device_kernels(),
        compiled_blocks(recipe),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        place = Place(
            rank, size, rank % per_node, per_node, rank // per_node, max(1, size // per_node), None, None, "single"
        )
        world = open_world(recipe.layout, place)
        geometry = geometry_of(recipe, world.axes.data)
        most = max(MICRO_BATCHES, 2 * axes.pipeline)
        geometry = replace(
            geometry, batch=min(geometry.micro_batches, most) * geometry.micro_batch * geometry.data_ranks
        )
        with torch.device("meta"):
            model = models.build(recipe.model, seq_len=recipe.data.seq_len)
        changes = _static_stages(recipe, world)
        plain = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
        parts = parallelize(model, plain, replace(world, device=torch.device("meta")))
        carry(parts, recipe)
        with changes:
            tracker = _steps(recipe, parts, world, geometry)
    return _Run({name: terms for name, (_, terms) in tracker.phases.items()}, stage, time.process_time() - began)


def _steps(recipe: Recipe, parts: Parts, world: World, geometry: Geometry) -> Tracker:
    """Two steps, because the first finds no gradients yet; the update itself is one fused kernel on a device and holds nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in parts.modules:
            module.to_empty(device="cpu")
            module.prepare("cpu")
        optimizer = build_optimizer(parts.named_parameters(), recipe.optim, master=parts.shadow)
        stepper = Stepper(parts, optimizer, recipe, world, geometry)
        tokens = torch.zeros((geometry.per_rank, geometry.seq_len + 1), dtype=torch.long)
        documents = torch.zeros_like(tokens) if recipe.data.mask_documents else None
        tracker = Tracker()
        stepper.beat = tracker.enter_phase
        for slot in optimizer.slots:
            tracker.watch("weights", slot.parameter)
            tracker.watch("master weights", slot.master)
            tracker.watch("optimizer states", *slot.moments.values())
            tracker.watch("gradients", slot.main_grad)
        if parts.tie is not None:  # the last stage's copy of a tied matrix is no optimizer's
            tracker.watch("weights", parts.tie.copy)
        tracker.watch("inputs", tokens, documents)
        _tell_phases(parts, tracker)
        with tracker:
            for _ in range(2):
                tracker.enter_phase("forward")
                stepper.gradients(tokens, documents)
                tracker.relabel("gradients", *(g for g in optimizer.gradients()))
                tracker.enter_phase("optimizer")
                stepper._reduce()
                optimizer.zero_grad()
    return tracker


def _tell_phases(parts: Parts, tracker: Tracker) -> None:
    """A pipeline's schedule does not say what it does next, and the embedding's gradient, the largest, comes last."""
    for module in parts.modules:
        if parts.num_stages > 1:
            module.register_forward_pre_hook(lambda *_: tracker.enter_phase("forward"))
            module.register_forward_hook(lambda m, i, out: _when_reached(out, tracker, "backward"))
        if module.embed is not None:
            module.embed.register_forward_hook(lambda m, i, out: _when_reached(out, tracker, "embedding's backward"))


def _when_reached(out: Tensor, tracker: Tracker, phase: str) -> None:
    if out.requires_grad:
        out.register_hook(lambda grad: tracker.enter_phase(phase))


@contextlib.contextmanager
def _no_peers(rank: int, size: int) -> Iterator[None]:
    """A process group of `size` in which this process is `rank` and messages go nowhere."""
    with mock.patch.dict(os.environ, {"WINDLASS_DEVICE": "cpu"}):
        if size == 1:
            yield
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _static_stages(recipe: Recipe, world: World) -> contextlib.ExitStack:
    """Pipeline stages that are told their shapes: neighbours who would tell them do not exist."""
    import torch.distributed.pipelining as pipelining
    from torch.distributed.pipelining import schedules

    stack = contextlib.ExitStack()
    if world.axes.pipeline == 1:
        return stack
    rows, time_ = recipe.layout.micro_batch, recipe.data.seq_len // world.axes.context
    real = pipelining.PipelineStage

    def between() -> Tensor:
        dtype = torch.float32 if recipe.train.precision == "fp32" else torch.bfloat16
        return torch.empty(rows, time_ // world.axes.tensor, recipe.model.width, dtype=dtype, requires_grad=True)

    def make(module: Any, number: int, total: int, device: torch.device, group: Any) -> Any:
        first = torch.zeros(rows, time_, dtype=torch.long) if number == 0 else between()
        last = torch.zeros(2, requires_grad=True) if number == total - 1 else between()
        return real(module, number, total, device, input_args=(first,), output_args=(last,), group=group)

    def agreed(schedule: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    stack.enter_context(mock.patch.object(pipelining, "PipelineStage", make))
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):  # torch 2.12 and later ask the neighbours
        stack.enter_context(mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed))
    return stack


def _predicted(recipe: Recipe, cluster: Cluster, size: int) -> float:
    """What the planner's arithmetic says of the same step."""
    axes = axes_of(recipe.layout, size, min(size, cluster.node.devices))
    fused = bool(recipe.train.fuse) and recipe.layout.tensor == 1
    geometry = geometry_of(recipe, axes.data)
    return allocated(recipe, axes, geometry, cluster.node.devices, compiled=bool(recipe.train.compile), fused=fused)
