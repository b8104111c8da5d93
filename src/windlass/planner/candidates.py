"""Layouts worth estimating for a model, a batch and a machine."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from windlass.config import LayoutConfig
from windlass.cost.engines import ENGINE_PROFILES, as_engine
from windlass.layout.resolve import complete_layout, default_shard_size, resolve_step
from windlass.layout.rules import Violation, not_ranked, violations
from windlass.layout.types import AXES, HYBRID_SHARDS, Layout, StepSpec
from windlass.planner.task import PlanTask
from windlass.units import divisors

MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MAX_PIPELINE = 32
MAX_EXPERT = 64
# Tokens that a context rank keeps at least: shorter sequences are not worth dividing.
MIN_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    layout: Layout
    recompute: str

    @property
    def family(self) -> tuple[object, ...]:
        """Candidates of one family differ in micro-batch, recompute, schedule and shard_size only; the best of each
        is shown."""
        return tuple(getattr(self.layout, key) for key in ("shard", *AXES, "offload"))

    def step(self, task: PlanTask) -> StepSpec:
        gpu = task.device.vendor != "cpu"
        step = resolve_step(task.recipe, task.model, self.layout, gpu=gpu, recompute=self.recompute)
        if task.engine_profile is None:
            return step
        return as_engine(step, task.engine_profile if step.native else step.engine)

    def describe(self, *, micro_batch: bool = True) -> str:
        text = self.layout.describe(micro_batch=micro_batch)
        return text if self.recompute == "none" else f"{text}, recompute {self.recompute}"


def candidate_of(wish: LayoutConfig, recompute: str, task: PlanTask) -> LayoutCandidate:
    """A `[layout]` table completed for the task's devices and batch; `problems` says whether it is valid."""
    return LayoutCandidate(complete_layout(wish, task.size), recompute)


def problems(task: PlanTask, candidate: LayoutCandidate) -> list[Violation]:
    """Why a layout cannot run or is not ranked; empty when it can be."""
    engine, node = task.recipe.train.engine, task.cluster.node
    return [
        *violations(task.model, candidate.layout, task.size, engine),
        *not_ranked(
            task.model,
            candidate.layout,
            task.size,
            engine,
            moments=task.recipe.optim.moments,
            host_memory_bytes=node.memory_usable or node.memory,
        ),
    ]


def ruled_out(task: PlanTask) -> list[tuple[LayoutCandidate, Violation]]:
    """Degrees that somebody might try and that a rule forbids: one at a time, all else plain, each reason once."""
    tried = [{"tensor": t} for t in (2, 4, 8) if t <= 2 * task.per_node]
    tried += [{"pipeline": p} for p in (2, 4, 8, 16) if p <= task.devices]
    tried += [{"expert": e} for e in (2, 4, 8, 16) if task.model.expert_params]
    tried += [{"micro_batch": m} for m in (2, 4, 8, 16, 32)]
    forbidden: dict[Violation, LayoutCandidate] = {}
    for values in tried:
        candidate = candidate_of(LayoutConfig.model_validate(values), task.recipe.train.recompute, task)
        for violation in problems(task, candidate)[:1]:
            forbidden.setdefault(violation, candidate)
    return [(candidate, violation) for violation, candidate in forbidden.items()]


def enumerate_candidates(task: PlanTask, offload: str = "none") -> Iterator[LayoutCandidate]:
    """Every layout worth estimating; rules that cost nothing to keep are kept here already."""
    seq_len, sequences, num_layers = task.seq_len, task.size.sequences, task.model.num_layers
    pipelines = list(range(1, min(MAX_PIPELINE, task.nodes, num_layers) + 1))
    contexts = [c for c in (1, 2, 4, 8, 16) if c == 1 or seq_len // c >= MIN_CONTEXT_TOKENS]
    for tensor, pipeline, context, expert in product(
        legal_degrees(task, "tensor", divisors(task.per_node)),
        legal_degrees(task, "pipeline", pipelines),
        legal_degrees(task, "context", contexts),
        legal_degrees(task, "expert", expert_degrees(task)),
    ):
        data, unused_devices = divmod(task.devices, tensor * pipeline * context)
        if unused_devices or seq_len % (context * tensor) or data * context % expert:
            continue
        micro_batches = [m for m in MICRO_BATCHES if sequences is None or sequences % (data * m) == 0]
        shards = _shards(task, tensor, pipeline, data * context)
        if expert > 1:  # groups of both kinds lie inside each other
            shards = [s for s in shards if s[0] not in HYBRID_SHARDS or 0 in (s[1] % expert, expert % s[1])]
        for micro_batch, (shard, shard_size) in product(micro_batches, shards):
            accumulation = 1 if sequences is None else sequences // (data * micro_batch)
            if accumulation < pipeline or any(s % (data * micro_batch) for s in task.size.smaller):
                continue
            if min(task.size.smaller, default=math.inf) < data * micro_batch * pipeline:
                continue
            interleaves = pipeline > 1 and num_layers % (2 * pipeline) == 0 and accumulation % pipeline == 0
            interleaves = interleaves and not any(s % (data * micro_batch * pipeline) for s in task.size.smaller)
            for schedule, chunks in (("1f1b", 1), ("interleaved", 2))[: 2 if interleaves else 1]:
                layout = Layout(
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    data=data,
                    shard=shard,
                    shard_size=shard_size,
                    micro_batch=micro_batch,
                    accumulation=accumulation,
                    schedule=schedule,
                    chunks=chunks,
                    offload=offload,
                )
                yield from (LayoutCandidate(layout, recompute) for recompute in task.recomputes)


def expert_degrees(task: PlanTask) -> list[int]:
    """Divisors of a node's devices, whose exchange stays inside it, and powers of two beyond."""
    if not task.model.expert_params:
        return [1]
    inside = divisors(task.per_node)
    return [*inside, *(task.per_node * factor for factor in (2, 4, 8, 16) if task.per_node * factor <= MAX_EXPERT)]


def legal_degrees(task: PlanTask, axis: str, worth_trying: list[int]) -> list[int]:
    sizes = task.model.sizes_divided_by(axis)
    profile = ENGINE_PROFILES.get(task.engine_profile or "")
    if sizes is None or task.recipe.train.engine == "deepspeed" or not task.model.prices(axis):
        return [1]
    if profile and not profile.divides_layers:
        return [1]
    return [d for d in worth_trying if all(value % d == 0 for _, value in sizes)]


def _shards(task: PlanTask, tensor: int, pipeline: int, replicas: int) -> list[tuple[str, int]]:
    engine, kinds = task.recipe.train.engine, [("none", 1)]
    if replicas > 1:
        kinds.append(("zero1", replicas))
    if replicas > 1 and pipeline == 1:
        kinds += [("zero2", replicas), ("full", replicas)]
        if engine == "native":
            node = default_shard_size(tensor, replicas, task.per_node)
            sizes = {node * k for k in (1, 2, 4, 8, 16)} if task.nodes > 1 else {node}
            sizes = {size for size in sizes if 1 < size < replicas and replicas % size == 0}
            kinds += [(shard, size) for shard in HYBRID_SHARDS for size in sorted(sizes)]
    if task.engine_profile is None or engine == "deepspeed":
        return kinds
    return [kind for kind in kinds if kind[0] in ENGINE_PROFILES[task.engine_profile].shards]
