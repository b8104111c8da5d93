"""Speed of a recipe on fewer and more nodes: with the same batch (strong scaling) or a batch that grows (weak
scaling)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from windlass.clusters import Cluster
from windlass.config import Recipe
from windlass.errors import WindlassError
from windlass.layout.types import AXES
from windlass.planner.search import Plan, search
from windlass.planner.task import make_task


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    nodes: int
    devices: int
    best: Plan
    # By kind of sharding: the best without tensor, pipeline and context parallelism. A kind that does not fit is
    # absent.
    kinds: dict[str, Plan]

    def tokens_per_second(self, kind: str | None = None) -> float | None:
        p = self.best if kind is None else self.kinds.get(kind)
        return None if p is None else p.step.tokens_per_second_per_device * self.devices


def node_counts(nodes: int, available: int | None) -> list[int]:
    """Numbers of nodes around the recipe's: powers of two and simple multiples, up to what the cluster has."""
    counts = {2**power for power in range(11)}
    counts |= {nodes * factor for factor in (1, 2, 4, 8)} | {nodes // d for d in (2, 4, 5, 10) if nodes % d == 0}
    return sorted(n for n in counts if 1 <= n <= min(available or 10**9, max(8, 8 * nodes)))


def scaling(recipe: Recipe, cluster: Cluster, counts: Iterable[int], *, weak: bool = False) -> list[ScalingPoint]:
    """Counts on which the batch cannot be divided or nothing fits are omitted."""
    points = []
    for nodes in counts:
        try:
            task = make_task(recipe, cluster, nodes)
            if weak and task.size.sequences is not None:
                sequences = max(1, round(task.size.sequences * nodes / recipe.nodes))
                task = replace(task, size=replace(task.size, sequences=sequences))
            plans = search(task).plans
        except WindlassError:
            continue
        if plans:
            simple = [p for p in plans if all(getattr(p.layout, axis) == 1 for axis in AXES)]
            kinds = {p.layout.shard: p for p in reversed(simple)}  # the first of each kind is the best
            points.append(ScalingPoint(nodes=nodes, devices=task.devices, best=plans[0], kinds=kinds))
    return points
