"""One batch job as a frozen value, chosen from a recipe and a cluster file; `script.py` turns it into text. Pure."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from windlass.clusters.model import Cluster, Partition, Storage
from windlass.clusters.scheduler import default_account
from windlass.config import Recipe
from windlass.config.launch import LaunchConfig
from windlass.config.secret import redact_text
from windlass.config.shell import FOLDER, LINE, SLURM_NAME, VARIABLE_NAME
from windlass.errors import LaunchError
from windlass.runs.walltime import wall_time_lead_seconds

# Wall time when neither the recipe nor the cluster file has one.
DEFAULT_SECONDS = 24 * 3600.0
# From the start of a job until its first step: imports, checkpoint, compilation.
STARTUP_SECONDS = 300.0
# A job asks for this much more than the planner expects: its error is 10 to 20 %, and the start and saves take time.
WALL_TIME_MARGIN = 1.25
# Wall times are rounded up to full hours; from half a day on to six hours, from two days on to twelve.
WALL_TIME_STEPS = ((43_200.0, 3600.0), (172_800.0, 21_600.0), (math.inf, 43_200.0))
# What every rank of a training job starts; it reads the run folder and its start.
WORKER = ("python", "-m", "windlass.train.worker")
# Paths that begin like this are on a node's own disk.
NODE_LOCAL = ("$TMPDIR", "/tmp", "$SLURM_TMPDIR", "$LOCALSCRATCH")


def folder_mark(folder: Path | str) -> str:
    """Prefix of the comment of every job of this folder. It identifies a job in the queue whose id was lost."""
    return f"windlass:{hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:12]}"


class JobRequest(Protocol):
    """What queue and environment depend on: a recipe, or the command of a sweep."""

    @property
    def launch(self) -> LaunchConfig: ...
    @property
    def nodes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Where the commands find Python: modules, then a virtual environment or a container."""

    kind: str = "module"  # venv, module or container
    modules: tuple[str, ...] = ()
    venv: str | None = None
    runtime: str = "none"
    image: str | None = None
    gpu_flag: str = ""
    binds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoreStaging:
    """A copy of the token store on a faster file system."""

    source: str
    target: str
    per_node: bool  # the target is a node's own disk: every node copies, inside the job; else a CPU job before it does
    reason: str


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One batch job. Strings may hold shell variables of the compute node (`$TMPDIR`)."""

    name: str
    kind: str = "train"  # train, stage, array, merge, image, command, sweep or doctor
    run_dir: str
    workdir: str
    command: tuple[str, ...]  # what every task starts, without launcher or container
    nodes: int = 1
    tasks_per_node: int = 1
    devices_per_node: int = 0  # 0: no accelerators are requested
    cpus_per_task: int | None = None
    seconds: float = DEFAULT_SECONDS  # wall-time limit; infinite for a local job without one
    lead_seconds: float = field(default_factory=lambda: wall_time_lead_seconds(None))
    lead_reason: str = ""
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    mem: str | None = None
    requeue: bool = False
    torchrun: bool = False
    chain: str = "none"  # none, pre (all jobs submitted at once) or self (each job submits the next)
    links: int = 1  # jobs in the chain
    array: int | None = None
    environment: JobEnvironment = field(default_factory=JobEnvironment)
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    staging: StoreStaging | None = None
    checkpoints_target: str | None = None  # the folder that the run folder's `checkpoints` links to
    tracker_env: Mapping[str, str] = field(default_factory=dict)
    energy_flags: tuple[str, ...] = ()
    about: tuple[str, ...] = ()  # comment lines at the top: what was chosen and why

    def __post_init__(self) -> None:
        """Check values from the command line and the environment by the rules for recipes and cluster files."""
        kinds = {"name": LINE, "run_dir": FOLDER, "workdir": FOLDER}
        kinds |= dict.fromkeys(("account", "partition", "qos"), SLURM_NAME)
        texts = [(key, kind, getattr(self, key)) for key, kind in kinds.items()]
        texts += [("command", LINE, argument) for argument in self.command]
        texts += [
            (f"env.{name}", kind, text)
            for name, value in self.env.items()
            for kind, text in ((VARIABLE_NAME, name), (LINE, value))
        ]
        for key, kind, text in texts:
            try:
                kind.check(text)
            except ValueError as error:
                raise LaunchError(
                    "launch.unsafe-value",
                    redact_text(f"{key}: {error} (got {text!r})"),
                    hint="correct the option, variable or folder name: the value would be written into a job script",
                ) from None

    @property
    def job_file(self) -> str:
        return str(PurePosixPath(self.run_dir) / ("job.sh" if self.kind == "train" else f"{self.kind}.sh"))

    @property
    def log_pattern(self) -> str:
        """With SLURM's own placeholders: %j is the job, %A_%a the array and its task."""
        return str(PurePosixPath(self.run_dir) / "logs" / ("%A_%a.out" if self.array else "%j.out"))


def train_job(
    recipe: Recipe,
    cluster: Cluster,
    run_dir: Path | str,
    *,
    workdir: Path | str,
    active_venv: str | None = None,
    save_seconds: float | None = None,
    step_seconds: float | None = None,
    store_bytes: int | None = None,
    run_seconds: float | None = None,
    about: Sequence[str] = (),
) -> BatchJob:
    """`store_bytes`: size of the token store where it was measured, else it follows from the recipe's tokens.
    `run_seconds`: expected training time of the whole run; None: unknown."""
    launch, slurm, node = recipe.launch, cluster.slurm, cluster.node
    partition, qos = choose_queue(recipe, cluster)
    queue = find_partition(cluster, partition, qos)
    links = launch.chain if isinstance(launch.chain, int) and launch.chain > 1 else 1
    seconds = (queue.max_time if queue else None) or DEFAULT_SECONDS
    if launch.time is not None:
        seconds = launch.time
    elif run_seconds is not None:
        seconds = fitting_wall_time(run_seconds / links, wall_time_lead_seconds(save_seconds, step_seconds), seconds)
    lead_seconds, lead_reason = signal_lead(recipe, seconds, save_seconds, step_seconds)
    torchrun = launch.starter == "torchrun" or bool(slurm and slurm.tasks_mode == "node")
    staging, cpus = (
        choose_staging(recipe, cluster, store_bytes or expected_store_bytes(recipe)),
        cpus_per_device(cluster),
    )
    return BatchJob(
        name=recipe.name,
        run_dir=str(run_dir),
        workdir=str(workdir),
        command=(*WORKER, str(run_dir), *(("--store", staging.target) if staging else ())),
        nodes=recipe.nodes,
        tasks_per_node=1 if torchrun else node.devices,
        devices_per_node=node.devices,
        cpus_per_task=cpus * node.devices if torchrun else cpus,
        seconds=seconds,
        lead_seconds=lead_seconds,
        lead_reason=lead_reason,
        partition=partition,
        qos=qos,
        account=launch.account or default_account(slurm.account if slurm else None),
        mem=None if slurm is None or slurm.mem_forbidden else slurm.mem,
        requeue=launch.requeue,
        torchrun=torchrun,
        chain="self" if launch.chain == "self" else "pre" if launch.chain not in (0, 1) else "none",
        links=links,
        environment=choose_environment(recipe, cluster, active_venv),
        env=launch.env,
        sbatch=launch.sbatch,
        staging=staging,
        checkpoints_target=choose_checkpoints_target(recipe, cluster, run_dir),
        tracker_env=tracker_env(recipe, cluster, run_dir),
        energy_flags=tuple(cluster.energy.ear_flags) if recipe.energy.enabled else (),
        about=tuple(about),
    )


def fitting_wall_time(train_seconds: float, lead_seconds: float, limit_seconds: float) -> float:
    """Wall time that one job requests to train this long, at most the limit of the queue."""
    needed = train_seconds * WALL_TIME_MARGIN + lead_seconds + STARTUP_SECONDS
    step = next(step for bound, step in WALL_TIME_STEPS if needed <= bound)
    return min(limit_seconds, math.ceil(needed / step) * step)


def cpus_per_device(cluster: Cluster) -> int:
    """Cores of one task: the cluster file's number, else an even share of the usable cores."""
    cores = cluster.node.cores_usable or cluster.node.cores
    return (cluster.slurm.cpus_per_task if cluster.slurm else None) or max(1, cores // cluster.node.devices)


def choose_queue(recipe: JobRequest, cluster: Cluster) -> tuple[str | None, str | None]:
    """Partition and QOS: the recipe's, else the cluster's default, else the first queue that takes this many nodes."""
    slurm, launch = cluster.slurm, recipe.launch
    if slurm is None:
        return launch.partition, launch.qos
    partition = launch.partition or slurm.partition
    if launch.qos is not None:
        return partition, launch.qos
    if launch.partition not in (None, slurm.partition):
        return partition, next((p.qos for p in slurm.partitions if p.name == partition), None)
    default = find_partition(cluster, partition, slurm.qos)
    fitting = [p for p in slurm.partitions if p.gpus and fits_nodes(p, recipe.nodes)]
    if launch.partition is None and default is not None and not fits_nodes(default, recipe.nodes) and fitting:
        best = next((p for p in fitting if p.name == partition), fitting[0])
        return best.name, best.qos
    return partition, slurm.qos


def fits_nodes(partition: Partition, nodes: int) -> bool:
    return partition.min_nodes <= nodes and (partition.max_nodes is None or nodes <= partition.max_nodes)


def find_partition(cluster: Cluster, name: str | None, qos: str | None) -> Partition | None:
    """The queue of this name and QOS; a partition that is listed without a QOS matches any QOS."""
    rows = [p for p in (cluster.slurm.partitions if cluster.slurm else []) if p.name == name]
    return next((p for p in rows if p.qos == qos), None) or next((p for p in rows if None in (p.qos, qos)), None)


def signal_lead(
    recipe: Recipe, seconds: float, save_seconds: float | None, step_seconds: float | None = None
) -> tuple[float, str]:
    """How long before the limit SLURM sends its signal, and why; never more than a third of the wall time."""
    chosen = recipe.launch.signal_lead if recipe.launch.signal_lead != "auto" else recipe.save.lead
    cap = max(30.0, seconds / 3)
    if chosen != "auto":
        return min(float(chosen), cap), "as the recipe says"
    lead_seconds = math.ceil(min(cap, wall_time_lead_seconds(save_seconds, step_seconds)))
    if save_seconds is None:
        return lead_seconds, "no save has been timed yet"
    return lead_seconds, f"a minute, three steps and three times the longest save so far ({save_seconds:.0f} s)"


def choose_environment(recipe: JobRequest, cluster: Cluster, active_venv: str | None) -> JobEnvironment:
    launch, container = recipe.launch, cluster.container
    modules = tuple(launch.modules if launch.modules is not None else cluster.modules)
    kind = launch.environment
    if kind == "auto":
        kind = "container" if launch.container else "venv" if launch.venv or active_venv else "module"
    if launch.environment == "module" and not modules and launch.modules is None:
        raise LaunchError(
            "launch.modules-unknown",
            f'launch.environment = "module", but the modules of {cluster.title} are not known to windlass',
            hint='name them: launch.modules = ["NAME/VERSION", ...] (`module avail` lists them), or use launch.venv or '
            "launch.container",
        )
    if kind == "venv":  # made from any Python: modules only where the recipe names them
        return JobEnvironment(kind=kind, modules=tuple(launch.modules or ()), venv=launch.venv or active_venv)
    if kind == "module":
        return JobEnvironment(kind=kind, modules=modules, venv=launch.venv)
    runtime = launch.runtime or (container.runtime if container.runtime != "none" else "apptainer")
    return JobEnvironment(
        kind=kind,
        modules=modules if launch.modules is not None else tuple(container.modules),
        runtime=runtime,
        image=launch.container or container.image_hint or None,
        gpu_flag="" if runtime == "charliecloud" else container.gpu_flag,
        binds=(*container.binds, *launch.binds),
    )


def plain_environment(cluster: Cluster, active_venv: str | None) -> JobEnvironment:
    """For jobs without a recipe: the virtual environment that submits, else the cluster's modules."""
    if active_venv:
        return JobEnvironment(kind="venv", venv=active_venv)
    return JobEnvironment(kind="module", modules=tuple(cluster.modules))


def fast_storage(cluster: Cluster) -> Storage | None:
    """The fast file system: one that all nodes share before a node's own disk."""
    fast = [s for s in cluster.storage.values() if s.fast]
    return min(fast, key=lambda s: s.path.startswith(NODE_LOCAL), default=None)


def expected_store_bytes(recipe: Recipe) -> int | None:
    """At most, for one pass over the tokens of the recipe; None: unknown. As `windlass tokenize` writes them."""
    tokens, vocab = recipe.data.tokens, recipe.model.vocab
    return None if recipe.data.store is None or not tokens or not vocab else tokens * (2 if vocab <= 65_536 else 4)


def choose_staging(recipe: Recipe, cluster: Cluster, store_bytes: int | None) -> StoreStaging | None:
    """Copy the store when the recipe asks for it; by default when a fast file system of all nodes has room for it."""
    store, wish, fast = recipe.data.store, recipe.launch.stage_data, fast_storage(cluster)
    if store is None or wish is False or cluster.slurm is None or fast is None:
        return None
    per_node, quota = fast.path.startswith(NODE_LOCAL), fast.quota
    too_large = quota is not None and store_bytes is not None and store_bytes > quota
    if store.startswith(fast.path.rstrip("/") + "/") or (wish is None and (per_node or too_large)):
        return None
    reason = "a node's own disk, as the recipe asks"
    if not per_node:
        reason = f"the fast file system ({fast.use_for or 'for hot data'})"
    return StoreStaging(
        source=store, target=f"{fast.path}/windlass/{PurePosixPath(store).name}", per_node=per_node, reason=reason
    )


def choose_checkpoints_target(recipe: Recipe, cluster: Cluster, run_dir: Path | str) -> str | None:
    """The folder for `launch.checkpoints_on`, one per run folder; None: the run folder itself."""
    wish = recipe.launch.checkpoints_on
    if wish is None or cluster.slurm is None:
        return None
    shared = {name: s for name, s in cluster.storage.items() if not s.path.startswith(NODE_LOCAL)}
    storage = shared.get(wish) or (next((s for s in shared.values() if s.fast), None) if wish == "fast" else None)
    if storage is None:
        raise LaunchError(
            "launch.unknown-storage",
            f"launch.checkpoints_on = {wish!r} is not a file system that all nodes of {cluster.title} share",
            hint=f"shared file systems in its cluster file: {', '.join(shared) or 'none'}; a node's own disk is lost "
            "with the job",
        )
    mark = folder_mark(run_dir).removeprefix("windlass:")
    return f"{storage.path}/windlass/checkpoints/{PurePosixPath(run_dir).name}-{mark}"


def tracker_env(recipe: Recipe, cluster: Cluster, run_dir: Path | str) -> dict[str, str]:
    """Offline unless the nodes reach the internet and the recipe wants it: a hub time-out costs minutes per rank.

    The id and the resume mode of a tracked run are not set here: the tracker passes them itself (`train.trackers`).
    """
    online = recipe.trackers.online and cluster.network.internet == "yes"
    env = {} if online else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if recipe.trackers.wandb:
        env |= {"WANDB_MODE": "online" if online else "offline", "WANDB_DIR": f"{run_dir}/trackers"}
    return env
