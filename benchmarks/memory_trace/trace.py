"""Peak memory of the engine's own step at its true world size, on tensors that have shapes but no contents.

The trace parallelizes the model as training does, on a process group without peers, and runs two steps under fake tensors on a machine
without GPUs. A tracker adds up every live storage. Layers are alike, so a few are traced and the rest is extrapolated linearly.
Not in the number: allocator rounding, communication buffers, the device context.
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
from benchmarks.memory_trace.kernels import carry, compiled_blocks, device_kernels
from benchmarks.memory_trace.tracker import Tracker
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass.clusters import Cluster, load_device
from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.cost.memory import memory
from windlass.errors import PlanError
from windlass.layout.resolve import complete_layout, job_size, resolve_step
from windlass.layout.types import Layout, StepSpec
from windlass.models.build import build_model
from windlass.models.presets import model_spec
from windlass.train.batches import TokenBatch, batch_plan
from windlass.train.mesh import World, open_world
from windlass.train.optimizers.base import build_optimizer
from windlass.train.parallelize import ModelParts, parallelize
from windlass.train.step import Stepper

GIB = 2**30
TRACED_BLOCKS = {"attention", "mlp", "retention"}
"""Blocks whose compiled code `kernels.py` models."""
MICRO_BATCHES = 3
"""Further micro-batches change nothing: the third one allocates what the second did."""


@dataclass(frozen=True)
class Trace:
    """Peak of the fullest rank that was traced."""

    name: str
    world_size: int
    layers: int
    traced_layers: tuple[int, ...]
    """Numbers of layers that were run; more than one: the peak is extrapolated from them."""
    peak: float
    """Bytes of all tensors at once."""
    terms: dict[str, float]
    """Bytes by purpose at the moment of the peak; they sum to `peak`."""
    moment: str
    stage: int
    seconds: float
    """CPU seconds."""
    compiled: bool
    predicted: float | None = None
    """The planner's prediction of the same."""

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name, "world_size": self.world_size, "layers": self.layers, "traced_layers": list(self.traced_layers),
            "peak_gib": self.peak / GIB, "terms_gib": {k: v / GIB for k, v in self.terms.items()}, "moment": self.moment,
            "stage": self.stage, "compiled": self.compiled, "seconds": self.seconds,
            "predicted_gib": None if self.predicted is None else self.predicted / GIB, "difference_pct": self.difference,
        }  # fmt: skip

    @property
    def difference(self) -> float | None:
        """Difference of the planner's prediction from the trace in per cent."""
        return None if self.predicted is None else 100 * (self.predicted - self.peak) / self.peak

    def text(self) -> str:
        how = f"{self.layers} layers" + (
            f", extrapolated from {' and '.join(map(str, self.traced_layers))}"
            if self.layers not in self.traced_layers
            else ""
        )
        lines = [
            f"{self.name}: {self.peak / GIB:.2f} GiB per rank at the peak ({self.moment}), {self.world_size:,} ranks, {how}"
        ]
        lines += [f"  {name:<24} {size / GIB:8.2f} GiB" for name, size in self.terms.items()]
        if self.predicted is not None:
            lines.append(f"predicted by the planner: {self.predicted / GIB:.2f} GiB ({self.difference:+.1f} %)")
        code = "models of compiled blocks" if self.compiled else "uncompiled blocks"
        lines.append(
            f"{code} on fake tensors, {self.seconds:.0f} s of CPU; without allocator slack, context and communication buffers"
        )
        return "\n".join(lines)


def trace(
    recipe: Recipe, cluster: Cluster, nodes: int | None = None, *, layers: tuple[int, ...] | None = None
) -> Trace:
    """Trace the step of `recipe` on `nodes` of `cluster`. `layers`: how many to run; None: two numbers, extrapolated."""
    _check(recipe)
    began = time.process_time()
    size = (recipe.nodes if nodes is None else nodes) * cluster.node.devices
    layout, step = _layout(recipe, cluster, size), _step(recipe, cluster, size)
    wanted = layers or _few(recipe.model.layers, layout.num_stages)
    best: list[_Run] | None = None
    elsewhere = 0.0
    for stage in (0,) if layout.pipeline == 1 else (0, layout.pipeline - 1):
        runs = _stage_runs(recipe, cluster, size, stage, wanted)
        if best is None or _line(runs, wanted, recipe.model.layers)[0] > _line(best, wanted, recipe.model.layers)[0]:
            best = runs
        elsewhere += sum(run.seconds for run in runs if run.apart)
    assert best is not None
    peak, terms, moment = _line(best, wanted, recipe.model.layers)
    return Trace(
        name=recipe.name, world_size=size, layers=recipe.model.layers, traced_layers=wanted, peak=peak, terms=terms,
        moment=moment, stage=best[-1].stage, seconds=time.process_time() - began + elsewhere, compiled=step.compile,
        predicted=memory(model_spec(recipe.model), step, layout).allocated,
    )  # fmt: skip


def _check(recipe: Recipe) -> None:
    if recipe.layout is None:
        raise PlanError("trace.layout-missing", "a trace needs a layout", hint="add [layout] to the recipe")
    if recipe.train.engine != "native":
        raise PlanError(
            "trace.engine-unsupported",
            f"a trace runs windlass's own step, not train.engine = {recipe.train.engine!r}",
            hint="trace with train.engine=native; windlass plan counts DeepSpeed's buffers",
        )
    if recipe.model.family == "hf":
        raise PlanError(
            "trace.model-unsupported",
            "a trace does not support Hugging Face models",
            hint="describe the model as family llama or retnet; windlass plan reads its config.json",
        )
    layers = [group.layer for group in model_spec(recipe.model).groups]
    kinds = {branch.block.kind for layer in layers for branch in layer.branches}
    if others := kinds - TRACED_BLOCKS:
        raise PlanError(
            "trace.block-unsupported",
            f"a trace has no model of what the compiled code of these blocks keeps: {', '.join(sorted(others))}",
            hint=f"it traces {', '.join(sorted(TRACED_BLOCKS))}; windlass plan counts the others",
        )
    if recipe.layout.offload != "none":
        raise PlanError(
            "trace.offload-unsupported",
            f"a trace cannot tell device memory from host memory (layout.offload = {recipe.layout.offload!r})",
            hint='trace with layout.offload=none and subtract "optimizer states" (parameters: also "weights")',
        )
    if recipe.train.recompute == "budget":
        raise PlanError(
            "trace.recompute-unsupported",
            'a trace cannot follow train.recompute = "budget": the compiler decides what to keep, and it does not run here',
            hint="trace train.recompute=none and train.recompute=full: a budget lies between them",
        )
    if dist.is_available() and dist.is_initialized():
        raise PlanError(
            "trace.process-group-exists", "a trace needs a process without a process group", hint="run it separately"
        )


def _layout(recipe: Recipe, cluster: Cluster, size: int) -> Layout:
    return complete_layout(recipe.layout, job_size(recipe, size, min(size, cluster.node.devices)))


def _step(recipe: Recipe, cluster: Cluster, size: int) -> StepSpec:
    """The step as it is computed on the cluster's devices."""
    gpu = load_device(cluster.device).vendor != "cpu"
    return resolve_step(recipe, model_spec(recipe.model), _layout(recipe, cluster, size), gpu=gpu)


def _few(layers: int, stages: int) -> tuple[int, ...]:
    few = (2 * stages, 4 * stages) if stages == 1 else (stages, 2 * stages)
    return (layers,) if layers <= few[1] else few


def _with_layers(recipe: Recipe, layers: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": layers})})


def _line(runs: list[_Run], traced: tuple[int, ...], layers: int) -> tuple[float, dict[str, float], str]:
    """Peak, terms and moment at `layers`. Each phase of a step has its own peak, which grows linearly with the layers; the phase with
    the highest peak may differ from the one with few layers."""
    peaks = []
    for phase in dict.fromkeys(p for run in runs for p in run.phases):
        at = [run.phases.get(phase, {}) for run in runs]
        if len(runs) == 1:
            terms = {k: float(v) for k, v in at[0].items() if v}
        else:
            (low, high), (few, more) = at[-2:], traced[-2:]
            step = (layers - few) / (more - few)
            names = dict.fromkeys([*low, *high])
            extrapolated = {n: low.get(n, 0) + (high.get(n, 0) - low.get(n, 0)) * step for n in names}
            terms = {n: v for n, v in extrapolated.items() if v > 0}
        peaks.append((sum(terms.values()), terms, phase))
    return max(peaks, key=lambda p: p[0])


# -- one run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    phases: dict[str, dict[str, int]]
    """Terms at the highest moment of each phase."""
    stage: int
    seconds: float
    apart: bool = False
    """Run in a separate process."""


def _stage_runs(recipe: Recipe, cluster: Cluster, size: int, stage: int, wanted: tuple[int, ...]) -> list[_Run]:
    """One run per number of layers; pipeline stages in a new process each, because torch caches process groups by name."""
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
    layout, step = _layout(recipe, cluster, size), _step(recipe, cluster, size)
    layout = replace(layout, accumulation=min(layout.accumulation, max(MICRO_BATCHES, 2 * layout.pipeline)))
    rank = stage * (size // layout.pipeline)
    with (
        _no_peers(rank, size),
        device_kernels(),
        compiled_blocks(recipe, step),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        nodes = max(1, size // per_node)
        place = Place(rank, size, rank % per_node, per_node, rank // per_node, nodes, None, None, "single")
        world = open_world(layout, place, "cpu")
        with torch.device("meta"):
            model = build_model(recipe.model, seq_len=recipe.data.seq_len)
        changes = _static_stages(recipe, world)
        # The compiler does not run under fake tensors: `compiled_blocks` stands in for it.
        on_meta = replace(world, device=torch.device("meta"))
        parts = parallelize(model, recipe, replace(step, compile=False), on_meta)
        carry(parts, step)
        with changes:
            tracker = _steps(recipe, step, parts, world)
    return _Run({name: terms for name, (_, terms) in tracker.phases.items()}, stage, time.process_time() - began)


def _steps(recipe: Recipe, step: StepSpec, parts: ModelParts, world: World) -> Tracker:
    """Two steps, because the first starts without gradients; the update is one fused kernel on a device and allocates nothing."""
    plan = batch_plan(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 2})}), world.layout)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in parts.modules:
            module.to_empty(device="cpu")
            module.prepare("cpu")
        optimizer = build_optimizer(parts.named_parameters(), recipe.optim, master=parts.master_copy)
        stepper = Stepper(parts, optimizer, recipe, step, world, plan)
        tokens = torch.zeros((plan.sequences_per_rank, plan.seq_len + 1), dtype=torch.long)
        documents = torch.zeros_like(tokens) if step.mask_documents else None
        tracker = Tracker()
        stepper.beat = tracker.enter_phase
        for slot in optimizer.slots:
            tracker.watch("weights", slot.parameter)
            tracker.watch("master weights", slot.master)
            tracker.watch("optimizer states", *slot.moments.values())
            tracker.watch("gradients", slot.main_grad)
        if parts.tie is not None:  # the last stage's copy of a tied matrix is not in the optimizer
            tracker.watch("weights", parts.tie.copy)
        tracker.watch("inputs", tokens, documents)
        _mark_phases(parts, tracker)
        with tracker:
            for _ in range(2):
                tracker.enter_phase("forward")
                stepper.gradients(TokenBatch(tokens, documents))
                tracker.relabel("gradients", *(g for g in optimizer.gradients()))
                tracker.enter_phase("optimizer")
                stepper._reduce()
                optimizer.zero_grad()
    return tracker


def _mark_phases(parts: ModelParts, tracker: Tracker) -> None:
    """Hooks that tell the tracker the phase: a pipeline schedule does not, and the embedding's gradient (the largest) comes last."""
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
    """A fake process group of `size` in which this process is `rank`."""
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
    """Pipeline stages with static shapes: there are no neighbours to exchange them with."""
    import torch.distributed.pipelining as pipelining
    from torch.distributed.pipelining import schedules

    stack = contextlib.ExitStack()
    if world.layout.pipeline == 1:
        return stack
    rows, time_ = recipe.layout.micro_batch, recipe.data.seq_len // world.layout.context
    real = pipelining.PipelineStage

    def between() -> Tensor:
        dtype = torch.float32 if recipe.train.precision == "fp32" else torch.bfloat16
        return torch.empty(rows, time_ // world.layout.tensor, recipe.model.width, dtype=dtype, requires_grad=True)

    class StaticStage(real):
        def __init__(self, module: Any, number: int, total: int, device: torch.device, group: Any) -> None:
            first = torch.zeros(rows, time_, dtype=torch.long) if number == 0 else between()
            last = torch.zeros(2, requires_grad=True) if number == total - 1 else between()
            super().__init__(module, number, total, device, input_args=(first,), output_args=(last,), group=group)

    def static_shapes(schedule: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    stack.enter_context(mock.patch.object(pipelining, "PipelineStage", StaticStage))
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):  # torch 2.12 and later ask the neighbours
        stack.enter_context(mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", static_shapes))
    return stack
