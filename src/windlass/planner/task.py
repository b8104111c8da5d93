"""The input of the planner: a recipe and a cluster, reduced to the numbers that every estimate uses."""

from dataclasses import dataclass, replace
from functools import cached_property

from windlass.clusters import Cluster, Device, load_device
from windlass.clusters.model import Grid
from windlass.config import Recipe
from windlass.config.ramp import batch_phases
from windlass.cost.engines import AS_IN_2024, OTHER_ENGINES
from windlass.cost.step import Machine
from windlass.errors import ConfigError
from windlass.layout.resolve import JobSize, complete_layout, job_size, masks_documents
from windlass.layout.rules import check_degrees
from windlass.models.presets import model_spec
from windlass.models.spec import ModelSpec
from windlass.planner.measured import tokens_beyond
from windlass.units import print_tokens

# The published runs by which the estimates are judged (benchmarks/planner_accuracy.py) lie inside these; beyond them
# we extrapolate.
VALIDATED_PARAMS = (0.1e9, 410e9)
VALIDATED_DEVICES = 2304
VALIDATED_SEQ_LEN = (512, 65_536)
VALIDATED_ARCHS = {"sm_80": "A100", "sm_90": "H100 and H200"}
VALIDATED_PRECISIONS = ("bf16", "bf16_pure", "fp8")
# Tokens of a global batch in recent large trainings (The Ultra-Scale Playbook, Hugging Face 2025); a batch is far
# outside beyond twice or half of it. Smaller models than this train well with less.
USUAL_BATCH_TOKENS = (4e6, 60e6)
USUAL_BATCH_PARAMS = 1e9
# Figures of a device or cluster on which every estimate depends.
DECISIVE = (
    "bf16_tflops",
    "bandwidth_gbs",
    "usable_memory",
    "links",
    "links.inter_gbs_per_node",
    "links.intra_gbs",
    "grid.pue",
)


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    recipe: Recipe
    cluster: Cluster
    device: Device
    model: ModelSpec
    nodes: int
    size: JobSize
    # Usable bytes of one device.
    limit_bytes: float
    grid: Grid
    # Recompute policies that the search may choose from.
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    warnings: tuple[str, ...] = ()
    # Steps of our own engine are estimated as this engine of `cost.engines` would run them.
    engine_profile: str | None = None

    @property
    def per_node(self) -> int:
        return self.size.devices_per_node

    @property
    def devices(self) -> int:
        return self.size.devices

    @property
    def seq_len(self) -> int:
        return self.size.seq_len

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.device, self.cluster.links, self.per_node, self.cluster.efficiency)

    def phases(self, batch_tokens: int) -> list[tuple[float, int]]:
        """(tokens, batch) of each stretch of the run; `batch_tokens` where the recipe has no batch of its own."""
        data, steps = self.recipe.data, self.recipe.train.steps
        assert steps is not None or data.tokens is not None  # config.check requires one of the two
        if not data.batch_ramp:
            return [(float(data.tokens or 0) if steps is None else float(steps * batch_tokens), batch_tokens)]
        phases = batch_phases(self.recipe, data.batch_tokens or batch_tokens)
        return [(float(phase.steps * phase.batch_tokens), phase.batch_tokens) for phase in phases]


def make_task(
    recipe: Recipe,
    cluster: Cluster,
    nodes: int | None = None,
    *,
    keep_recompute: bool = False,
    engine_profile: str | None = None,
) -> PlanTask:
    """Check what does not depend on the layout, and gather the warnings that every plan carries.

    `keep_recompute`: only the recipe's own policy; otherwise it is one of those tried.
    """
    nodes = recipe.nodes if nodes is None else nodes
    check_nodes(nodes, cluster)
    if recipe.tune is not None:
        from windlass.data.complete_tune import complete_tune  # numpy: not for every plan

        recipe = complete_tune(recipe, nodes * cluster.node.devices)
    if engine_profile not in (None, *OTHER_ENGINES):
        raise ConfigError(
            "planner.unknown-engine-profile",
            f"--engine-profile {engine_profile}: not an engine that the planner knows",
            hint=f"use one of {', '.join(OTHER_ENGINES)}",
        )
    if recipe.train.steps is None and recipe.data.tokens == 0:
        raise ConfigError(
            "planner.no-tokens",
            "data.tokens is 0, so there is nothing to plan",
            hint='set data.tokens to the number of tokens to train on, such as "450B"',
        )
    per_node = cluster.node.devices
    if nodes > 1 and cluster.links.inter_gbs_per_node is None:
        raise ConfigError(
            "planner.network-unknown",
            f"{cluster.name}: links.inter_gbs_per_node is unknown, so {nodes} nodes cannot be planned",
            hint=f"plan 1 node ({per_node} devices), or set it in ~/.config/windlass/clusters/{cluster.name}.toml",
        )
    device, figures = load_device(cluster.device), recipe.energy
    grid = {"pue": figures.pue, "g_per_kwh": figures.grid_g_per_kwh, "market_g_per_kwh": figures.market_g_per_kwh}
    policies = ("none", "selective", "full", *(["budget"] if recipe.train.recompute == "budget" else []))
    task = PlanTask(
        recipe=recipe,
        cluster=cluster,
        device=device,
        model=model_spec(recipe.model),
        nodes=nodes,
        size=job_size(recipe, nodes * per_node, per_node),
        limit_bytes=float(device.usable_memory or device.memory * 0.98),
        grid=cluster.grid.model_copy(update={key: value for key, value in grid.items() if value is not None}),
        recomputes=(recipe.train.recompute,) if keep_recompute else policies,
        engine_profile=engine_profile,
    )
    if task.model.experts > 1:
        raise ConfigError(
            "planner.experts-not-priced",
            f"the model has {task.model.experts} experts per layer, whose memory and time the planner cannot predict",
            hint="write a [layout] table and measure it: the planner predicts dense models only",
        )
    if recipe.layout is not None:
        check_degrees(task.model, complete_layout(recipe.layout, task.size), task.size)
    return replace(task, warnings=tuple(_warnings(task)))


def check_nodes(nodes: int, cluster: Cluster) -> None:
    if nodes < 1:
        raise ConfigError("planner.too-few-nodes", f"--nodes must be at least 1, not {nodes}")
    if cluster.nodes is not None and nodes > cluster.nodes:
        raise ConfigError(
            "planner.too-many-nodes",
            f"{nodes:,} nodes are more than {cluster.name} has ({cluster.nodes:,})",
            hint=f"the largest number is {cluster.nodes:,}",
        )


def _warnings(task: PlanTask) -> list[str]:
    """Warnings: where the task is outside the range of runs that the estimates were compared with, limits of the site,
    and unverified figures."""
    recipe, cluster, device, total = task.recipe, task.cluster, task.device, task.model.params.total
    (smallest, largest), (shortest, longest) = VALIDATED_PARAMS, VALIDATED_SEQ_LEN
    differences = {
        f"{print_tokens(total)} parameters (compared: {print_tokens(smallest)} to {print_tokens(largest)})": not (
            smallest <= total <= largest
        ),
        f"{task.devices:,} devices (compared: up to {VALIDATED_DEVICES:,})": task.devices > VALIDATED_DEVICES,
        f"seq_len {task.seq_len:,} (compared: {shortest:,} to {longest:,})": not shortest <= task.seq_len <= longest,
        f"device {device.name} (compared: {', '.join(VALIDATED_ARCHS.values())})": device.arch not in VALIDATED_ARCHS,
        f"precision {recipe.train.precision} (compared: {', '.join(VALIDATED_PRECISIONS)})": (
            recipe.train.precision not in VALIDATED_PRECISIONS
        ),
        "data.mask_documents (priced as one document; 25 % faster where it was measured, with documents of 1,024 tokens)": masks_documents(
            recipe, task.model
        ),
        "blocks other than attention (compared: attention models only)": not task.model.measured,
    }
    outside = "; ".join(text for text, differs in differences.items() if differs)
    warnings = [f"outside the validated range: {outside}. Measure before relying on it."] if outside else []
    if task.engine_profile is not None:
        warnings.append(f"predicted for {task.engine_profile} {AS_IN_2024}, not for windlass's own engine")
    slurm = cluster.slurm
    partition = recipe.launch.partition or (slurm.partition if slurm else None)
    most = [p.max_nodes for p in (slurm.partitions if slurm else []) if p.gpus and p.name == partition]
    if most and all(limit is not None and limit < task.nodes for limit in most):
        limit = max(limit for limit in most if limit)
        warnings.append(f"{task.nodes} nodes are more than partition {partition} allows for one job ({limit})")
    batch, (small, large) = (task.size.sequences or 0) * task.seq_len, USUAL_BATCH_TOKENS
    if batch and total >= USUAL_BATCH_PARAMS and not small / 2 <= batch <= large * 2:
        usual = f"{print_tokens(small)} to {print_tokens(large)} of recent large training runs"
        warnings.append(f"a batch of {print_tokens(batch)} tokens is far outside the {usual}")
    if task.size.smaller:
        warnings.append(
            f"batch, memory, tokens/s and MFU are those of {batch:,} tokens, the largest batch of data.batch_ramp; "
            "time, energy and CO2e count every batch"
        )
    steps = recipe.train.steps
    tokens = recipe.data.tokens if steps is None else steps * batch
    warnings += tokens_beyond(tokens, task.model.params.total)
    if recipe.model.assumed:
        warnings.append(f"assumed by the recipe's author: model.{', model.'.join(recipe.model.assumed)}")
    sources = {key: source for key, source in {**device.sources, **cluster.sources}.items() if key in DECISIVE}
    unsure = ", ".join(key for key, source in sources.items() if source.status in ("unverified", "assumed"))
    if unsure:
        warnings.append(f"not verified on the machine: {unsure} (windlass clusters {cluster.name})")
    return warnings
