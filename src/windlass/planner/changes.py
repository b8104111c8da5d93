"""What a small change of the recipe would gain, and which changes make a model fit. Each is priced by a search."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from windlass.clusters import Cluster
from windlass.config import Recipe
from windlass.cost.flops import flops_per_token
from windlass.errors import PlanError
from windlass.layout.resolve import complete_layout
from windlass.layout.rules import nearest_batches
from windlass.layout.types import Layout
from windlass.planner.candidates import enumerate_candidates, legal_degrees, problems
from windlass.planner.search import TIE, Plan, Plans, estimate_all, plan, rank
from windlass.planner.task import PlanTask, make_task
from windlass.units import divisors, print_rate, print_share

# A batch or model that differs more is another experiment. A batch is proposed all the same where no layout divides
# the recipe's own.
MAX_CHANGE = 0.125
SHORTEST_SEQ_LEN = 512


@dataclass(frozen=True, kw_only=True)
class RecipeChange:
    """Recipe keys with another value, and the plan that follows."""

    values: dict[str, Any]
    plan: Plan
    task: PlanTask
    # Model FLOP/s of all devices, relative to the plan without the change; None where there is none.
    gain: float | None = None

    @property
    def work_rate(self) -> float:
        return _work_rate(self.plan, self.task)

    @property
    def pays(self) -> bool:
        """It makes a plan possible, or gains more than the estimate's error."""
        return self.gain is None or self.gain > TIE

    @property
    def overrides(self) -> list[str]:
        """As a command line takes them."""
        return [f"{key}={value}" for key, value in self.values.items()]

    def describe(self) -> str:
        """`nodes=16: none, micro_batch 8, 62,000 tokens/s per device (+15 % in total), 30 GiB of 93.1 GiB`"""
        p = self.plan
        gain = "" if self.gain is None else f" ({print_share(self.gain, digits=0, signed=True)} in total)"
        return (
            f"{' '.join(self.overrides)}: {p.candidate.describe()}, "
            f"{print_rate(p.step.tokens_per_second_per_device)} per device{gain}, {p.memory_text}"
        )

    def advise(self, batch_tokens: int) -> str:
        """Of another batch than `batch_tokens`."""
        return (
            f"Recommended: --adjust ({print_share(self.plan.batch_tokens / batch_tokens - 1, signed=True)} tokens per step). "
            f"{self.describe()}. The layouts below keep the batch as it is."
        )


def _work_rate(p: Plan, task: PlanTask) -> float:
    return p.step.tokens_per_second_per_device * task.devices * flops_per_token(task.model, task.seq_len)


def _chosen(plans: Plans) -> Plan | None:
    """The plan that a run would use: the recipe's own layout or the best; None where it does not fit."""
    if plans.task.recipe.layout is not None:
        return next((p for p in plans.plans if p.from_recipe), None)
    return plans.plans[0] if plans.plans else None


def _with_values(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        update = {table: getattr(recipe, table).model_copy(update={name: value})} if table else {name: value}
        recipe = recipe.model_copy(update=update)
    return recipe


def _price(task: PlanTask, before: Plan | None, values: dict[str, Any]) -> RecipeChange | None:
    """None where nothing is valid or fits after the change either."""
    try:
        plans = plan(
            _with_values(task.recipe, {"nodes": task.nodes, **values}), task.cluster, engine_profile=task.engine_profile
        )
    except PlanError:
        return None
    chosen = _chosen(plans)
    if chosen is None:
        return None
    gain = None if before is None else _work_rate(chosen, plans.task) / _work_rate(before, task) - 1
    return RecipeChange(values=values, plan=chosen, task=plans.task, gain=gain)


def _fastest(changes: Iterable[RecipeChange | None]) -> RecipeChange | None:
    """Of those that are equally fast within the estimate's error the first, which is the nearest to the recipe."""
    priced = [change for change in changes if change is not None]
    best = max((change.work_rate for change in priced), default=0.0)
    return next((change for change in priced if change.work_rate * (1 + TIE) >= best), None)


def small_changes(plans: Plans) -> list[RecipeChange]:
    """What would gain more than the estimate's error: another batch, fewer nodes, or counts of the model that leave
    tensor parallelism out or pipeline stages uneven."""
    task, before = plans.task, _chosen(plans)
    changes = [
        better_batch(task, before),
        _fewer_nodes(task, before),
        _other_kv_heads(task, before),
        _other_layers(task, before),
    ]
    if before is not None and before.layout.offload != "none":
        changes.append(_price(task, before, {"optim.moments": "bf16"}))
    return [change for change in changes if change is not None and change.pays]


def recommended(changes: Iterable[RecipeChange]) -> RecipeChange | None:
    """Of `small_changes`, the one to make before a layout is chosen: another batch. It changes neither the model nor
    the devices, and without it a count, not the model, decides how the model is divided (512 sequences on 88 devices:
    a pipeline of 11)."""
    return next((change for change in changes if "data.batch_tokens" in change.values), None)


def better_batch(task: PlanTask, before: Plan | None) -> RecipeChange | None:
    """The nearest batch that the layout (the recipe's or one of the planner's) divides without loss; None where the
    recipe's own is as good. `before` is the plan with the recipe's own, None where it has none."""
    sequences, wish = task.size.sequences, task.recipe.layout
    if sequences is None or task.size.smaller or (wish is None and sequences % task.devices == 0):
        return None
    layouts = [Layout(data=task.devices // tensor) for tensor in legal_degrees(task, "tensor", divisors(task.per_node))]
    layouts = layouts if wish is None else [complete_layout(wish, task.size)]
    batches = {batch for layout in layouts for batch in nearest_batches(layout, task.size)} - {sequences}
    nearest_first = sorted(batches, key=lambda batch: (abs(batch - sequences), -batch))
    near = [batch for batch in nearest_first if abs(batch / sequences - 1) <= MAX_CHANGE]
    # A layout of the recipe, or a batch that no layout divides: the nearest. Otherwise the fastest of the near ones.
    tried = nearest_first[:1] if wish is not None or (before is None and not near) else near
    change = _fastest(_price(task, before, {"data.batch_tokens": batch * task.seq_len}) for batch in tried)
    return change if change is not None and change.pays else None


def _fewer_nodes(task: PlanTask, before: Plan | None) -> RecipeChange | None:
    """The largest number of nodes below the task's whose devices divide the batch."""
    sequences = task.size.sequences
    if sequences is None or task.recipe.layout is not None or sequences % task.devices == 0:
        return None
    counts = (n for n in range(task.nodes - 1, 0, -1) if sequences % (n * task.per_node) == 0)
    return next((_price(task, before, {"nodes": n}) for n in counts), None)


def _other_kv_heads(task: PlanTask, before: Plan | None) -> RecipeChange | None:
    """The nearest number of key-value heads that two devices can divide, where it is all that stands in the way."""
    heads, kv_heads = task.recipe.model.heads, task.recipe.model.kv_heads
    if heads is None or kv_heads is None or heads % 2 or kv_heads % 2 == 0 or task.per_node % 2:
        return None
    even = [count for count in divisors(heads) if count % 2 == 0]
    nearest_first = [*[n for n in even if n < kv_heads][-1:], *[n for n in even if n > kv_heads][:1]]
    return _fastest(_price(task, before, {"model.kv_heads": count}) for count in nearest_first)


def _other_layers(task: PlanTask, before: Plan | None) -> RecipeChange | None:
    """The nearest number of layers that makes the stages of the pipeline equal."""
    layers = task.recipe.model.layers
    if before is None or layers is None or layers % before.layout.num_stages == 0:
        return None
    below = layers // before.layout.num_stages * before.layout.num_stages
    near = [n for n in (below, below + before.layout.num_stages) if abs(n / layers - 1) <= MAX_CHANGE]
    return _fastest(_price(task, before, {"model.layers": count}) for count in near)


def adjust_batch(recipe: Recipe, cluster: Cluster, nodes: int | None = None) -> tuple[Recipe, str | None]:
    """The recipe with `better_batch`, and the change in one line; None where the recipe keeps its own."""
    task, before = make_task(recipe, cluster, nodes), None
    try:
        before = _chosen(plan(recipe, cluster, nodes=nodes))
    except PlanError as error:
        if error.code != "layout.batch-not-divisible":
            raise
    change = better_batch(task, before)
    if change is None:
        return recipe, None
    old, new = (task.size.sequences or 0) * task.seq_len, change.plan.batch_tokens
    gain = "" if change.gain is None else f", {print_share(change.gain, digits=0, signed=True)} tokens/s"
    note = f"data.batch_tokens {old:,} -> {new:,} ({print_share(new / old - 1, signed=True)}{gain}): "
    note += f"{new // task.seq_len:,} sequences for {task.devices:,} devices"
    return _with_values(recipe, change.values), note


def ways_to_fit(plans: Plans) -> list[RecipeChange]:
    """The smallest change of each kind with which something fits, alone or else together with bf16 moments. Those on
    the same nodes first, then the fewest keys, then the fastest."""
    task = replace(plans.task, recipe=plans.task.recipe.model_copy(update={"layout": None}))
    bf16 = {"optim.moments": "bf16"} if task.recipe.optim.moments == "fp32" else {}
    policies = ("selective", "full") if len(task.recomputes) == 1 else ()  # otherwise the search has tried them
    halves = [task.seq_len >> power for power in range(1, 16) if task.seq_len % (1 << power) == 0]
    doubles = [task.nodes << power for power in range(1, 16)] if task.cluster.links.inter_gbs_per_node else []
    kinds: tuple[tuple[str, list[Any]], ...] = (
        ("train.recompute", [policy for policy in policies if policy != task.recipe.train.recompute]),
        ("data.seq_len", [seq_len for seq_len in halves if seq_len >= SHORTEST_SEQ_LEN]),
        ("nodes", [nodes for nodes in doubles if nodes <= (task.cluster.nodes or 4096)]),
    )
    ways = _first_fitting(task, [bf16] if bf16 else [])
    # What the search does not try itself: on one device the optimizer, on several the weights too.
    offload = "optimizer" if task.devices == 1 else "parameters"
    valid = (c for c in enumerate_candidates(task, offload=offload) if not problems(task, c))
    for p in rank(p for p in estimate_all(task, valid)[0] if p.fits)[:1]:
        layout = p.layout.config().model_dump(exclude_defaults=True)
        change = {**{f"layout.{key}": value for key, value in layout.items()}, "train.recompute": p.recompute}
        ways.append(RecipeChange(values=change, plan=p, task=task))
    for key, values in kinds:
        alone = [{key: value} for value in values]
        ways += _first_fitting(task, [*alone, *({**bf16, **change} for change in alone if bf16)])
    return sorted(ways, key=lambda way: (way.task.nodes, len(way.values), -way.work_rate))


def _first_fitting(task: PlanTask, options: list[dict[str, Any]]) -> list[RecipeChange]:
    changes = (_price(task, None, values) for values in options)
    return list(islice((change for change in changes if change is not None), 1))


def nothing_fits(plans: Plans, ways: list[RecipeChange] | None = None) -> PlanError:
    """The error when nothing fits: by how much the closest misses, and the changes with which something would
    (`ways_to_fit`, unless given)."""
    task = plans.task
    if not plans.rejected:
        return PlanError(
            "planner.no-valid-layout",
            f"no layout of {task.recipe.name} on {task.nodes} nodes of {task.cluster.name} is valid",
            hint='use --why "shard=full" to see which rules forbid it',
        )
    too_big = [r for r in plans.rejected if r.memory_gib is not None]
    closest = min(too_big, key=lambda r: r.memory_gib or 0.0, default=plans.rejected[0])
    ways = ways_to_fit(plans) if ways is None else ways
    hint = "each of these changes makes it fit:" + "".join(f"\n  {way.describe()}" for way in ways)
    if not ways:
        hint = "bf16 moments, offload, full recomputation, shorter sequences and more nodes are not enough: "
        hint += "make the model smaller"
    return PlanError(
        "planner.nothing-fits",
        f"no layout of {task.recipe.name} fits on {task.nodes} x {task.per_node} {task.device.name}: "
        f"the closest layout ({closest.candidate.describe()}) {closest.reason}",
        hint=hint,
    )
