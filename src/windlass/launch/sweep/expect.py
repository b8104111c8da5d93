"""What does the planner expect of each point? Memory and the chance that it is too much, speed, energy, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.config import Recipe
from windlass.config.sweep import SweepConfig
from windlass.errors import ConfigError, PlanError, WindlassError
from windlass.launch.sweep.points import SweepPoint
from windlass.planner.candidates import candidate_of, problems
from windlass.planner.search import estimate_plan, on_devices, search
from windlass.planner.task import PlanTask, make_task

MEMORY_SPREAD = math.log(1.20) / 1.645
"""Standard deviation of ln(predicted / measured memory): 90 % of 129 published runs lie within 20 % (benchmarks/results/planner_accuracy.md)."""


PROCESS_BYTES = 300e6
"""Python with torch and our training code imported, before a model: 282 MiB with torch 2.13. On a CPU it is part of what is measured."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What is known of a point before it runs; None where the planner cannot say."""

    verdict: str
    """fits, oom (more likely than not), illegal or unknown."""
    reason: str
    oom_chance: float | None = None
    skip: bool = False
    memory_bytes: float | None = None
    """With the reserve that the allocator needs: compare this with the limit."""
    peak_bytes: float | None = None
    """What a run will show as its peak: the allocator's on a GPU, the whole process on a CPU."""
    memory_limit_bytes: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None
    nodes: int | None = None
    devices: int | None = None
    steps: int | None = None
    seconds: float | None = None
    """Start-up and all steps."""
    node_hours: float | None = None
    units: float | None = None
    kwh: float | None = None
    joules_per_token: float | None = None
    layout: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum over the points that would run."""

    points: int
    run: int
    skipped: int
    illegal: int
    unknown: int
    node_hours: float | None
    units: float | None
    unit: str
    kwh: float | None
    seconds: float | None
    """One point after the other."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def expect_all(
    sweep: SweepConfig, points: Sequence[SweepPoint], cluster: str | None = None
) -> tuple[list[Expectation], Total]:
    """The planner's word on every point, and what all of them cost together."""
    machines: dict[str, Cluster] = {}

    def machine(recipe: Recipe) -> Cluster:
        name = cluster or recipe.cluster
        return machines.setdefault(name, load_cluster(name))

    found = [expect(sweep, point, machine) for point in points]
    if cluster is not None:
        machines.setdefault(cluster, load_cluster(cluster))
    return found, _total(found, next(iter(machines.values()), None))


def expect(sweep: SweepConfig, point: SweepPoint, machine: Any) -> Expectation:
    recipe = point.recipe
    if recipe is None:
        return Expectation(verdict="unknown", reason="any command: the planner knows recipes only")
    if point.problem:
        return Expectation(verdict="illegal", reason=point.problem)
    cluster = machine(recipe)  # an unknown machine is the whole sweep's mistake
    try:
        here = (
            on_devices(cluster, point.devices) if point.devices and point.devices != cluster.node.devices else cluster
        )
        return _under_limit(_judge(sweep, recipe, here), point.memory_limit)
    except (ConfigError, PlanError) as error:
        return Expectation(verdict="illegal", reason=error.message)
    except WindlassError as error:
        return Expectation(verdict="unknown", reason=error.message)


def _judge(sweep: SweepConfig, recipe: Recipe, cluster: Cluster) -> Expectation:
    task = make_task(recipe, cluster, keep_recompute=True)
    if recipe.layout is None:
        best = search(task, top=1).best
        return _of(sweep, task, best, best.reason)
    candidate = candidate_of(recipe.layout, recipe.train.recompute, task)
    illegal = problems(task, candidate)
    if illegal:
        return Expectation(
            verdict="illegal", reason="; ".join(map(str, illegal)), nodes=task.nodes, devices=task.devices
        )
    return _of(sweep, task, estimate_plan(task, candidate), "")


def _under_limit(found: Expectation, limit: int | None) -> Expectation:
    """With the limit that the sweep puts on each process. Such a point is never skipped: whoever sets a limit wants to see it met."""
    if limit is None or found.peak_bytes is None:
        return found
    chance = oom_chance(found.peak_bytes, limit)
    if chance <= (found.oom_chance or 0.0):
        return found
    words = f"shows {found.peak_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB that memory_limit allows"
    return replace(found, verdict="oom" if chance > 0.5 else "fits", reason=words, oom_chance=chance, memory_limit_bytes=float(limit))  # fmt: skip


def oom_chance(needed: float, limit: float) -> float:
    """How sure is it that this much memory does not fit? From how far the estimate has been off on published runs."""
    if needed <= 0 or limit <= 0:
        return 0.0 if needed <= 0 else 1.0
    return 0.5 * (1.0 + math.erf(math.log(needed / limit) / (MEMORY_SPREAD * math.sqrt(2.0))))


def _of(sweep: SweepConfig, task: PlanTask, plan: Any, reason: str) -> Expectation:
    chance = oom_chance(plan.memory.needed, plan.limit_bytes)
    steps = round(plan.tokens / plan.batch_tokens)
    seconds = sweep.startup + steps * plan.step.seconds
    hours = seconds / 3600 * task.nodes
    billing = task.cluster.billing.per_node_hour
    share = f"needs {plan.memory.needed / 2**30:.1f} of {plan.limit_bytes / 2**30:.1f} GiB"
    fits = plan.memory.needed <= plan.limit_bytes
    joules = None if plan.energy.kwh is None else plan.energy.kwh * 3.6e6
    return Expectation(
        verdict="fits" if fits else "oom", reason=f"{share}, {chance:.0%} sure to be too much" if chance > 0.05 else (reason or share),
        oom_chance=chance, skip=chance >= sweep.skip_oom, memory_bytes=plan.memory.needed,
        peak_bytes=plan.memory.allocated + (PROCESS_BYTES if task.device.vendor == "cpu" else 0.0), memory_limit_bytes=plan.limit_bytes, step_seconds=plan.step.seconds,
        tokens_per_second=plan.batch_tokens / plan.step.seconds, tokens_per_second_per_device=plan.step.tokens_per_second_per_device,
        mfu=plan.step.mfu, nodes=task.nodes, devices=task.devices, steps=steps, seconds=seconds, node_hours=hours,
        units=None if billing is None else billing * hours, kwh=plan.energy.kwh, joules_per_token=None if joules is None else joules / plan.tokens,
        layout={**plan.layout.config().model_dump(mode="json"), "recompute": plan.recompute},
    )  # fmt: skip


def _total(found: Sequence[Expectation], cluster: Cluster | None) -> Total:
    runs = [e for e in found if not e.skip and e.verdict != "illegal"]
    return Total(
        points=len(found),
        run=len(runs),
        skipped=sum(e.skip for e in found),
        illegal=sum(e.verdict == "illegal" for e in found),
        unknown=sum(e.verdict == "unknown" for e in found),
        node_hours=_sum([e.node_hours for e in runs]),
        units=_sum([e.units for e in runs]),
        unit=cluster.billing.unit if cluster else "",
        kwh=_sum([e.kwh for e in runs]),
        seconds=_sum([e.seconds for e in runs]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None when none is."""
    known = [v for v in values if v is not None]
    return sum(known) if known else None
