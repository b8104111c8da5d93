"""What does one batch job ask for? Recipe + cluster -> a frozen value that `script.render` turns into text. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from windlass.clusters.model import Cluster, Partition, Storage
from windlass.config import Recipe

DEFAULT_LEAD_SECONDS = 300.0
"""Signal this long before the wall-time limit while no save has been timed: the lead that LUMI's guide uses."""
DEFAULT_SECONDS = 24 * 3600.0
"""Wall time when neither the recipe nor the cluster file says one."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where the commands find Python: modules, then a virtual environment or a container."""

    kind: str = "module"
    """venv, module or container."""
    modules: tuple[str, ...] = ()
    venv: str | None = None
    runtime: str = "none"
    image: str | None = None
    gpu_flag: str = ""
    binds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Copy of the token store to a faster file system before the ranks start."""

    source: str
    target: str
    per_node: bool
    """The target is a node's own disk: every node copies."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """One batch job. Strings may hold shell variables of the compute node (`$TMPDIR`)."""

    name: str
    kind: str = "train"
    """train, array, merge, command or doctor."""
    run_dir: str
    workdir: str
    command: tuple[str, ...]
    """What every task starts, without launcher or container."""
    nodes: int = 1
    tasks_per_node: int = 1
    devices_per_node: int = 0
    """0: no accelerators are asked for."""
    cpus_per_task: int | None = None
    seconds: float = DEFAULT_SECONDS
    lead_seconds: float = DEFAULT_LEAD_SECONDS
    lead_why: str = ""
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    mem: str | None = None
    requeue: bool = False
    torchrun: bool = False
    chain: str = "none"
    """none, pre (all links submitted at once) or self (each link submits the next)."""
    links: int = 1
    array: int | None = None
    environment: Environment = field(default_factory=Environment)
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    staging: Staging | None = None
    tracker_env: Mapping[str, str] = field(default_factory=dict)
    energy_flags: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    """Comment lines at the top: what was chosen and why."""

    @property
    def job_file(self) -> str:
        return str(PurePosixPath(self.run_dir) / ("job.sh" if self.kind == "train" else f"{self.kind}.sh"))

    @property
    def log_pattern(self) -> str:
        """With SLURM's own placeholders: %j is the job, %A_%a the array and its task."""
        return str(PurePosixPath(self.run_dir) / "logs" / ("%A_%a.out" if self.array else "%j.out"))

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


def train_job(
    recipe: Recipe,
    cluster: Cluster,
    run_dir: Path | str,
    *,
    workdir: Path | str,
    overrides: Sequence[str] = (),
    layout_words: Sequence[str] = (),
    active_venv: str | None = None,
    saved_seconds: float | None = None,
    about: Sequence[str] = (),
) -> Job:
    """The job of a training run (one link of its chain)."""
    launch, slurm = recipe.launch, cluster.slurm
    partition, qos = choose_queue(recipe, cluster)
    limit = find_partition(cluster, partition, qos)
    seconds = launch.time or (limit.max_time if limit and limit.max_time else DEFAULT_SECONDS)
    lead, lead_why = signal_lead(recipe, seconds, saved_seconds)
    per_node = launch.starter == "torchrun" or bool(slurm and slurm.tasks_mode == "node")
    staging = choose_staging(recipe, cluster)
    chain = "self" if launch.chain == "self" else "pre" if launch.chain not in (0, 1) else "none"
    words = [*overrides, *layout_words, *((f"data.store={staging.target}",) if staging else ())]
    command = ["windlass", "train", str(PurePosixPath(str(run_dir)) / "recipe.toml"), *words, "--run", str(run_dir)]
    cpus = (slurm.cpus_per_task if slurm else None) or (
        cluster.node.cores_usable or cluster.node.cores
    ) // cluster.node.devices
    return Job(
        name=recipe.name,
        run_dir=str(run_dir),
        workdir=str(workdir),
        command=tuple(command),
        nodes=recipe.nodes,
        tasks_per_node=1 if per_node else cluster.node.devices,
        devices_per_node=cluster.node.devices,
        cpus_per_task=cpus * cluster.node.devices if per_node else cpus,
        seconds=seconds,
        lead_seconds=lead,
        lead_why=lead_why,
        partition=partition,
        qos=qos,
        account=launch.account,
        mem=None if slurm is None or slurm.mem_forbidden else slurm.mem,
        requeue=launch.requeue,
        torchrun=per_node,
        chain=chain,
        links=launch.chain if isinstance(launch.chain, int) and launch.chain > 1 else 1,
        environment=choose_environment(recipe, cluster, active_venv),
        env=launch.env,
        sbatch=launch.sbatch,
        staging=staging,
        tracker_env=tracker_env(recipe, cluster, run_dir),
        energy_flags=tuple(cluster.energy.ear_flags) if recipe.energy.enabled else (),
        about=tuple(about),
    )


def choose_queue(recipe: Recipe, cluster: Cluster) -> tuple[str | None, str | None]:
    """Partition and QOS: the recipe's, else the cluster's default, else the first queue that takes this many nodes."""
    slurm, launch = cluster.slurm, recipe.launch
    if slurm is None:
        return launch.partition, launch.qos
    partition = launch.partition or slurm.partition
    if launch.qos is not None or launch.partition is not None:
        return partition, launch.qos or _qos_of(cluster, partition)
    default = find_partition(cluster, partition, slurm.qos)
    if default is None or fits_nodes(default, recipe.nodes):
        return partition, slurm.qos
    other = next((p for p in slurm.partitions if p.gpus and p.name == partition and fits_nodes(p, recipe.nodes)), None)
    other = other or next((p for p in slurm.partitions if p.gpus and fits_nodes(p, recipe.nodes)), None)
    return (other.name, other.qos) if other else (partition, slurm.qos)


def _qos_of(cluster: Cluster, partition: str | None) -> str | None:
    slurm = cluster.slurm
    if slurm is None or partition == slurm.partition:
        return slurm.qos if slurm else None
    found = next((p for p in slurm.partitions if p.name == partition), None)
    return found.qos if found else None


def fits_nodes(partition: Partition, nodes: int) -> bool:
    return partition.min_nodes <= nodes and (partition.max_nodes is None or nodes <= partition.max_nodes)


def find_partition(cluster: Cluster, name: str | None, qos: str | None) -> Partition | None:
    """The queue of this name and QOS; where a partition is listed without a QOS, any QOS will do."""
    rows = [p for p in (cluster.slurm.partitions if cluster.slurm else []) if p.name == name]
    exact = next((p for p in rows if p.qos == qos), None)
    return exact or next((p for p in rows if p.qos is None or qos is None), None)


def signal_lead(recipe: Recipe, seconds: float, saved_seconds: float | None) -> tuple[float, str]:
    """How early to warn: three times the longest save so far and a minute, never more than a third of the wall time."""
    given = recipe.launch.signal_lead if recipe.launch.signal_lead != "auto" else recipe.save.lead
    cap = max(30.0, seconds / 3)
    if given != "auto":
        return min(float(given), cap), "as the recipe says"
    if saved_seconds is not None:
        lead = min(cap, max(60.0, 60.0 + 3 * saved_seconds))
        return math.ceil(lead), f"60 s and three times the longest save so far ({saved_seconds:.0f} s)"
    return min(DEFAULT_LEAD_SECONDS, cap), "no save has been timed yet"


def choose_environment(recipe: Recipe, cluster: Cluster, active_venv: str | None) -> Environment:
    launch, box = recipe.launch, cluster.container
    modules = tuple(launch.modules if launch.modules is not None else cluster.modules)
    kind = launch.environment
    if kind == "auto":
        kind = "container" if launch.container else "venv" if launch.venv or active_venv else "module"
    if kind == "container":
        if launch.modules is None:
            modules += tuple(box.modules)
        runtime = launch.runtime or (box.runtime if box.runtime != "none" else "apptainer")
        image = launch.container or box.image_hint or None
        flag = "" if runtime == "charliecloud" else box.gpu_flag
        return Environment(
            kind=kind, modules=modules, runtime=runtime, image=image, gpu_flag=flag, binds=(*box.binds, *launch.binds)
        )
    return Environment(kind=kind, modules=modules, venv=(launch.venv or active_venv) if kind == "venv" else None)


def fast_storage(cluster: Cluster) -> Storage | None:
    """The fast file system that all nodes share, else a node's own fast disk."""
    fast = [s for s in cluster.storage.values() if s.fast]
    return next((s for s in fast if not node_local(s)), next(iter(fast), None))


def node_local(storage: Storage) -> bool:
    return storage.path.startswith(("$TMPDIR", "/tmp", "$SLURM_TMPDIR", "$LOCALSCRATCH"))


def choose_staging(recipe: Recipe, cluster: Cluster) -> Staging | None:
    """Whether the store is copied first: as the recipe says, else where the cluster has a fast file system for all nodes."""
    fast, store = fast_storage(cluster), recipe.data.store
    if fast is None or store is None or recipe.launch.stage_data is False or cluster.slurm is None:
        return None
    local = node_local(fast)
    already = store.startswith(fast.path.rstrip("/") + "/")
    if already or (recipe.launch.stage_data is None and local):
        return None
    why = (
        "a node's own disk, as the recipe asks" if local else f"the fast file system ({fast.use_for or 'for hot data'})"
    )
    return Staging(source=store, target=f"{fast.path}/windlass/{PurePosixPath(store).name}", per_node=local, why=why)


def tracker_env(recipe: Recipe, cluster: Cluster, run_dir: Path | str) -> dict[str, str]:
    """Offline unless the cluster's nodes reach the internet and the recipe wants it: a hub time-out costs minutes per rank."""
    online = recipe.trackers.online and cluster.network.internet == "yes"
    found = {} if online else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if recipe.trackers.wandb:
        found |= {
            "WANDB_MODE": "online" if online else "offline",
            "WANDB_DIR": str(PurePosixPath(str(run_dir)) / "trackers"),
            "WANDB_RUN_ID": recipe.name,
            "WANDB_RESUME": "allow",
        }
    return found
