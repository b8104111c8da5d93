"""Checks before submission, for jobs that would be refused, wait forever or run badly. Each names its rule and source.

`check_request` compares the job with the cluster file and touches nothing. `check_site` looks at this machine: files,
disks, image, token store. Both return findings; only `refuse` raises.
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.clusters import describe
from windlass.clusters.load import lint_masks
from windlass.clusters.model import Cluster, SlurmLimits
from windlass.config import Recipe
from windlass.errors import LaunchError, WindlassError
from windlass.launch.job import BatchJob, find_partition, fits_nodes
from windlass.units import print_bytes, print_seconds

# How much earlier than asked SLURM may send --signal (man sbatch).
EARLY_SECONDS = 60.0
# What a job needs at least until its ranks listen for signals.
START_SECONDS = 60.0
LOCAL_TYPES = ("tmpfs", "ramfs", "devtmpfs")
LOCAL_PREFIXES = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Units of sbatch's --mem.
MEGABYTES = {"K": 1e-3, "M": 1.0, "G": 1e3, "T": 1e6}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    rule: str
    level: str  # ok, note, warn or refuse
    message: str
    hint: str | None = None
    source: str | None = None  # where the rule was read, with its date and how reliable it is


# Condition, rule, level, message, hint, source: a finding when the condition holds.
Row = tuple[bool, str, str, str, str | None, str | None]


def _findings(rows: Sequence[Row]) -> list[Finding]:
    return [Finding(*row[1:]) for row in rows if row[0]]


def source_of(cluster: Cluster, key: str) -> str:
    """Where the cluster file has a value from: the key's own source or that of the table around it."""
    source = describe.source_of(key, cluster.sources)
    if source is None:
        return f"cluster file {cluster.name}"
    status = "" if source.status == "documented" else f", {source.status}"
    return f"{source.source}{f' ({source.on}{status})' if source.on else status}"


# -- the request against the cluster file -----------------------------------------------------------------------------


def check_request(job: BatchJob, cluster: Cluster) -> list[Finding]:
    """Everything that can be checked without looking at a disk."""
    if cluster.slurm is None:
        return []
    checks = (_check_queue, _check_account, _check_shape, _check_memory, _check_masks, _check_options)
    return [finding for check in checks for finding in check(job, cluster, cluster.slurm)]


def _check_queue(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Finding]:
    source = source_of(cluster, "slurm.partitions")
    queue = find_partition(cluster, job.partition, job.qos)
    if queue is None:
        same_name = [p for p in slurm.partitions if p.name == job.partition]
        qos = ", ".join(str(p.qos) for p in same_name)
        names = ", ".join(sorted({p.name for p in slurm.partitions}))
        return _findings(
            [
                (
                    bool(same_name),
                    "qos",
                    "refuse",
                    f"QOS {job.qos!r} is not one of partition {job.partition} ({qos})",
                    "set launch.qos",
                    source,
                ),
                (
                    not same_name and bool(names),
                    "partition",
                    "refuse",
                    f"{cluster.name} has no partition {job.partition!r} in its cluster file",
                    f"known: {names}; `windlass clusters {cluster.name} --probe` asks the machine",
                    source,
                ),
            ]
        )
    name = queue.name + (f" with QOS {queue.qos}" if queue.qos else "")
    limit = print_seconds(queue.max_time)
    minimum = slurm.rules.get("bprod_minimum", f"{name} begins at {queue.min_nodes} nodes")
    return _findings(
        [
            (
                job.seconds > (queue.max_time or math.inf),
                "wall_time",
                "refuse",
                f"{print_seconds(job.seconds)} is more than the {limit} of {name}: the job would stay pending forever",
                f"set launch.time to at most {limit} and use --chain",
                source,
            ),
            (
                job.nodes > (queue.max_nodes or math.inf),
                "nodes",
                "refuse",
                f"{job.nodes} nodes are more than the {queue.max_nodes} of {name}",
                _larger_queues(job, slurm),
                source,
            ),
            (
                job.nodes < queue.min_nodes,
                "nodes",
                "refuse",
                f"{job.nodes} nodes are fewer than the {queue.min_nodes} of {name}: {minimum}",
                "ask for more nodes, or leave out partition and QOS",
                source,
            ),
            (
                job.nodes > (cluster.nodes or math.inf),
                "nodes",
                "refuse",
                f"{job.nodes} nodes are more than the {cluster.nodes} that {cluster.title} has",
                None,
                source_of(cluster, "nodes"),
            ),
            (
                bool(job.devices_per_node) and not queue.gpus,
                "gpus",
                "refuse",
                f"{name} has no accelerators",
                "choose a partition with devices",
                source,
            ),
            (
                job.links > (slurm.max_submitted or job.links),
                "max_jobs",
                "refuse",
                f"a chain of {job.links} jobs is more than the {slurm.max_submitted} jobs that may be queued",
                "use --chain self",
                source,
            ),
        ]
    )


def _larger_queues(job: BatchJob, slurm: SlurmLimits) -> str:
    fitting = [p.name + (f"/{p.qos}" if p.qos else "") for p in slurm.partitions if p.gpus and fits_nodes(p, job.nodes)]
    if not fitting:
        return "no queue in the cluster file takes so many nodes"
    return "queues that take it: " + ", ".join(fitting)


def _check_account(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Finding]:
    source = source_of(cluster, "slurm")
    no_account = slurm.account_required and not (job.account or os.environ.get("SBATCH_ACCOUNT"))
    rule = slurm.rules.get("account", "--account is compulsory here")
    return _findings(
        [
            (
                no_account,
                "account",
                "refuse",
                f"no account is given: {rule}",
                "set launch.account in the recipe or on the command line: launch.account=NAME",
                source,
            ),
            (
                slurm.qos_required and not job.qos,
                "qos",
                "refuse",
                "no QOS is given, and it is compulsory here",
                "set launch.qos",
                source,
            ),
        ]
    )


def _check_shape(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Finding]:
    node, devices, source = cluster.node, job.devices_per_node, source_of(cluster, "slurm")
    usable = node.cores_usable or node.cores
    cores = job.tasks_per_node * (job.cpus_per_task or 1)
    per_gpu = slurm.rules.get("cores_per_gpu", "")
    uneven = devices > 0 and cores != devices * (slurm.cpus_per_task or cores // devices)
    whole_nodes = slurm.rules.get("whole_nodes", f"several nodes only with all {node.devices} devices")
    core_rule = slurm.rules.get("usable_cores", f"a node gives a job {usable} cores")
    return _findings(
        [
            (
                devices > node.devices,
                "devices",
                "refuse",
                f"{devices} devices per node, but a node has {node.devices}",
                None,
                source_of(cluster, "node.devices"),
            ),
            (
                devices > 0 and not job.torchrun and job.tasks_per_node != devices,
                "tasks",
                "refuse",
                f"{job.tasks_per_node} tasks for {devices} devices on a node: one rank drives one device",
                'set launch.starter = "srun"',
                source,
            ),
            (
                slurm.whole_node and job.nodes > 1 and 0 < devices < node.devices,
                "whole_nodes",
                "refuse",
                whole_nodes,
                None,
                source,
            ),
            (
                cores > usable,
                "cores",
                "refuse",
                f"{job.tasks_per_node} tasks x {job.cpus_per_task} cores = {cores}, more than {usable}: {core_rule}",
                None,
                source_of(cluster, "node.cores"),
            ),
            (
                bool(per_gpu) and uneven,
                "cores_per_gpu",
                "refuse",
                f"{cores} cores for {devices} devices: {per_gpu}",
                None,
                source,
            ),
        ]
    )


def _check_memory(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Finding]:
    source = source_of(cluster, "slurm")
    asked = str(job.sbatch.get("mem", job.mem or ""))
    number, unit = (asked[:-1], asked[-1].upper()) if asked and asked[-1].isalpha() else (asked, "M")
    asked_bytes = float(number) * MEGABYTES[unit] * 1e6 if number.isdigit() and unit in MEGABYTES else 0.0
    limit = cluster.node.memory_usable or cluster.node.memory
    remove = "remove launch.sbatch.mem"
    return _findings(
        [
            (
                slurm.mem_forbidden and bool(asked),
                "mem",
                "refuse",
                f"--mem={asked}: {slurm.rules.get('no_mem', '--mem must not be set here')}",
                remove,
                source,
            ),
            (
                asked == "0" and "mem_zero" in slurm.rules,
                "mem_zero",
                "refuse",
                slurm.rules.get("mem_zero", ""),
                remove,
                source,
            ),
            (
                asked_bytes > (limit or math.inf) * 1.05,
                "mem",
                "refuse",
                f"--mem={asked} is more than the {print_bytes(limit)} a node gives: the job would stay pending forever",
                None,
                source_of(cluster, "node.memory"),
            ),
        ]
    )


def _check_masks(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> Iterator[Finding]:
    if cluster.binding.kind != "mask" or job.torchrun or not job.devices_per_node:
        return
    for fault in lint_masks(cluster, list(cluster.binding.masks)):
        yield Finding(
            "masks",
            "refuse",
            fault,
            "two ranks on one core run at half speed without a message",
            source_of(cluster, "binding"),
        )
    if job.tasks_per_node != len(cluster.binding.masks):
        rule = slurm.rules.get("full_node_masks", "masks need a full node")
        yield Finding(
            "full_node_masks",
            "warn",
            f"{job.tasks_per_node} tasks: {rule}; the script binds to cores instead",
            None,
            source_of(cluster, "node"),
        )


def _check_options(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Finding]:
    lead, early, total = map(print_seconds, (job.lead_seconds, EARLY_SECONDS, job.seconds))
    short = job.kind == "train" and job.seconds - job.lead_seconds < EARLY_SECONDS + START_SECONDS
    warning = (
        f"the signal comes {lead} (up to {early} more) before the end of a {total} job: perhaps before the ranks start"
    )
    target = job.staging.target if job.staging else ""
    unnamed = f"the store would be copied to {target}, but no account names the project"
    disk = cluster.node.local_disk or ""
    constraint = [*disk.partition("--constraint=")[2].split(")")[0].split(), ""][0]
    some_nodes = job.staging is not None and job.staging.per_node and "constraint" not in job.sbatch
    container = job.environment.kind == "container"
    return _findings(
        [
            (
                short,
                "signal_lead",
                "warn",
                warning,
                "use a longer launch.time or a shorter launch.signal_lead",
                "man sbatch, --signal; seen on SLURM 22.05",
            ),
            (
                job.requeue and job.chain != "none",
                "requeue",
                "note",
                "a job that SLURM requeues counts as one more start when progress is judged",
                None,
                None,
            ),
            (
                not job.account and "$PROJECT" in target,
                "staging",
                "refuse",
                unnamed,
                "set launch.account or launch.stage_data=false",
                source_of(cluster, "storage"),
            ),
            (
                some_nodes and bool(constraint),
                "local_disk",
                "warn",
                f"the store is copied to a node's own disk, and only some nodes have one: {disk}",
                f"launch.sbatch.constraint={constraint}",
                source_of(cluster, "node.local_disk"),
            ),
            (
                container and cluster.node.arch == "aarch64",
                "arch",
                "note",
                "the nodes are aarch64: an x86 image ends with 'exec format error'",
                None,
                source_of(cluster, "node.arch"),
            ),
        ]
    )


# -- this machine -----------------------------------------------------------------------------------------------------


def check_site(
    job: BatchJob, recipe: Recipe, cluster: Cluster, *, checkpoint_bytes: int | None, steps: int | None
) -> list[Finding]:
    """Files, disks, image and store, as this machine sees them."""
    return [
        *_check_run_folder(job, cluster),
        _check_room(job, recipe, checkpoint_bytes, steps),
        *_check_environment(job),
        _check_store(recipe),
    ]


def _check_run_folder(job: BatchJob, cluster: Cluster) -> Iterator[Finding]:
    """A folder that only this node has exists here but is missing where the job runs."""
    if cluster.slurm is None:
        return
    path = Path(job.run_dir).resolve()
    shared = [os.path.expandvars(s.path) for s in cluster.storage.values() if not s.path.startswith("$TMPDIR")]
    kind = file_system(path)
    is_local = kind in LOCAL_TYPES or any(path.is_relative_to(prefix) for prefix in LOCAL_PREFIXES)
    if is_local and not any(path.is_relative_to(place) for place in shared if place.startswith("/")):
        places = [s.path for s in cluster.storage.values() if not s.path.startswith(("$TMPDIR", "$HOME"))]
        yield Finding(
            "shared_folder",
            "refuse",
            f"{path} is on this node's own {kind or 'disk'}: compute nodes cannot see it",
            f"choose a folder on {' or '.join(places) or 'a shared file system'} with --run",
            source_of(cluster, "storage"),
        )


def file_system(path: Path) -> str | None:
    """The type of the file system a path is on, from the mount table."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    kinds = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place)]
    return max(kinds)[1] if kinds else None


def _check_room(job: BatchJob, recipe: Recipe, checkpoint_bytes: int | None, steps: int | None) -> Finding:
    if checkpoint_bytes is None or steps is None:
        return Finding("disk", "note", "the checkpoint size of this model is unknown: free disk space was not checked")
    from windlass.checkpoint.keep import forecast

    folder = Path(job.run_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    batch_tokens = recipe.data.batch_tokens or 0
    free_bytes = shutil.disk_usage(existing).free
    need = forecast(checkpoint_bytes, recipe.save, steps=steps, batch_tokens=batch_tokens, free_bytes=free_bytes)
    if need.fits is not False:
        return Finding("disk", "ok", need.text)
    return Finding(
        "disk",
        "refuse",
        need.text,
        "keep fewer (save.keep_last, save.keep_best, save.keep_every) or use a larger file system",
        "[save] of the recipe and the free space now",
    )


def _check_environment(job: BatchJob) -> list[Finding]:
    """The container's image and binds, or the virtual environment."""
    env = job.environment
    if env.kind == "venv" and env.venv and not Path(env.venv, "bin", "activate").is_file():
        return [
            Finding(
                "venv",
                "refuse",
                f"{env.venv} is not a virtual environment (bin/activate is missing)",
                "set launch.venv",
            )
        ]
    if env.kind != "container":
        return []
    if not env.image:
        return [
            Finding(
                "image",
                "refuse",
                "the environment is a container, but no image is named",
                "set launch.container to a .sif file or an unpacked folder",
            )
        ]
    image = Path(os.path.expandvars(env.image))
    sources = [os.path.expandvars(bind.split(":")[0]) for bind in env.binds]
    lost = [s for s in sources if s.startswith("/") and "$" not in s and not Path(s).exists()]
    missing, unreadable = not image.exists(), image.exists() and not os.access(image, os.R_OK)
    rows: list[Row] = [
        (missing, "image", "refuse", f"the container image {image} does not exist", "check launch.container", None),
        (unreadable, "image", "refuse", f"the container image {image} cannot be read", "check its permissions", None),
    ]
    bind_hint = "every rank fails when compute nodes lack it too"
    text = "{} is bound into the container but does not exist on this node"
    return _findings([*rows, *((True, "binds", "warn", text.format(s), bind_hint, None) for s in lost)])


def _check_store(recipe: Recipe) -> Finding:
    if recipe.data.store is None:
        return Finding("store", "note", "no token store: the run trains on synthetic tokens")
    from windlass.data.store import open_store

    try:
        store = open_store(os.path.expandvars(recipe.data.store))
    except WindlassError as error:
        return Finding("store", "refuse", f"the token store is not usable: {error.message}", error.hint)
    # By sizes only: a full check reads every byte.
    for shard in (shard for splits in store.shards.values() for shards in splits.values() for shard in shards):
        needed = shard.offset + shard.tokens * shard.dtype.itemsize
        size = shard.file.stat().st_size if shard.file.is_file() else None
        if size is None or size < needed:
            fault = f"{shard.file.name} {'is missing' if size is None else f'has {size:,} bytes'} of {needed:,}"
            return Finding(
                "store",
                "refuse",
                f"the token store {recipe.data.store} is not complete: {fault}",
                "run `windlass tokenize` again: it makes what is missing",
            )
    return Finding("store", "ok", f"token store {recipe.data.store}: complete")


# -- the budget, and refusing -----------------------------------------------------------------------------------------


def check_budget(asked_node_hours: float, used_node_hours: float, budget: float | None) -> list[Finding]:
    """Node-hours the job may use against what is left of the budget."""
    if budget is None:
        return [Finding("budget", "note", "no allocation budget set (launch.budget_node_hours); skipped")]
    left = budget - used_node_hours
    available = f"{left:,.1f} of {budget:,.1f} left ({used_node_hours:,.1f} used or running)"
    text = f"up to {asked_node_hours:,.1f} node-hours asked, {available}"
    if asked_node_hours <= left:
        return [Finding("budget", "ok", text)]
    return [
        Finding(
            "budget",
            "refuse",
            text,
            "shorten launch.time or --chain, or correct launch.budget_node_hours",
            "launch.budget_node_hours and the ledger (`windlass jobs --ledger`)",
        )
    ]


def refusals(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.level == "refuse"]


def refuse(findings: Sequence[Finding], *, force: bool) -> None:
    """Raise with every refusal, its rule and its source, unless forced."""
    failed = refusals(findings)
    if not failed or force:
        return
    lines = "".join(
        f"\n  {f.rule}: {f.message}" + (f" [{f.source}]" if f.source else "") + (f" -> {f.hint}" if f.hint else "")
        for f in failed
    )
    raise LaunchError(
        "launch.checks-failed",
        f"not submitted, {len(failed)} check{'s' if len(failed) > 1 else ''} failed:{lines}",
        hint="use --force to submit anyway; --dry-run shows the script",
    )
