"""How does the speed grow with nodes? The same recipe planned on fewer and more of them: batch kept (strong) or grown along (weak)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from windlass.clusters import Cluster
from windlass.config import Recipe
from windlass.errors import WindlassError
from windlass.planner.search import Plan, Plans, search
from windlass.planner.task import make_task


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The best plan at one size; a kind of sharding that does not fit there is absent."""

    nodes: int
    devices: int
    best: Plan
    kinds: dict[str, Plan]
    """The best without tensor, pipeline and context parallelism, by kind of sharding."""

    def tokens_per_second(self, kind: str | None = None) -> float | None:
        p = self.best if kind is None else self.kinds.get(kind)
        return None if p is None else p.step.tokens_per_second_per_device * self.devices


def node_counts(nodes: int, most: int | None) -> list[int]:
    """A handful of sizes around the recipe's: powers of two and simple multiples of it."""
    wanted = (
        {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
        | {nodes * k for k in (1, 2, 4, 8)}
        | {nodes // k for k in (2, 4, 5, 10) if nodes % k == 0}
    )
    return sorted(n for n in wanted if 1 <= n <= min(most or 10**9, max(8, 8 * nodes)))


def scaling(recipe: Recipe, cluster: Cluster, counts: Iterable[int], *, weak: bool = False) -> list[ScalingPoint]:
    """Sizes at which the batch does not divide or nothing fits are left out."""
    points = []
    for nodes in counts:
        try:
            found = _at(recipe, cluster, nodes, weak)
        except WindlassError:
            continue
        if found.plans:
            points.append(
                ScalingPoint(nodes=nodes, devices=found.task.devices, best=found.plans[0], kinds=_kinds(found))
            )
    return points


def _at(recipe: Recipe, cluster: Cluster, nodes: int, weak: bool) -> Plans:
    task = make_task(recipe, cluster, nodes)
    if weak and task.size.sequences is not None:
        sequences = max(1, round(task.size.sequences * nodes / recipe.nodes))
        task = replace(task, size=replace(task.size, sequences=sequences))
    return search(task)


def _kinds(plans: Plans) -> dict[str, Plan]:
    found: dict[str, Plan] = {}
    for p in plans.plans:
        if p.layout.tensor == p.layout.pipeline == p.layout.context == 1:
            found.setdefault(p.layout.shard, p)
    return found
