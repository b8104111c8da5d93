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
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from windlass import models
from windlass.clusters import Cluster, load_device
from windlass.clusters.scheduler import Place
from windlass.config import LayoutConfig, Recipe
from windlass.errors import PlanError
from windlass.train.geometry import Geometry, geometry_of
from windlass.train.mesh import World, axes_of, open_world
from windlass.train.optimizers import build_optimizer, local
from windlass.train.parallelize import Parts, parallelize
from windlass.train.step import Stepper

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
        raise PlanError("a trace needs a layout", hint="give [layout], or call windlass.plan.fill_recipe first")
    if recipe.train.engine != "native":
        raise PlanError(
            f"--trace runs windlass's own step, not train.engine = {recipe.train.engine!r}",
            hint="trace with train.engine=native; the plan without --trace counts DeepSpeed's buffers",
        )
    if recipe.model.family == "hf":
        raise PlanError(
            "--trace does not know the blocks of a Hugging Face model",
            hint="describe it as family llama or retnet; the plan without --trace reads its config.json",
        )
    if recipe.layout.offload != "none":
        raise PlanError(
            f"--trace counts one device's memory and cannot tell it from the host's (layout.offload = {recipe.layout.offload!r})",
            hint='trace with layout.offload=none and take its "optimizer states" off (parameters: also its "weights")',
        )
    if recipe.train.recompute == "budget":
        raise PlanError(
            '--trace cannot follow train.recompute = "budget": torch\'s compiler decides what to keep, and it does not run here',
            hint="trace train.recompute=none and train.recompute=full: a budget lies between them, and the plan's arithmetic says where",
        )
    if dist.is_available() and dist.is_initialized():
        raise PlanError("--trace makes a process group of its own, and one is there already", hint="run it apart")


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
        _device_kernels(),
        _compiled_blocks(recipe),
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
        _carry(parts, recipe)
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


# -- what kernels of a device leave behind, where a CPU's would leave more ---------------------------------------------------


@contextlib.contextmanager
def _device_kernels() -> Iterator[None]:
    """Loss, attention and FP8 products as their GPU kernels hold memory: outputs only, no wide copies on the way."""
    import windlass.models.attention as attention
    import windlass.models.llama as llama
    import windlass.models.loss as loss
    import windlass.train.float8 as float8
    import windlass.train.losses as losses

    changes: list[tuple[Any, str, Any]] = [
        (loss, "_terms", lambda device: _loss_kernel), (loss, "add_outer", _add_outer), (losses, "add_outer", _add_outer),
        (llama, "causal_attention", fused_attention), (attention, "causal_attention", fused_attention),
        (float8, "choose_backend", lambda wish, device: ("torch", "traced")), (float8, "scaled_product", _scaled_product),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, new in changes:
            if hasattr(where, name):  # a name that a module does not import needs no stand-in there
                stack.enter_context(mock.patch.object(where, name, new))
        yield


def _loss_kernel(logits: Tensor, targets: Tensor, vocab: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    total = logits.new_zeros((), dtype=torch.float32)
    return total, total, torch.empty_like(logits)


def _add_outer(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """bf16: one product with an fp32 result, which is a new tensor also when it is added to a sum."""
    return left.new_empty((left.shape[1], right.shape[1]), dtype=torch.float32)


def _scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


@torch.library.custom_op("windlass_trace::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention_keeps(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Queries, keys, values, output and one number per row, as flash and cuDNN kernels do."""
    ctx.save_for_backward(*inputs, *output)


def _attention_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


_attention.register_autograd(_attention_back, setup_context=_attention_keeps)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    out: Tensor = _attention(q, k, v)[0]
    return out


# -- compiled blocks ----------------------------------------------------------------------------------------------------------


class Fused(torch.autograd.Function):
    """An element-wise region as the compiler leaves it: its inputs are kept, its inner values are not. `like`: which input the output
    resembles, or its last dimension and type."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return (
            None,
            *(torch.empty_like(t) if need else None for t, need in zip(kept, ctx.needs_input_grad[1:], strict=True)),
        )


class Turned(torch.autograd.Function):
    """Rotation: linear, so nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def _fused_norm(self: Any, x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        return DTensor.from_local(
            _norm_kernel(x.to_local(), self.weight.to_local()), x.device_mesh, x.placements, run_check=False
        )
    return _norm_kernel(x, self.weight)


def _norm_kernel(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = Fused.apply(x.detach(), x, weight)
    return out


def _fused_feed_forward(self: Any, x: Tensor) -> Tensor:
    from windlass.models.linear import together

    if self.w3 is None:
        hidden = self.w1(x)
        return self.w2(Fused.apply(hidden.detach(), hidden))
    gate, up = together(x, (self.w1, self.w3)) if self.fused else (self.w1(x), self.w3(x))
    return self.w2(Fused.apply(up.detach(), gate, up))


class Narrow(torch.autograd.Function):
    """An FP8 product in compiled code: its input is cast again in the backward pass from what others keep; of weights laid side by side
    the cast ones stay, of a parameter nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        kept = (
            weight if weight.grad_fn is None and weight.is_leaf else torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        )
        ctx.save_for_backward(kept)
        ctx.shapes = x.shape, weight.shape, x.dtype
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, dtype = ctx.shapes
        return grads[0].new_empty(x, dtype=dtype), grads[0].new_empty(weight, dtype=dtype)


def _narrow_product(x: Tensor, weight: Tensor, *, rows: bool = False) -> Tensor:
    out: Tensor = Narrow.apply(x, weight)
    return out


def _fused_rotation(x: Tensor, *_: Tensor) -> Tensor:
    out: Tensor = Turned.apply(x)
    return out


def _fused_head_norm(self: Any, out: Tensor) -> Tensor:
    """Worked out again from its input, which takes as much: one of the two stays."""
    return out


def _fused_parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """The decay is worked out where it is used, and linear: only decayed scores stay."""
    q, k, v = (part.contiguous() for part in (q, k, v))  # one copy in the layout that batched products read
    scores: Tensor = Turned.apply(q @ k.transpose(-1, -2))
    return scores @ v


def _fused_chunkwise(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, chunk: int) -> Tensor:
    """Decays are factors inside kernels: queries, keys, values, scores inside chunks and the states between them stay."""
    time = q.shape[-2]
    if time <= chunk:
        return _fused_parallel(q, k, v, gamma)
    if time % chunk:
        q, k, v = (torch.nn.functional.pad(part, (0, 0, 0, chunk - time % chunk)) for part in (q, k, v))
    q, k, v = (part.contiguous().unflatten(-2, (-1, chunk)) for part in (q, k, v))
    states = Turned.apply(k.transpose(-1, -2) @ v)
    return (_fused_parallel(q, k, v, gamma) + q @ states).flatten(-3, -2)[..., :time, :]


class _Silent:
    """torch.nn.functional for retention: the gate's activation is part of the product that follows."""

    pad = staticmethod(torch.nn.functional.pad)

    @staticmethod
    def silu(gate: Tensor) -> Tensor:
        return gate


def _products(recipe: Recipe) -> int:
    """Matrix products of a block: projections in, out, and the feed-forward part's."""
    if recipe.train.fuse and recipe.layout.tensor == 1:
        return 4
    return (5 if recipe.model.family == "retnet" else 4) + (3 if recipe.model.activation == "swiglu" else 2)


def _fused_selective(products: int) -> Any:
    """The engine's policy, less the block's last product: compiled code drops what nobody reads."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    from windlass.models.recompute import SAVED

    aten, seen = torch.ops.aten, {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in SAVED or op is torch.ops.windlass_trace.attention.default
        if op in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default):
            seen[context.is_recompute] += 1
            count = seen[context.is_recompute]
            saved = bool(count % 2) and count < products
        elif op is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            saved = seen[context.is_recompute] < products
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def _compiled_blocks(recipe: Recipe) -> Iterator[None]:
    """The compiler does not run under fake tensors, so what it leaves alive is put in the blocks' place: element-wise regions fused."""
    if not recipe.train.compile:
        yield
        return
    import windlass.models.llama as llama
    import windlass.models.parts as parts
    import windlass.models.recompute as recompute
    import windlass.models.retnet as retnet
    import windlass.train.float8 as float8

    changes: list[tuple[Any, str, Any]] = [
        (float8, "local_product", _narrow_product), (parts.Norm, "forward", _fused_norm), (llama.FeedForward, "forward", _fused_feed_forward), (llama, "rotate", _fused_rotation),
        (retnet, "rotate_every_two", _fused_rotation), (retnet.Retention, "_norm", _fused_head_norm), (recompute, "selective", partial(_fused_selective, _products(recipe))),
        (retnet, "retain_parallel", _fused_parallel), (retnet, "retain_chunkwise", _fused_chunkwise), (retnet, "F", _Silent),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(mock.patch.object(where, name, new))
        yield


def _carry(parts: Parts, recipe: Recipe) -> None:
    """As `parallelize` sets it for compiled blocks."""
    for module in parts.modules:
        for block in module.layers.values():
            block.carries = bool(recipe.train.compile) and recipe.train.recompute == "none"


# -- the tracker ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    size: int
    label: str


class Tracker(TorchDispatchMode):
    """Adds up the storages that live, by label, and remembers the highest sum. A storage is counted once, when an operator first
    returns it, until it is collected; FSDP frees and fills by resizing, which is followed too."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, int] = {}
        self.total = self.peak = 0
        self.phase = "forward"
        self.phases: dict[str, tuple[int, dict[str, int]]] = {}
        """Highest sum of each phase, and its labels."""
        self._held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()

    def enter_phase(self, phase: str) -> None:
        self.phase = phase

    def watch(self, label: str, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._take(tensor, label)

    def relabel(self, label: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            held = self._held.get(local(tensor).untyped_storage())
            if held is not None:
                self._add(held.label, -held.size)
                held.label = label
                self._add(label, held.size)

    def _take(self, tensor: Tensor, label: str) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage in self._held:
            return
        held = _Held(storage.nbytes(), label)
        self._held[storage] = held
        self._add(label, held.size)
        weakref.finalize(storage, self._drop, held)

    def _drop(self, held: _Held) -> None:
        self._add(held.label, -held.size)
        held.size = 0

    def _add(self, label: str, size: int) -> None:
        self.now[label] = self.now.get(label, 0) + size
        self.total += size
        self.peak = max(self.peak, self.total)
        if self.total > self.phases.get(self.phase, (0,))[0]:
            self.phases[self.phase] = self.total, dict(self.now)

    def _resized(self, storage: Any, size: int) -> None:
        held = self._held.get(storage)
        if held is not None:
            self._add(held.label, size - held.size)
            held.size = size

    def __enter__(self) -> Tracker:
        self._mode = active_fake_mode()
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            out = original(storage, size)
            self._resized(storage, size)
            return out

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._patch.stop()
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # DTensor first turns into operations on its local parts
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:  # not what DTensor tries out to find its placements
            label = "activations" if self.phase == "forward" else "gradients on their way"
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor):
                    self._take(tensor, label)
        return out


# -- the planner's side -----------------------------------------------------------------------------------------------------


def _predicted(recipe: Recipe, cluster: Cluster, size: int) -> float | None:
    from windlass.cost.memory import memory
    from windlass.cost.shapes import shape_of
    from windlass.cost.work import Degrees, Work

    layout, train = recipe.layout, recipe.train
    axes = axes_of(layout, size, min(size, cluster.node.devices))
    geometry = geometry_of(recipe, axes.data)
    logits = layout.micro_batch * recipe.data.seq_len / layout.context * models.padded_vocab(recipe.model.vocab) * 4
    loss = train.loss if train.loss != "auto" else "plain" if logits <= 64 * 2**20 else "chunked"
    work = Work(
        seq_len=recipe.data.seq_len, micro_batch=layout.micro_batch, accumulation=geometry.micro_batches, recompute=train.recompute,
        precision=train.precision, compile=bool(train.compile), flash=train.attention != "math", kernel=train.attention, loss=loss,
        loss_chunk=train.loss_chunk, optimizer=recipe.optim.name, moments=recipe.optim.moments, native=True, fuse=bool(train.fuse) and layout.tensor == 1,
    )  # fmt: skip
    sync = layout.sync if layout.sync != "auto" else "last" if layout.shard in ("none", "zero1") else "every"
    degrees = Degrees(
        sync=sync, data=axes.data, shard=layout.shard, shard_size=axes.shard if layout.shard == "hybrid" else None, tensor=layout.tensor,
        pipeline=layout.pipeline, context=layout.context, schedule=layout.schedule, chunks=_chunks(layout) if layout.schedule == "interleaved" else 1,
    )  # fmt: skip
    return memory(shape_of(recipe.model), work, degrees, cluster.node.devices).allocated
