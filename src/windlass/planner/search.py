"""Which layout trains this model soonest on this machine? Legal layouts, estimated, ranked, each with its reason in a line."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from windlass.clusters import Cluster
from windlass.config import LayoutConfig, Recipe
from windlass.config.load import nearest
from windlass.cost.memory import MemoryEstimate, memory
from windlass.cost.power import EnergyEstimate, PowerEstimate, allocation_units, energy, node_power
from windlass.cost.step import StepEstimate, estimate
from windlass.errors import PlanError
from windlass.planner.layouts import (
    Choice,
    batch_problem,
    enumerate_choices,
    from_config,
    problems,
    ruled_out,
    work_of,
)
from windlass.planner.task import Task, make_task

GIB = 2**30
TIGHT = 0.92
"""Above this share of a device's memory the estimate's own error decides whether a layout runs."""
KEPT_REJECTIONS = 24
TIE = 0.03
"""Layouts whose days differ by less are told apart by simplicity: the estimate is no finer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One legal layout with what it needs, how fast it is and what it costs."""

    choice: Choice
    layout: LayoutConfig
    memory: MemoryEstimate
    limit: float
    step: StepEstimate
    batch_tokens: int
    tokens: float
    days: float
    node_hours: float
    power: PowerEstimate
    energy: EnergyEstimate
    units: float | None
    """In the site's billing unit."""
    mfu_of_achievable: float | None
    fits: bool
    given: bool = False
    """The recipe's own layout."""
    reason: str = ""

    @property
    def share(self) -> float:
        return self.memory.needed / self.limit

    @property
    def memory_terms(self) -> dict[str, float]:
        """Bytes by what holds them; sums to `memory.needed`."""
        outside = self.memory.total - self.memory.reserved
        slack = self.memory.needed - self.memory.allocated - outside
        extra = {"allocator slack and margin": slack, "context and communication": outside}
        return {**self.memory.terms, **{k: v for k, v in extra.items() if v > 0}}


@dataclass(frozen=True, kw_only=True)
class Rejected:
    layout: LayoutConfig
    choice: Choice
    reason: str
    memory_gib: float | None = None
    given: bool = False


@dataclass(frozen=True, kw_only=True)
class Plans:
    task: Task
    plans: tuple[Plan, ...]
    """Best first; one per family of layouts."""
    rejected: tuple[Rejected, ...]
    considered: int
    fitting: int
    search_seconds: float
    """CPU seconds of this search."""

    @property
    def best(self) -> Plan:
        if not self.plans:
            raise nowhere(self)
        return self.plans[0]


def plan(recipe: Recipe, cluster: Cluster, *, nodes: int | None = None, top: int | None = None) -> Plans:
    """Rank the legal layouts. The recipe's own layout, if it has one, is always among the plans or the rejected, and marked.

    A recipe that names a recompute policy and no layout keeps its policy, as the plan is there to fill it. Beside a layout of its own,
    alternatives may use another policy; their `choice.recompute` says which."""
    return search(make_task(recipe, cluster, nodes, keep_recompute=_keeps(recipe)), top=top)


def _keeps(recipe: Recipe) -> bool:
    return recipe.layout is None and "recompute" in recipe.train.model_fields_set


def search(task: Task, *, top: int | None = None) -> Plans:
    began = time.process_time()
    _check_batch(task)
    judged, considered = _judge(task, enumerate_choices(task))
    fitting = [p for p in judged if p.fits]
    if not fitting:
        more, extra = _judge(task, (c for c in enumerate_choices(task, offload="optimizer") if not problems(task, c)))
        judged, considered = judged + more, considered + extra
        fitting = [p for p in judged if p.fits]
    families: dict[tuple[object, ...], Plan] = {}
    for candidate in _ranked(fitting):
        families.setdefault(candidate.choice.family, candidate)
    ranked = list(families.values())
    given, refused = _given(task, ranked)
    ranked = given if given is not None else ranked
    explained = tuple(_with_reason(p, ranked[0], rank, len(fitting)) for rank, p in enumerate(ranked, 1))
    too_big = sorted((p for p in judged if not p.fits), key=lambda p: p.memory.needed)
    forbidden = [Rejected(layout=c.config(), choice=c, reason=reason) for c, reason in ruled_out(task)]
    rejected = (*refused, *(_too_big(p) for p in too_big[:KEPT_REJECTIONS]), *forbidden)
    shown = explained if top is None else (*explained[:top], *(p for p in explained[top:] if p.given))
    return Plans(
        task=task, plans=shown, rejected=rejected, considered=considered, fitting=len(fitting), search_seconds=time.process_time() - began
    )  # fmt: skip


def _judge(task: Task, choices: Iterable[Choice]) -> tuple[list[Plan], int]:
    """Plans of all choices. What cannot fit gets no step estimate of its own kind: only the layouts closest to fitting are kept."""
    plans: list[Plan] = []
    misses: list[tuple[float, Choice, MemoryEstimate]] = []
    count = 0
    for choice in choices:
        count += 1
        need = memory(task.shape, work_of(task, choice), choice.degrees(), task.per_node)
        if need.needed <= task.limit:
            plans.append(evaluate(task, choice, need))
        else:
            misses.append((need.needed, choice, need))
    misses.sort(key=lambda m: m[0])
    return plans + [evaluate(task, choice, need) for _, choice, need in misses[:KEPT_REJECTIONS]], count


def evaluate(task: Task, choice: Choice, need: MemoryEstimate | None = None) -> Plan:
    """Memory, time, energy and cost of one legal layout."""
    work, degrees = work_of(task, choice), choice.degrees()
    need = need or memory(task.shape, work, degrees, task.per_node)
    step = estimate(task.shape, work, degrees, task.device, task.cluster.links, task.per_node, task.cluster.efficiency)
    batch = choice.micro_batch * choice.accumulation * choice.data * task.seq_len
    tokens = task.tokens(batch)
    hours = tokens / batch * step.seconds / 3600
    power = node_power(task.device, task.cluster.node, step.mfu)
    peak, matmul = task.device.bf16_tflops, task.device.matmul_tflops
    return Plan(
        choice=choice, layout=choice.config(), memory=need, limit=task.limit, step=step, batch_tokens=batch, tokens=tokens,
        days=hours / 24, node_hours=hours * task.nodes, power=power, energy=energy(power, task.nodes, hours, task.grid, tokens),
        units=allocation_units(task.cluster.billing, task.nodes, hours),
        mfu_of_achievable=step.mfu * peak / matmul if step.mfu and peak and matmul else None, fits=need.needed <= task.limit,
    )  # fmt: skip


def _cost(p: Plan) -> float:
    """Days, with a penalty where only the estimate's error decides whether the layout runs at all."""
    return p.days * (1.05 if p.share > TIGHT else 1.0)


def _ranked(plans: Iterable[Plan]) -> list[Plan]:
    """Days first, in steps of 3 % from the best (the estimate is no finer); then more data parallelism, less accumulation,
    fewer mechanisms, less memory."""
    known = list(plans)
    best = min((_cost(p) for p in known), default=1.0) or 1e-9

    def key(p: Plan) -> tuple[float, ...]:
        c = p.choice
        mechanisms = sum(d > 1 for d in (c.tensor, c.pipeline, c.context)) + (c.offload != "none") + (c.shard != "none")
        steps = int(math.log(max(_cost(p) / best, 1.0)) / TIE)
        return (steps, -c.data, c.accumulation, mechanisms + (c.recompute != "none"), p.memory.needed)

    return sorted(known, key=key)


def _check_batch(task: Task) -> None:
    """A batch that no layout can divide ends the search with its nearest neighbours."""
    if task.sequences is None:
        return
    if next(iter(enumerate_choices(task)), None) is None:
        counts = [n for n in range(1, (task.cluster.nodes or 4096) + 1) if task.sequences % (n * task.per_node) == 0]
        raise PlanError(
            "planner.failed",
            batch_problem(task, task.devices, 1),
            hint=f"set data.batch_tokens to one of these, or nodes to {nearest(task.nodes, counts)}",
        )


def _given(task: Task, ranked: list[Plan]) -> tuple[list[Plan] | None, list[Rejected]]:
    """Put the recipe's own layout into the ranking, marked; or say why it cannot be there."""
    layout = task.recipe.layout
    if layout is None:
        return None, []
    choice = from_config(layout, task.recipe.train.recompute, task)
    found = problems(task, choice)
    if found:
        return None, [Rejected(layout=layout, choice=choice, reason="; ".join(found), given=True)]
    mine = replace(evaluate(task, choice), given=True)
    if not mine.fits:
        return None, [replace(_too_big(mine), given=True)]
    others = [p for p in ranked if p.choice != choice]
    return _ranked([*others, mine]), []


def _too_big(p: Plan) -> Rejected:
    worst = sorted(p.memory_terms.items(), key=lambda item: -item[1])[:2]
    biggest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in worst)
    reason = f"needs {p.memory.needed / GIB:.1f} of {p.limit / GIB:.1f} GiB ({biggest} GiB)"
    return Rejected(layout=p.layout, choice=p.choice, reason=reason, memory_gib=p.memory.needed / GIB)


def _with_reason(p: Plan, best: Plan, rank: int, fitting: int) -> Plan:
    room = f"fits in {p.memory.needed / GIB:.0f} of {p.limit / GIB:.0f} GiB"
    tight = ", tight: measure first" if p.share > TIGHT else ""
    if p.choice.offload != "none":
        tight += "; nothing fits without offload, whose copies are timed by a textbook rate (20 GB/s to host memory)"
    mine = "the recipe's layout; " if p.given else ""
    if p is best:
        return replace(p, reason=f"{mine}fastest of {fitting:,} that fit: {_spending(p)}; {room}{tight}")
    slower = p.days / best.days - 1
    if slower < -0.005:
        how = f"{-slower:.0%} faster by the estimate, but {'tight' if tight else _tie(p.choice, best.choice)}"
    else:
        how = f"{slower:.0%} slower" if slower > 0.005 else "as fast"
    return replace(p, reason=f"{mine}{how}: {_difference(p, best)}; {room}{tight}")


def _tie(c: Choice, best: Choice) -> str:
    """What made the other one win where days are as good as equal."""
    if c.data < best.data:
        return f"only {c.data:,} replicas instead of {best.data:,}"
    if c.accumulation > best.accumulation:
        return f"{c.accumulation} micro-batches in a row instead of {best.accumulation}"
    return "it takes more mechanisms or more memory"


def _spending(p: Plan) -> str:
    """Where the step's time goes: `61 % matrix products, 8 % waiting for other devices`."""
    total = p.step.seconds
    largest = max(p.step.terms, key=lambda name: p.step.terms[name])
    waits = p.step.exposed_communication / total
    bubble = f", {p.step.bubble / total:.0%} pipeline bubble" if p.step.bubble else ""
    return f"{p.step.terms[largest] / total:.0%} of a step is {largest}, {waits:.0%} waiting for other devices{bubble}"


def _difference(p: Plan, best: Plan) -> str:
    """Which term makes this one differ from the best: `data-parallel traffic +1.2 s a step`."""
    # Both do the same global batch, so seconds per step compare; without a fixed batch they are scaled to the same tokens.
    scale = best.batch_tokens / p.batch_tokens
    names = {*p.step.terms, *best.step.terms}
    delta = {n: p.step.terms.get(n, 0.0) * scale - best.step.terms.get(n, 0.0) for n in names}
    name = max(delta, key=lambda n: abs(delta[n]))
    same = abs(delta[name]) < 0.001 * best.step.seconds
    parts = [
        f"needs {(p.memory.needed - best.memory.needed) / GIB:+.0f} GiB"
        if same
        else f"{name} {delta[name]:+.2g} s a step"
    ]
    c, b = p.choice, best.choice
    if c.data < b.data and c.accumulation > b.accumulation:
        parts.append(
            f"{c.data:,} replicas instead of {b.data:,}, so {c.accumulation} micro-batches in a row instead of {b.accumulation}"
        )
    return ", ".join(parts)


def nowhere(plans: Plans) -> PlanError:
    """Nothing fits: say by how much the closest misses, and what would help."""
    task = plans.task
    if not plans.rejected:
        return PlanError(
            "planner.layout-nodes-legal",
            f"no layout of {task.recipe.name} on {task.nodes} nodes of {task.cluster.name} is legal",
            hint='see --why "shard=full" for the rules that stand in the way',
        )
    close = min(
        (r for r in plans.rejected if r.memory_gib is not None),
        key=lambda r: r.memory_gib or 0.0,
        default=plans.rejected[0],
    )
    return PlanError(
        "planner.fits-nowhere-x-closest",
        f"{task.recipe.name} fits nowhere on {task.nodes} x {task.per_node} {task.device.name}: the closest layout ({close.choice.words()}) {close.reason}",
        hint=_where_it_fits(task),
    )


def _where_it_fits(task: Task) -> str:
    """The first doubling of nodes on which something fits, with the layout."""
    nodes = task.nodes * 2
    while nodes <= (task.cluster.nodes or 4096):
        try:
            found = search(make_task(task.recipe, task.cluster, nodes))
        except PlanError:  # the batch may not divide over so many
            found = None
        if found and found.plans:
            return (
                f"it fits on {nodes} nodes ({found.plans[0].choice.words()}); or make data.seq_len or the model smaller"
            )
        nodes *= 2
    return f"no doubling of nodes up to {task.cluster.nodes or 4096} helps: make data.seq_len or the model smaller"


def on_devices(cluster: Cluster, devices: int) -> Cluster:
    """One node of the cluster with so many devices in use (`windlass train --devices N`)."""
    return cluster.model_copy(update={"node": cluster.node.model_copy(update={"devices": devices})})


def fill_recipe(recipe: Recipe, cluster: Cluster, *, nodes: int | None = None) -> tuple[Recipe, str]:
    """A recipe without `[layout]` gets the best one and, unless it names one, the recompute policy it was planned with; and the reason."""
    best = plan(recipe.model_copy(update={"layout": None}), cluster, nodes=nodes).best
    train = recipe.train.model_copy(update={"recompute": best.choice.recompute})
    return recipe.model_copy(update={"layout": best.layout, "train": train}), f"{best.choice.words()} ({best.reason})"


def fill_layout(recipe: Recipe, cluster: Cluster, *, nodes: int | None = None) -> tuple[LayoutConfig, str]:
    """The best layout under the recipe's own recompute policy, and the reason. Raises PlanError when none fits."""
    found = search(make_task(recipe, cluster, nodes, keep_recompute=True))
    if not found.plans:
        other = search(make_task(recipe, cluster, nodes))
        best = other.best  # raises, with the closest miss, when nothing fits under any policy
        raise PlanError(
            "planner.layout-fits-train-recompute",
            f"no layout fits with train.recompute = {recipe.train.recompute!r}",
            hint=f"set train.recompute = {best.choice.recompute!r}: then {best.choice.words()} {best.reason}",
        )
    return found.best.layout, f"{found.best.choice.words()} ({found.best.reason})"
