"""Ranked layouts for a recipe on a cluster: enumerate, estimate, rank, and give each its reason in one line."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from windlass.clusters import Cluster
from windlass.config import LayoutConfig, Recipe
from windlass.cost.memory import MemoryEstimate, memory
from windlass.cost.power import EnergyEstimate, PowerEstimate, allocation_units, busy_share, energy, node_power
from windlass.cost.step import StepEstimate, estimate_step
from windlass.errors import PlanError
from windlass.layout.rules import batch_violation
from windlass.layout.types import AXES, Layout, StepSpec
from windlass.planner.candidates import (
    LayoutCandidate,
    candidate_of,
    enumerate_candidates,
    problems,
    ruled_out,
)
from windlass.planner.measured import mfu_beyond
from windlass.planner.task import PlanTask, make_task
from windlass.units import GIB, counted, nearest, print_bytes, print_share

# Above this share of a device's memory the estimate's own error decides whether a layout runs; it is then ranked as if
# it took this many times as long.
TIGHT = 0.92
TIGHT_PENALTY = 1.05
KEPT_REJECTIONS = 24
# Layouts whose days differ by less count as equal and are ranked by simplicity: the estimate is no finer.
TIE = 0.03
# Times that differ by less print as the same.
EQUAL = 0.0005
# What the preferred plan is chosen by, in this order; all but time decide between layouts of equal time.
RANKED_BY = ("time", "replicas", "accumulation", "mechanisms", "memory")
RANKING = (
    f"The first is preferred among those within {print_share(TIE, digits=0)} of the fastest (tight memory counts as "
    f"{print_share(TIGHT_PENALTY - 1, digits=0)} slower): more replicas, then less accumulation, fewer mechanisms, less memory. "
    "The others follow by time."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One valid layout with what it needs, how fast it is and what it costs."""

    candidate: LayoutCandidate
    memory: MemoryEstimate
    limit_bytes: float
    step: StepEstimate
    # Of one step, the largest of a ramp.
    batch_tokens: int
    tokens: float
    steps: int
    days: float
    node_hours: float
    power: PowerEstimate
    energy: EnergyEstimate
    # In the site's billing unit.
    units: float | None
    mfu_of_achievable: float | None
    # The recipe's own layout.
    from_recipe: bool = False
    # Position in the ranking; 0 before it is ranked.
    rank: int = 0
    # Time relative to the first: 0.02 takes 2 % longer, -0.02 takes 2 % less.
    slower: float = 0.0
    # Why it ranks below the first: one of RANKED_BY, or "tight memory"; "" for the first.
    ranked_by: str = ""
    reason: str = ""
    # Sentences about figures of this layout above the highest that was ever published.
    outside_measured: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """What Jupyter shows for a plan."""
        from windlass.planner.page import plan_fragment

        return plan_fragment(self)

    @property
    def layout(self) -> Layout:
        return self.candidate.layout

    @property
    def recompute(self) -> str:
        return self.candidate.recompute

    @property
    def fits(self) -> bool:
        return self.memory.needed <= self.limit_bytes

    @property
    def memory_share(self) -> float:
        return self.memory.needed / self.limit_bytes

    @property
    def memory_text(self) -> str:
        return f"{print_bytes(self.memory.needed)} of {print_bytes(self.limit_bytes)}"

    @property
    def memory_terms(self) -> dict[str, float]:
        """Bytes by what holds them; sums to `memory.needed`."""
        outside = self.memory.total - self.memory.reserved
        slack = self.memory.needed - self.memory.allocated - outside
        extra = {"allocator slack and margin": slack, "context and communication": outside}
        return {**self.memory.terms, **{name: size for name, size in extra.items() if size > 0}}


@dataclass(frozen=True, kw_only=True)
class Rejected:
    candidate: LayoutCandidate
    reason: str
    memory_gib: float | None = None
    from_recipe: bool = False


@dataclass(frozen=True, kw_only=True)
class Plans:
    task: PlanTask
    # The preferred one, then the others by time; one per family of layouts.
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    considered: int
    fitting: int
    # CPU seconds of this search.
    search_seconds: float

    @property
    def best(self) -> Plan:
        if not self.plans:
            from windlass.planner.changes import nothing_fits  # it searches in turn

            raise nothing_fits(self)
        return self.plans[0]


def plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    nodes: int | None = None,
    top: int | None = None,
    engine_profile: str | None = None,
) -> Plans:
    """Rank the valid layouts. The recipe's own layout, if it has one, is always among the plans or the rejected, and
    marked.

    A recipe that names a recompute policy and no layout keeps its policy. If the recipe has a layout, alternatives may
    use another policy; `Plan.recompute` says which."""
    keep = recipe.layout is None and "recompute" in recipe.train.model_fields_set
    return search(make_task(recipe, cluster, nodes, keep_recompute=keep, engine_profile=engine_profile), top=top)


def search(task: PlanTask, *, top: int | None = None) -> Plans:
    started = time.process_time()
    estimated, considered = estimate_all(task, enumerate_candidates(task))
    if not considered and task.size.sequences is not None:  # a batch that no layout can divide
        sequences, most = task.size.sequences, task.cluster.nodes or 4096
        counts = [n for n in range(1, most + 1) if sequences % (n * task.per_node) == 0]
        raise PlanError(
            "layout.batch-not-divisible",
            str(batch_violation(task.devices, 1, task.size)),
            hint=f"set data.batch_tokens to one of these (--adjust takes the nearest), or nodes to "
            f"{nearest(task.nodes, counts)}",
        )
    if task.devices > 1 and not any(p.fits for p in estimated):
        offloaded = (c for c in enumerate_candidates(task, offload="optimizer") if not problems(task, c))
        more, count = estimate_all(task, offloaded)
        estimated, considered = estimated + more, considered + count
    fitting = [p for p in estimated if p.fits]
    ranked, rejected = fitting, list[Rejected]()
    if task.recipe.layout is not None:
        own = candidate_of(task.recipe.layout, task.recipe.train.recompute, task)
        if reasons := problems(task, own):
            rejected.append(Rejected(candidate=own, reason="; ".join(map(str, reasons)), from_recipe=True))
        elif not (mine := replace(estimate_plan(task, own), from_recipe=True)).fits:
            rejected.append(_too_big(mine))
        else:
            ranked = [*(p for p in fitting if p.candidate != own), mine]
    explained = _explain(task, rank(ranked), len(fitting))
    too_big = sorted((p for p in estimated if not p.fits), key=lambda p: p.memory.needed)
    rejected += [_too_big(p) for p in too_big[:KEPT_REJECTIONS]]
    rejected += [Rejected(candidate=c, reason=str(violation)) for c, violation in ruled_out(task)]
    # Always shown: the recipe's own layout, and the best that divides experts.
    by_experts = next((i for i, p in enumerate(explained) if p.layout.expert > 1), None)
    return Plans(
        task=task,
        plans=tuple(p for i, p in enumerate(explained) if top is None or i < top or p.from_recipe or i == by_experts),
        rejected=tuple(rejected),
        considered=considered,
        fitting=len(fitting),
        search_seconds=time.process_time() - started,
    )


def estimate_all(task: PlanTask, candidates: Iterable[LayoutCandidate]) -> tuple[list[Plan], int]:
    """Plans of all candidates that fit and of the few that come closest, and how many were considered."""
    estimates = []
    for candidate in candidates:
        spec = candidate.step(task)
        estimates.append((memory(task.model, spec, candidate.layout), candidate, spec))
    fitting = [e for e in estimates if e[0].needed <= task.limit_bytes]
    misses = sorted((e for e in estimates if e[0].needed > task.limit_bytes), key=lambda e: e[0].needed)
    kept = [*fitting, *misses[:KEPT_REJECTIONS]]
    return [estimate_plan(task, candidate, needed, spec) for needed, candidate, spec in kept], len(estimates)


def estimate_plan(
    task: PlanTask,
    candidate: LayoutCandidate,
    needed: MemoryEstimate | None = None,
    spec: StepSpec | None = None,
) -> Plan:
    """Memory, time, energy and cost of one valid layout; `needed` and `spec` where they are known already."""
    spec = spec or candidate.step(task)
    step = estimate_step(task.model, spec, candidate.layout, task.machine)
    batch_tokens = candidate.layout.sequences_per_step * task.seq_len
    tokens, steps, seconds = 0.0, 0.0, 0.0
    for part, batch in task.phases(batch_tokens):
        phase = step
        if batch != batch_tokens:
            accumulation = candidate.layout.accumulation * batch // batch_tokens
            layout = replace(candidate.layout, accumulation=accumulation)
            phase = estimate_step(task.model, spec, layout, task.machine)
        tokens, steps, seconds = tokens + part, steps + part / batch, seconds + part / batch * phase.seconds
    hours = seconds / 3600
    power = node_power(task.device, task.cluster.node, busy_share(step))
    peak, matmul = task.device.bf16_tflops, task.device.matmul_tflops
    return Plan(
        candidate=candidate,
        memory=needed or memory(task.model, spec, candidate.layout),
        limit_bytes=task.limit_bytes,
        step=step,
        batch_tokens=batch_tokens,
        tokens=tokens,
        steps=round(steps),
        days=hours / 24,
        node_hours=hours * task.nodes,
        power=power,
        energy=energy(power, task.nodes, hours, task.grid, tokens),
        units=allocation_units(task.cluster.billing, task.nodes, hours),
        outside_measured=tuple(mfu_beyond(step.mfu, task.device, task.recipe.train.precision)),
        mfu_of_achievable=step.mfu * peak / matmul if step.mfu and peak and matmul else None,
    )


def rank(plans: Iterable[Plan]) -> list[Plan]:
    """The preferred plan first: by days in steps of 3 % from the fastest (the estimate is no finer), then more data
    parallelism, less accumulation, fewer mechanisms, less memory. Layouts so tight that the estimate's error decides
    whether they run count 5 % slower."""
    plans = list(plans)
    lowest = min(map(rank_days, plans), default=1.0)
    return sorted(plans, key=lambda p: _rank_key(p, lowest))


def rank_days(p: Plan) -> float:
    return p.days * (TIGHT_PENALTY if p.memory_share > TIGHT else 1.0)


def _rank_key(p: Plan, lowest_days: float) -> tuple[float, ...]:
    """In the order of RANKED_BY; plans that are equal in all of these go by their days."""
    time_steps = int(math.log(max(rank_days(p) / (lowest_days or 1e-9), 1.0)) / TIE)
    return time_steps, -p.layout.data, p.layout.accumulation, _mechanisms(p), p.memory.needed, p.days


def _mechanisms(p: Plan) -> int:
    layout = p.layout
    degrees: list[int] = [getattr(layout, axis) for axis in AXES]
    kinds = (layout.offload, layout.shard, p.recompute)
    return sum(degree > 1 for degree in degrees) + sum(kind != "none" for kind in kinds)


def _too_big(p: Plan) -> Rejected:
    largest = sorted(p.memory_terms.items(), key=lambda item: -item[1])[:2]
    terms = ", ".join(f"{name} {print_bytes(size)}" for name, size in largest)
    return Rejected(
        candidate=p.candidate,
        reason=f"needs {p.memory_text} ({terms})",
        memory_gib=p.memory.needed / GIB,
        from_recipe=p.from_recipe,
    )


def _explain(task: PlanTask, ranked: Sequence[Plan], fitting: int) -> list[Plan]:
    """The preferred plan, then the best of each other family and the recipe's own layout by time, with reasons."""
    if not ranked:
        return []
    families: dict[object, Plan] = {}
    for p in ranked:
        families.setdefault("recipe" if p.from_recipe else p.candidate.family, p)
    first, *others = families.values()
    lowest, fastest = min(map(rank_days, ranked)), min(ranked, key=lambda p: p.days)
    explained = []
    for number, p in enumerate((first, *sorted(others, key=lambda p: p.days)), 1):
        if number > 1:
            p = compare_with_first(p, first, lowest)
            reason = f"{p.reason}; {_fit_text(p)}"
        else:
            reason = _first_reason(task, p, fastest, _ranked_by(fastest, first, lowest), fitting)
        own = "the recipe's layout; " if p.from_recipe else ""
        explained.append(replace(p, rank=number, reason=own + reason))
    return explained


def compare_with_first(p: Plan, first: Plan, lowest_days: float) -> Plan:
    """The plan with the reason why it is not the first: `3.0 % slower: +0.51 s/step in matrix products`, or why it
    ranks below although it is not slower. `lowest_days`: of all plans, as `rank` counts them."""
    slower = p.days / first.days - 1 if first.days else 0.0
    if slower <= 0:
        speed = f"{print_share(-slower)} faster by the estimate" if slower < -EQUAL else "as fast"
        ranked_by = _ranked_by(p, first, lowest_days)
        reason = f"{speed}, not preferred: {_drawback(p, first, ranked_by)}" if ranked_by else speed
        return replace(p, slower=slower, ranked_by=ranked_by, reason=reason)
    name, own_seconds, first_seconds = max(term_differences(p, first), key=lambda term: term[1] - term[2])
    extra = own_seconds - first_seconds
    causes = [f"{extra:{'+,.0f' if extra >= 10 else '+.2g'}} s/step in {name}"] if extra > 0 else []
    if p.layout.data < first.layout.data and p.layout.accumulation > first.layout.accumulation:
        texts = _differences(p, first)
        causes.append(f"{texts['replicas']}, so {texts['accumulation']}")
    speed = f"{print_share(slower)} slower" if slower > EQUAL else "as fast"
    reason = speed + (f": {', '.join(causes)}" if causes else "")
    return replace(p, slower=slower, ranked_by="time", reason=reason)


def _ranked_by(p: Plan, first: Plan, lowest_days: float) -> str:
    """What puts `p`, which is not slower, below `first`: the first key in which they differ."""
    keys = zip(RANKED_BY, _rank_key(p, lowest_days), _rank_key(first, lowest_days), strict=False)
    name = next((name for name, own, best in keys if own != best), "")
    return "tight memory" if name == "time" else name


def _fit_text(p: Plan) -> str:
    text = f"fits in {p.memory_text}"
    text += ", which is tight: measure first" if p.memory_share > TIGHT else ""
    if p.layout.offload != "none":
        text += "; nothing fits without offload; its copies are timed at an assumed 20 GB/s to host memory"
    return text


def most_replicas(task: PlanTask) -> int:
    """Replicas that divide both the devices and every batch of the run."""
    batches = [] if task.size.sequences is None else [task.size.sequences, *task.size.smaller]
    return math.gcd(task.devices, *batches)


def _first_reason(task: PlanTask, p: Plan, fastest: Plan, preferred_by: str, fitting: int) -> str:
    """`fastest of 214 that fit: 62% of a step is matrix products`, or which layout is faster and why it is not
    first. Where an awkward batch limits the replicas, no layout is called fastest or preferred: with another batch
    others may be better."""
    total, terms = p.step.seconds, p.step.terms
    largest = max(terms, key=terms.__getitem__)
    spent = f"{print_share(terms[largest] / total, digits=0)} of a step is {largest}"
    spent += f", {print_share(p.step.exposed_communication / total, digits=0)} waiting for other devices"
    spent += f", {print_share(p.step.bubble / total, digits=0)} pipeline bubble" if p.step.bubble else ""
    is_fastest, replicas, sequences = p.days <= fastest.days, most_replicas(task), task.size.sequences
    title = f"{'fastest' if is_fastest else 'preferred'} of {fitting:,} that fit"
    if sequences is not None and replicas < min(task.devices, sequences):
        title = f"first of {fitting:,} that fit with this batch, whose {sequences:,} sequences divide over at most "
        title += f"{replicas:,} replica{'s' * (replicas > 1)} of {task.devices // replicas:,} devices"
    reason = f"{title}: {spent}; {_fit_text(p)}"
    if is_fastest:
        return reason
    share = 1 - fastest.days / p.days
    speed = "as fast" if share < 0.0005 else f"{print_share(share)} faster"
    faster = f"{speed}, but has {_drawback(fastest, p, preferred_by)}"
    return f"{reason}; {fastest.candidate.describe()} is {faster}"


def _differences(p: Plan, first: Plan) -> dict[str, str]:
    mine, other = p.layout, first.layout
    return {
        "replicas": f"{counted(mine.data, 'replica')} instead of {other.data:,}",
        "accumulation": f"{mine.accumulation} micro-batches in a row instead of {other.accumulation}",
        "mechanisms": f"more mechanisms ({_mechanisms(p)} instead of {_mechanisms(first)})",
        "memory": f"{(p.memory.needed - first.memory.needed) / GIB:+.1f} GiB of memory",
    }


def _drawback(p: Plan, first: Plan, ranked_by: str) -> str:
    texts = _differences(p, first)
    tight = f"tight memory (counts as {print_share(TIGHT_PENALTY - 1, digits=0)} slower)"
    parts = [tight] if p.memory_share > TIGHT >= first.memory_share else []
    return " and ".join([*parts, *([texts[ranked_by]] if ranked_by in texts else [])])


def term_differences(p: Plan, best: Plan) -> list[tuple[str, float, float]]:
    """The terms of a step, the largest difference first: name, seconds in `p` and in `best`.

    Both do the same global batch, so seconds per step compare; without a fixed batch they are scaled to the same
    tokens."""
    scale = best.batch_tokens / p.batch_tokens
    names = dict.fromkeys((*p.step.terms, *best.step.terms))
    terms = [(name, p.step.terms.get(name, 0.0) * scale, best.step.terms.get(name, 0.0)) for name in names]
    return sorted(terms, key=lambda term: -abs(term[1] - term[2]))


def on_devices(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with this many devices of a node in use (`windlass train --devices N`)."""
    return cluster.model_copy(update={"node": cluster.node.model_copy(update={"devices": devices})})


def fill_recipe(recipe: Recipe, cluster: Cluster, *, nodes: int | None = None) -> tuple[Recipe, str]:
    """The recipe with the best layout and the recompute policy it was planned with, and the reason."""
    best = plan(recipe.model_copy(update={"layout": None}), cluster, nodes=nodes).best
    train = recipe.train.model_copy(update={"recompute": best.recompute})
    filled = recipe.model_copy(update={"layout": best.layout.config(), "train": train})
    return filled, f"{best.candidate.describe()} ({best.reason})"


def fill_layout(recipe: Recipe, cluster: Cluster, *, nodes: int | None = None) -> tuple[LayoutConfig, str]:
    """The best layout under the recipe's own recompute policy, and the reason. Raises PlanError when none fits."""
    plans = search(make_task(recipe, cluster, nodes, keep_recompute=True))
    if not plans.plans:
        # Raises an error with the closest layout if no policy helps.
        best = search(make_task(recipe, cluster, nodes)).best
        raise PlanError(
            "planner.recompute-does-not-fit",
            f"no layout fits with train.recompute = {recipe.train.recompute!r}",
            hint=f"with {best.recompute!r} this fits: {best.candidate.describe()}",
        )
    best = plans.plans[0]
    return best.layout.config(), f"{best.candidate.describe()} ({best.reason})"
