"""What is planned: a recipe and a cluster, reduced once to the numbers that every layout is estimated with."""

from dataclasses import dataclass, replace

from windlass.clusters import Cluster, Device, load_device
from windlass.clusters.model import Grid
from windlass.config import Recipe
from windlass.cost.step import Machine
from windlass.errors import ConfigError
from windlass.layout.resolve import JobSize, complete_layout, job_size, masks_documents
from windlass.layout.rules import check_degrees
from windlass.models.presets import model_spec
from windlass.models.spec import ModelSpec

# The published runs by which the estimates are judged (benchmarks/planner_accuracy.py) lie inside these; beyond them
# we extrapolate.
VALIDATED_PARAMS = (0.1e9, 410e9)
VALIDATED_DEVICES = 2304
VALIDATED_SEQ_LEN = (512, 65_536)
VALIDATED_ARCHS = {"sm_80": "A100", "sm_90": "H100 and H200"}
VALIDATED_PRECISIONS = ("bf16", "bf16_pure", "fp8")


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """The question, without the layout."""

    recipe: Recipe
    cluster: Cluster
    device: Device
    model: ModelSpec
    nodes: int
    size: JobSize
    limit_bytes: float
    """Bytes that a program gets of one device."""
    grid: Grid
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """Recompute policies that the search may choose from."""
    warnings: tuple[str, ...] = ()

    @property
    def per_node(self) -> int:
        return self.size.devices_per_node

    @property
    def devices(self) -> int:
        return self.size.devices

    @property
    def seq_len(self) -> int:
        return self.size.seq_len

    @property
    def gpu(self) -> bool:
        return self.device.vendor != "cpu"

    @property
    def machine(self) -> Machine:
        return Machine(self.device, self.cluster.links, self.per_node, self.cluster.efficiency)

    def tokens(self, batch_tokens: int) -> float:
        """Tokens of the whole run."""
        data, train = self.recipe.data, self.recipe.train
        if train.steps is not None:
            return float(train.steps * batch_tokens)
        assert data.tokens is not None  # config.check has asked for one of the two
        return float(data.tokens)


def make_task(recipe: Recipe, cluster: Cluster, nodes: int | None = None, *, keep_recompute: bool = False) -> PlanTask:
    """Check what does not depend on the layout, and gather the warnings that every plan carries.

    `keep_recompute`: only the recipe's own policy; otherwise it is one of those tried.
    """
    nodes = recipe.nodes if nodes is None else nodes
    check_nodes(nodes, cluster)
    if recipe.train.steps is None and recipe.data.tokens == 0:
        raise ConfigError(
            "planner.no-tokens",
            "data.tokens is 0: a run over no tokens takes no time and no energy",
            hint="give the tokens to train on (450B)",
        )
    per_node = cluster.node.devices
    if nodes > 1 and cluster.links.inter_gbs_per_node is None:
        raise ConfigError(
            "planner.network-unknown",
            f"{cluster.name}: links.inter_gbs_per_node is unknown, so {nodes} nodes cannot be planned",
            hint=f"plan 1 node ({per_node} devices), or give the figure in "
            f"~/.config/windlass/clusters/{cluster.name}.toml",
        )
    device = load_device(cluster.device)
    policies = ("none", "selective", "full", *(["budget"] if recipe.train.recompute == "budget" else []))
    task = PlanTask(
        recipe=recipe,
        cluster=cluster,
        device=device,
        model=model_spec(recipe.model),
        nodes=nodes,
        size=job_size(recipe, nodes * per_node, per_node),
        limit_bytes=float(device.usable_memory or device.memory * 0.98),
        grid=_grid(recipe, cluster),
        recomputes=(recipe.train.recompute,) if keep_recompute else policies,
    )
    if recipe.layout is not None:
        check_degrees(task.model, complete_layout(recipe.layout, task.size), task.size)
    return replace(task, warnings=(*outside_validated(task), *_site_limits(task), *_assumptions(task)))


def check_nodes(nodes: int, cluster: Cluster) -> None:
    if nodes < 1:
        raise ConfigError("planner.too-few-nodes", f"--nodes must be at least 1, not {nodes}")
    if cluster.nodes is not None and nodes > cluster.nodes:
        raise ConfigError(
            "planner.too-many-nodes",
            f"{nodes:,} nodes are more than {cluster.name} has ({cluster.nodes:,})",
            hint=f"the largest number is {cluster.nodes:,}",
        )


def _grid(recipe: Recipe, cluster: Cluster) -> Grid:
    energy = recipe.energy
    overrides = {"pue": energy.pue, "g_per_kwh": energy.grid_g_per_kwh, "market_g_per_kwh": energy.market_g_per_kwh}
    return cluster.grid.model_copy(update={key: value for key, value in overrides.items() if value is not None})


def outside_validated(task: PlanTask) -> list[str]:
    """In which respects this task is unlike every run that the estimates were compared with."""
    total = task.model.params.total
    low, high = VALIDATED_PARAMS
    outside = []
    if not low <= total <= high:
        outside.append(f"{total / 1e9:.3g}B parameters (compared: {low / 1e9:g}B to {high / 1e9:g}B)")
    if task.devices > VALIDATED_DEVICES:
        outside.append(f"{task.devices:,} devices (compared: up to {VALIDATED_DEVICES:,})")
    if not VALIDATED_SEQ_LEN[0] <= task.seq_len <= VALIDATED_SEQ_LEN[1]:
        outside.append(f"seq_len {task.seq_len:,} (compared: {VALIDATED_SEQ_LEN[0]:,} to {VALIDATED_SEQ_LEN[1]:,})")
    if task.device.arch not in VALIDATED_ARCHS:
        outside.append(f"device {task.device.name} (compared: {', '.join(VALIDATED_ARCHS.values())})")
    if task.recipe.train.precision not in VALIDATED_PRECISIONS:
        outside.append(f"precision {task.recipe.train.precision} (compared: {', '.join(VALIDATED_PRECISIONS)})")
    if masks_documents(task.recipe, task.model):
        outside.append("data.mask_documents (the time of its attention kernel was not measured)")
    if not task.model.measured:
        outside.append("blocks other than attention (compared: attention models only)")
    return [f"outside the validated range: {'; '.join(outside)}. Measure before relying on it."] if outside else []


def _site_limits(task: PlanTask) -> list[str]:
    slurm = task.cluster.slurm
    partition = task.recipe.launch.partition or (slurm.partition if slurm else None)
    most = [p.max_nodes for p in (slurm.partitions if slurm else []) if p.gpus and p.name == partition]
    if most and all(limit is not None and limit < task.nodes for limit in most):
        return [f"{task.nodes} nodes are more than partition {partition} gives one job ({max(m for m in most if m)})"]
    return []


def _assumptions(task: PlanTask) -> list[str]:
    notes = []
    if task.recipe.model.assumed:
        notes.append(f"assumed by the recipe's author: model.{', model.'.join(task.recipe.model.assumed)}")
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
        notes.append(f"not verified on the machine: {', '.join(unsure)} (windlass clusters {task.cluster.name})")
    return notes
