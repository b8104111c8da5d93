"""The planner's expectation of each point: memory and the chance that it is too much, speed, energy, cost."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.config import Recipe, validate
from windlass.config.sweep import SweepConfig, put
from windlass.errors import ConfigError, PlanError, WindlassError
from windlass.launch.ledger import sum_known
from windlass.launch.sweep.points import SweepPoint
from windlass.layout.resolve import complete_layout, job_size
from windlass.layout.rules import nearest_batches
from windlass.planner.candidates import candidate_of, problems
from windlass.planner.search import Plan, estimate_plan, on_devices, search
from windlass.planner.task import PlanTask, make_task
from windlass.units import DAY, print_bytes, print_share

# Standard deviation of ln(predicted / measured memory): 90 % of 129 published runs lie within 20 %
# (benchmarks/results/planner_accuracy.md).
MEMORY_SPREAD = math.log(1.20) / 1.645
# Python with torch and our training code, before a model: 282 MiB with torch 2.13. On a CPU it is part of the peak.
PROCESS_BYTES = 300e6


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The prediction for a point before it runs; None where the planner has no prediction."""

    verdict: str  # fits, oom (more likely than not), illegal or unknown
    reason: str
    oom_chance: float | None = None
    skip: bool = False
    memory_bytes: float | None = None  # with the allocator's reserve: compare this with the limit
    peak_bytes: float | None = None  # what a run will show: the allocator's peak on a GPU, the process's on a CPU
    memory_limit_bytes: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None
    nodes: int | None = None
    devices: int | None = None
    steps: int | None = None
    seconds: float | None = None  # start-up and all steps
    node_hours: float | None = None
    units: float | None = None
    kwh: float | None = None
    kwh_at_nodes: float | None = None  # without the data centre's PUE
    joules_per_token: float | None = None
    layout: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SweepTotal:
    points: int
    run: int
    skipped: int
    illegal: int
    unknown: int
    node_hours: float | None
    units: float | None
    unit: str
    kwh: float | None
    seconds: float | None  # one point after the other


def use_nearest_batches(
    sweep: SweepConfig, points: Sequence[SweepPoint], cluster: str | None = None
) -> list[SweepPoint]:
    """The points. With adjust_batch, a point whose batch does not divide evenly over its layout gets the nearest batch
    that does."""
    return [_with_nearest_batch(point, cluster) for point in points] if sweep.adjust_batch else list(points)


def _with_nearest_batch(point: SweepPoint, cluster: str | None) -> SweepPoint:
    recipe = point.recipe
    if recipe is None or recipe.layout is None or recipe.data.batch_tokens is None or recipe.data.batch_ramp:
        return point
    per_node = point.devices or load_cluster(cluster or recipe.cluster).node.devices
    size = job_size(recipe, recipe.nodes * per_node, per_node)
    sequences = nearest_batches(complete_layout(recipe.layout, size), size)[0]
    if sequences == size.sequences:
        return point
    raw = copy.deepcopy(point.raw or {})
    put(raw, "data.batch_tokens", sequences * size.seq_len)
    adjusted = validate(Recipe, raw, f"point {point.name}")
    return replace(point, raw=raw, recipe=adjusted, wanted_batch_tokens=recipe.data.batch_tokens)


def expect_all(
    sweep: SweepConfig, points: Sequence[SweepPoint], cluster: str | None = None, engine_profile: str | None = None
) -> tuple[list[Expectation], SweepTotal]:
    machines: dict[str, Cluster] = {cluster: load_cluster(cluster)} if cluster else {}

    def machine(recipe: Recipe) -> Cluster:
        name = cluster or recipe.cluster
        return machines[name] if name in machines else machines.setdefault(name, load_cluster(name))

    expected = [expect(sweep, point, machine, engine_profile) for point in points]
    runs = [e for e in expected if not e.skip and e.verdict != "illegal"]
    first = next(iter(machines.values()), None)
    return expected, SweepTotal(
        points=len(expected),
        run=len(runs),
        skipped=sum(e.skip for e in expected),
        illegal=sum(e.verdict == "illegal" for e in expected),
        unknown=sum(e.verdict == "unknown" for e in expected),
        node_hours=sum_known(e.node_hours for e in runs),
        units=sum_known(e.units for e in runs),
        unit=first.billing.unit if first else "",
        kwh=sum_known(e.kwh for e in runs),
        seconds=sum_known(e.seconds for e in runs),
    )


def expect(
    sweep: SweepConfig,
    point: SweepPoint,
    machine: Callable[[Recipe], Cluster],
    engine_profile: str | None = None,
) -> Expectation:
    recipe = point.recipe
    if recipe is None:
        return Expectation(verdict="unknown", reason="the planner predicts recipes only, not commands")
    if point.problem:
        return Expectation(verdict="illegal", reason=point.problem)
    cluster = machine(recipe)  # an unknown cluster is an error of the whole sweep
    try:
        if point.devices and point.devices != cluster.node.devices:
            cluster = on_devices(cluster, point.devices)
        task = make_task(recipe, cluster, keep_recompute=True, engine_profile=engine_profile)
        if recipe.layout is None:
            best = search(task, top=1).best
            expected = _from_plan(sweep, task, best, best.reason)
        else:
            candidate = candidate_of(recipe.layout, recipe.train.recompute, task)
            if invalid := "; ".join(map(str, problems(task, candidate))):
                return Expectation(verdict="illegal", reason=invalid, nodes=task.nodes, devices=task.devices)
            expected = _from_plan(sweep, task, estimate_plan(task, candidate), "")
    except (ConfigError, PlanError) as error:
        return Expectation(verdict="illegal", reason=error.message)
    except WindlassError as error:
        return Expectation(verdict="unknown", reason=error.message)
    limit, peak = point.memory_limit, expected.peak_bytes
    if limit is None or peak is None or (chance := oom_chance(peak, limit)) <= (expected.oom_chance or 0.0):
        return expected
    # A point with its own limit is never skipped: the user wants to see what happens at the limit.
    return replace(
        expected,
        verdict="oom" if chance > 0.5 else "fits",
        reason=f"shows {print_bytes(peak)} of the {print_bytes(limit)} that memory_limit allows",
        oom_chance=chance,
        memory_limit_bytes=float(limit),
    )


def oom_chance(needed: float, limit: float) -> float:
    """The probability that this much memory does not fit, from the errors of the estimate on published runs."""
    if needed <= 0 or limit <= 0:
        return 0.0 if needed <= 0 else 1.0
    return 0.5 * (1.0 + math.erf(math.log(needed / limit) / (MEMORY_SPREAD * math.sqrt(2.0))))


def _from_plan(sweep: SweepConfig, task: PlanTask, plan: Plan, reason: str) -> Expectation:
    needed, limit = plan.memory.needed, plan.limit_bytes
    chance, share = oom_chance(needed, limit), f"needs {plan.memory_text}"
    seconds = sweep.startup + plan.days * DAY
    node_hours, rate = seconds / 3600 * task.nodes, task.cluster.billing.per_node_hour
    kwh = plan.energy.kwh
    return Expectation(
        verdict="fits" if needed <= limit else "oom",
        reason=f"{share}, {print_share(chance, digits=0)} likely to run out of memory"
        if chance > 0.05
        else (reason or share),
        oom_chance=chance,
        skip=chance >= sweep.skip_oom,
        memory_bytes=needed,
        peak_bytes=plan.memory.allocated + (PROCESS_BYTES if task.device.vendor == "cpu" else 0.0),
        memory_limit_bytes=limit,
        step_seconds=plan.step.seconds,
        tokens_per_second=plan.batch_tokens / plan.step.seconds,
        tokens_per_second_per_device=plan.step.tokens_per_second_per_device,
        mfu=plan.step.mfu,
        nodes=task.nodes,
        devices=task.devices,
        steps=plan.steps,
        seconds=seconds,
        node_hours=node_hours,
        units=None if rate is None else rate * node_hours,
        kwh=kwh,
        kwh_at_nodes=plan.energy.it_kwh,
        joules_per_token=None if kwh is None else kwh * 3.6e6 / plan.tokens,
        layout={**plan.layout.config().model_dump(mode="json"), "recompute": plan.recompute},
    )
