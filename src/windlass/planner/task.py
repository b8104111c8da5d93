"""What exactly is to be planned? A recipe and a cluster, reduced once to the numbers that every layout is judged by."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.clusters import Cluster, Device, load_device
from windlass.clusters.model import Grid
from windlass.config import Recipe
from windlass.cost.params import count
from windlass.cost.shapes import Shape, shape_of
from windlass.errors import ConfigError

# The published runs by which the estimates are judged (benchmarks/planner_accuracy.py) lie inside these; beyond them we extrapolate.
VALIDATED_PARAMS = (0.1e9, 410e9)
VALIDATED_DEVICES = 2304
VALIDATED_SEQ_LEN = (512, 65_536)
VALIDATED_ARCHS = {"sm_80": "A100", "sm_90": "H100 and H200"}
VALIDATED_PRECISIONS = ("bf16", "bf16_pure", "fp8")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The question, without the layout."""

    recipe: Recipe
    cluster: Cluster
    device: Device
    shape: Shape
    nodes: int
    sequences: int | None
    """Sequences of one optimizer step over all devices; None: whatever one micro-batch per replica gives."""
    limit: float
    """Bytes a program gets of one device."""
    grid: Grid
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """Recompute policies that the search may choose from."""
    warnings: tuple[str, ...] = ()

    @property
    def per_node(self) -> int:
        return self.cluster.node.devices

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def seq_len(self) -> int:
        return self.recipe.data.seq_len

    def tokens(self, batch_tokens: int) -> float:
        """Tokens of the whole run."""
        data, train = self.recipe.data, self.recipe.train
        if train.steps is not None:
            return float(train.steps * batch_tokens)
        assert data.tokens is not None  # config.check has asked for one of the two
        return float(data.tokens)


def make_task(recipe: Recipe, cluster: Cluster, nodes: int | None = None, *, keep_recompute: bool = False) -> Task:
    """Check what does not depend on the layout, and gather the warnings that every plan carries.

    `keep_recompute`: only the recipe's own policy; otherwise it is one of those tried."""
    wanted = recipe.nodes if nodes is None else nodes
    _check_nodes(wanted, cluster)
    device = load_device(cluster.device)
    shape = shape_of(recipe.model)
    data = recipe.data
    if recipe.train.steps is None and data.tokens == 0:
        raise ConfigError(
            "planner.data-tokens-run-over",
            "data.tokens is 0: a run over no tokens takes no time and no energy",
            hint="give the tokens to train on (450B)",
        )
    task = Task(
        recipe=recipe,
        cluster=cluster,
        device=device,
        shape=shape,
        nodes=wanted,
        sequences=None if data.batch_tokens is None else data.batch_tokens // data.seq_len,
        limit=float(device.usable_memory or device.memory * 0.98),
        grid=_grid(recipe, cluster),
        recomputes=_recomputes(recipe.train.recompute, keep_recompute),
    )
    if task.devices > task.per_node and cluster.links.inter_gbs_per_node is None:
        raise ConfigError(
            "planner.links-inter-gbs-per",
            f"{cluster.name}: links.inter_gbs_per_node is unknown, so {wanted} nodes cannot be planned",
            hint=f"plan 1 node ({task.per_node} devices), or give the figure in ~/.config/windlass/clusters/{cluster.name}.toml",
        )
    return Task(**{**task.__dict__, "warnings": tuple(_warnings(task))})


def _recomputes(given: str, keep: bool) -> tuple[str, ...]:
    if keep:
        return (given,)
    return ("none", "selective", "full", "budget") if given == "budget" else ("none", "selective", "full")


def _check_nodes(nodes: int, cluster: Cluster) -> None:
    if nodes < 1:
        raise ConfigError(
            "planner.nodes-machine-plan", f"{nodes} nodes is not a machine to plan for", hint="the smallest number is 1"
        )
    if cluster.nodes is not None and nodes > cluster.nodes:
        raise ConfigError(
            "planner.nodes",
            f"{nodes:,} nodes are more than {cluster.name} has ({cluster.nodes:,})",
            hint=f"the largest number is {cluster.nodes:,}",
        )


def _grid(recipe: Recipe, cluster: Cluster) -> Grid:
    energy = recipe.energy
    given = {"pue": energy.pue, "g_per_kwh": energy.grid_g_per_kwh, "market_g_per_kwh": energy.market_g_per_kwh}
    return cluster.grid.model_copy(update={key: value for key, value in given.items() if value is not None})


def _warnings(task: Task) -> list[str]:
    return [*outside_validated(task), *_site_limits(task), *_assumptions(task)]


def outside_validated(task: Task) -> list[str]:
    """In which respects is this question unlike every run that the estimates were compared with?"""
    total = count(task.shape).total
    low, high = VALIDATED_PARAMS
    found = []
    if not low <= total <= high:
        found.append(f"{total / 1e9:.3g}B parameters (compared: {low / 1e9:g}B to {high / 1e9:g}B)")
    if task.devices > VALIDATED_DEVICES:
        found.append(f"{task.devices:,} devices (compared: up to {VALIDATED_DEVICES:,})")
    if not VALIDATED_SEQ_LEN[0] <= task.seq_len <= VALIDATED_SEQ_LEN[1]:
        found.append(f"seq_len {task.seq_len:,} (compared: {VALIDATED_SEQ_LEN[0]:,} to {VALIDATED_SEQ_LEN[1]:,})")
    if task.device.arch not in VALIDATED_ARCHS:
        found.append(f"device {task.device.name} (compared: {', '.join(VALIDATED_ARCHS.values())})")
    if task.recipe.train.precision not in VALIDATED_PRECISIONS:
        found.append(f"precision {task.recipe.train.precision} (compared: {', '.join(VALIDATED_PRECISIONS)})")
    if task.recipe.data.mask_documents and task.shape.arch != "retnet":
        found.append("data.mask_documents (the time of its attention kernel was not measured)")
    if task.shape.arch == "retnet":
        found.append("a RetNet (compared: attention models only)")
    return [f"outside the validated range: {'; '.join(found)}. Measure before relying on it."] if found else []


def _site_limits(task: Task) -> list[str]:
    slurm = task.cluster.slurm
    wanted = task.recipe.launch.partition or (slurm.partition if slurm else None)
    most = [p.max_nodes for p in (slurm.partitions if slurm else []) if p.gpus and p.name == wanted]
    if most and all(limit is not None and limit < task.nodes for limit in most):
        return [f"{task.nodes} nodes are more than partition {wanted} gives one job ({max(m for m in most if m)})"]
    return []


def _assumptions(task: Task) -> list[str]:
    found = []
    if task.recipe.model.assumed:
        found.append(f"assumed by the recipe's author: model.{', model.'.join(task.recipe.model.assumed)}")
    unsure = [
        key
        for key, source in {**task.device.sources, **task.cluster.sources}.items()
        if source.status in ("unverified", "assumed")
        and key
        in (
            "bf16_tflops",
            "bandwidth_gbs",
            "usable_memory",
            "links",
            "links.inter_gbs_per_node",
            "links.intra_gbs",
            "grid.pue",
        )
    ]
    if unsure:
        found.append(f"not verified on the machine: {', '.join(unsure)} (windlass clusters {task.cluster.name})")
    return found
