"""Checks before submission, for jobs that would be refused, wait forever or run badly. Each names its rule and source.

`check_request` compares the job with the cluster file and touches nothing. `check_site` looks at this machine: files,
disks, image, token store. Both return findings; only `refuse` raises.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.clusters import describe
from windlass.clusters.load import nearest_masks
from windlass.clusters.masks import find_bindings, lint_entries
from windlass.clusters.model import Cluster, SlurmLimits
from windlass.clusters.scheduler import default_account
from windlass.config import Recipe
from windlass.errors import LaunchError, WindlassError
from windlass.launch.job import BatchJob, fast_storage, find_partition, fits_nodes
from windlass.launch.script import render
from windlass.units import print_bytes, print_figure, print_node_hours, print_quota, print_seconds

# How much earlier than asked SLURM may send --signal (man sbatch).
EARLY_SECONDS = 60.0
# What a job needs at least until its ranks listen for signals.
START_SECONDS = 60.0
LOCAL_TYPES = ("tmpfs", "ramfs", "devtmpfs")
LOCAL_PREFIXES = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Units of sbatch's --mem.
MEGABYTES = {"K": 1e-3, "M": 1.0, "G": 1e3, "T": 1e6}


# Levels of the rules in tables of rows; the others refuse.
LEVELS = {
    "full_node_masks": "warn", "signal_lead": "warn", "requeue": "note", "local_disk": "warn", "arch": "note",
    "binds": "warn",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    rule: str
    level: str  # ok, note, warn or refuse
    message: str
    hint: str | None = None
    source: str | None = None  # where the rule was read, with its date and how reliable it is


# Condition, rule, message, hint, source: a finding when the condition holds.
Row = tuple[bool, str, str, str | None, str | None]


def _findings(rows: Iterable[Row]) -> list[Finding]:
    return [
        Finding(rule, LEVELS.get(rule, "refuse"), message, hint, source)
        for holds, rule, message, hint, source in rows
        if holds
    ]


def source_of(cluster: Cluster, key: str) -> str:
    """Where the cluster file has a value from: the key's own source or that of the table around it."""
    source = describe.source_of(key, cluster.sources)
    if source is None:
        return f"cluster file {cluster.name}"
    status = "" if source.status == "documented" else f", {source.status}"
    return f"{source.source}{f' ({source.on}{status})' if source.on else status}"


# -- the request against the cluster file -----------------------------------------------------------------------------


def check_request(job: BatchJob, cluster: Cluster) -> list[Finding]:
    if cluster.slurm is None:
        return []
    tables = (_queue_rows, _shape_rows, _option_rows)
    findings = [finding for rows in tables for finding in _findings(rows(job, cluster, cluster.slurm))]
    # In the rendered script: masks also come from launch.env, launch.sbatch and srun_extra of the cluster file.
    return findings + check_bindings(render(job, cluster), cluster, tasks=job.tasks_per_node)


def check_bindings(
    text: str,
    cluster: Cluster | None,
    *,
    tasks: int | None = None,
    line_of: Callable[[str], str] = lambda written: "",
) -> list[Finding]:
    """Find CPU masks in a command or script that put two ranks on one core, or a rank on cores it must not use."""
    findings = []
    for binding in find_bindings(text):
        node = cluster.node if cluster and cluster.binding.kind == "mask" else None
        faults = list(lint_entries(binding.entries, kind=binding.kind, tasks=tasks, node=node))
        own = (cluster.name, cluster.binding.masks) if cluster and cluster.binding.masks else None
        nearest = (own or nearest_masks(binding.entries)) if faults and binding.kind == "mask_cpu" else None
        hint = "give each local rank its own cores: two ranks on one core run at half speed without a warning"
        if nearest is not None:
            hint = f"use the masks of {nearest[0]}: {','.join(nearest[1])}"
        source = source_of(cluster, "binding") if cluster else None
        findings += [Finding("masks", "refuse", line_of(binding.written) + fault, hint, source) for fault in faults]
    return findings


def _queue_rows(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Row]:
    source = source_of(cluster, "slurm.partitions")
    queue = find_partition(cluster, job.partition, job.qos)
    if queue is None:
        same_name = [p for p in slurm.partitions if p.name == job.partition]
        qos = ", ".join(str(p.qos) for p in same_name)
        names = ", ".join(sorted({p.name for p in slurm.partitions}))
        return [
            (
                bool(same_name),
                "qos",
                f"partition {job.partition} has no QOS {job.qos!r} (it has {qos})",
                "set launch.qos to one of these",
                source,
            ),
            (
                not same_name and bool(names),
                "partition",
                f"{cluster.name} has no partition {job.partition!r} in its cluster file",
                f"use one of {names}; `windlass clusters {cluster.name} --probe` asks the live system",
                source,
            ),
        ]
    name = queue.name + (f" with QOS {queue.qos}" if queue.qos else "")
    limit = print_seconds(queue.max_time)
    minimum = slurm.rules.get("bprod_minimum", f"{name} needs at least {queue.min_nodes} nodes")
    fitting = [p.name + (f"/{p.qos}" if p.qos else "") for p in slurm.partitions if p.gpus and fits_nodes(p, job.nodes)]
    return [
        (
            job.seconds > (queue.max_time or math.inf),
            "wall_time",
            f"{print_seconds(job.seconds)} is more than the {limit} of {name}: the job would stay pending forever",
            f"set launch.time to at most {limit} and use --chain",
            source,
        ),
        (
            job.nodes > (queue.max_nodes or math.inf),
            "nodes",
            f"{job.nodes} nodes are more than the {queue.max_nodes} that {name} allows",
            f"use a partition that allows it: {', '.join(fitting)}"
            if fitting
            else "use fewer nodes: no partition in the cluster file allows that many",
            source,
        ),
        (
            job.nodes < queue.min_nodes,
            "nodes",
            f"{job.nodes} nodes are fewer than {queue.min_nodes}: {minimum}",
            "request more nodes, or remove launch.partition and launch.qos",
            source,
        ),
        (
            job.nodes > (cluster.nodes or math.inf),
            "nodes",
            f"{job.nodes} nodes are more than the {cluster.nodes} that {cluster.title} has",
            None,
            source_of(cluster, "nodes"),
        ),
        (
            bool(job.devices_per_node) and not queue.gpus,
            "gpus",
            f"{name} has no accelerators",
            "set launch.partition to a partition with accelerators",
            source,
        ),
        (
            job.links > (slurm.max_submitted or job.links),
            "max_jobs",
            f"a chain of {job.links} jobs is more than the {slurm.max_submitted} jobs that may be queued",
            "use --chain self",
            source,
        ),
    ]


def _shape_rows(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Row]:
    node, devices, source = cluster.node, job.devices_per_node, source_of(cluster, "slurm")
    usable, cores = node.cores_usable or node.cores, job.tasks_per_node * (job.cpus_per_task or 1)
    core_rule = slurm.rules.get("usable_cores", f"a job may use {usable} cores of a node")
    return [
        (
            slurm.account_required and not (job.account or default_account(slurm.account)),
            "account",
            f"no account is given: {slurm.rules.get('account', '--account is required here')}",
            "set launch.account=NAME, SBATCH_ACCOUNT, or slurm.account in your own cluster file",
            source,
        ),
        (
            slurm.qos_required and not job.qos,
            "qos",
            "no QOS is given, but it is required here",
            "set launch.qos to one of the site's",
            source,
        ),
        (
            devices > node.devices,
            "devices",
            f"{devices} devices per node, but a node has {node.devices}",
            f"use at most {node.devices} devices per node, or more nodes",
            source_of(cluster, "node.devices"),
        ),
        (
            devices > 0 and not job.torchrun and job.tasks_per_node != devices,
            "tasks",
            f"{job.tasks_per_node} tasks for {devices} devices on a node: each device needs one rank",
            'set launch.starter = "srun"',
            source,
        ),
        (
            slurm.whole_node and job.nodes > 1 and 0 < devices < node.devices,
            "whole_nodes",
            slurm.rules.get("whole_nodes", f"a job on several nodes must use all {node.devices} devices of each node"),
            None,
            source,
        ),
        (
            cores > usable,
            "cores",
            f"{job.tasks_per_node} tasks x {job.cpus_per_task} cores = {cores}, more than {usable}: {core_rule}",
            None,
            source_of(cluster, "node.cores"),
        ),
        (
            "cores_per_gpu" in slurm.rules
            and devices > 0
            and cores != devices * (slurm.cpus_per_task or cores // devices),
            "cores_per_gpu",
            f"{cores} cores for {devices} devices: {slurm.rules.get('cores_per_gpu')}",
            None,
            source,
        ),
    ]


def _option_rows(job: BatchJob, cluster: Cluster, slurm: SlurmLimits) -> list[Row]:
    source, node, masks = source_of(cluster, "slurm"), cluster.node, cluster.binding.masks
    memory = str(job.sbatch.get("mem", job.mem or ""))
    number, unit = (memory[:-1], memory[-1].upper()) if memory and memory[-1].isalpha() else (memory, "M")
    memory_bytes = float(number) * MEGABYTES[unit] * 1e6 if number.isdigit() and unit in MEGABYTES else 0.0
    limit = node.memory_usable or node.memory
    binds_masks = cluster.binding.kind == "mask" and not job.torchrun and job.devices_per_node > 0
    mask_rule = slurm.rules.get("full_node_masks", "masks need a full node")
    lead, early, total = map(print_seconds, (job.lead_seconds, EARLY_SECONDS, job.seconds))
    target, disk = job.staging.target if job.staging else "", node.local_disk or ""
    constraint = [*disk.partition("--constraint=")[2].split(")")[0].split(), ""][0]
    some_nodes = job.staging is not None and job.staging.per_node and "constraint" not in job.sbatch
    return [
        (
            slurm.mem_forbidden and bool(memory),
            "mem",
            f"--mem={memory}: {slurm.rules.get('no_mem', '--mem must not be set here')}",
            "remove launch.sbatch.mem",
            source,
        ),
        (
            memory == "0" and "mem_zero" in slurm.rules,
            "mem_zero",
            slurm.rules.get("mem_zero", ""),
            "remove launch.sbatch.mem",
            source,
        ),
        (
            memory_bytes > (limit or math.inf) * 1.05,
            "mem",
            f"--mem={memory} is more than the {print_bytes(limit)} of a node: the job would stay pending forever",
            None,
            source_of(cluster, "node.memory"),
        ),
        (
            binds_masks and job.tasks_per_node != len(masks),
            "full_node_masks",
            f"{job.tasks_per_node} tasks: {mask_rule}; the script binds to cores instead",
            None,
            source_of(cluster, "node"),
        ),
        (
            job.kind == "train" and job.seconds - job.lead_seconds < EARLY_SECONDS + START_SECONDS,
            "signal_lead",
            f"the signal comes {lead} (up to {early} more) before the end of a {total} job: perhaps before the ranks "
            "start",
            "use a longer launch.time or a shorter launch.signal_lead",
            "man sbatch, --signal; seen on SLURM 22.05",
        ),
        (
            job.requeue and job.chain != "none",
            "requeue",
            "a job that SLURM requeues counts as one more start when the chain checks for progress",
            None,
            None,
        ),
        (
            not job.account and "$PROJECT" in target,
            "staging",
            f"the store would be copied to {target}, but no account names the project",
            "set launch.account or launch.stage_data=false",
            source_of(cluster, "storage"),
        ),
        (
            some_nodes and bool(constraint),
            "local_disk",
            f"the store is copied to a node's own disk, and only some nodes have one: {disk}",
            f"set launch.sbatch.constraint={constraint}",
            source_of(cluster, "node.local_disk"),
        ),
        (
            job.environment.kind == "container" and node.arch == "aarch64",
            "arch",
            "the nodes are aarch64: an x86 image fails with 'exec format error'",
            None,
            source_of(cluster, "node.arch"),
        ),
    ]


def check_quotas(
    job: BatchJob,
    recipe: Recipe,
    cluster: Cluster,
    store_bytes: int | None,
    checkpoint_bytes: int | None,
    steps: int | None,
    *,
    on_site: bool,
) -> list[Finding]:
    """The copy of the store and the checkpoints against the quotas of the cluster file. `on_site`: on that cluster, so
    that its variables are set and the run folder's file system can be recognised."""
    from windlass.checkpoint.keep import forecast

    source, fast = source_of(cluster, "storage"), fast_storage(cluster)
    findings: list[Finding] = []
    # Path, name, bytes and what makes it smaller.
    parts: list[tuple[str, str, int, str]] = []
    if store_bytes is not None and job.staging is not None:
        parts.append((job.staging.target, "the token store", store_bytes, "set launch.stage_data = false"))
    elif store_bytes is not None and fast is not None and recipe.launch.stage_data is None:
        text = f"the token store of at most {print_quota(store_bytes)} is not copied to {fast.path}"
        if store_bytes > (fast.quota or math.inf):
            findings.append(Finding("staging", "note", f"{text}, which holds {print_quota(fast.quota)}", None, source))
    if checkpoint_bytes and steps is not None:
        peak = forecast(
            checkpoint_bytes, recipe.save, steps=steps, batch_tokens=recipe.data.batch_tokens or 0
        ).peak_bytes
        name, fewer = f"{peak // checkpoint_bytes} checkpoints", "lower save.keep_last, keep_best or keep_every"
        parts.append((job.checkpoints_target or job.run_dir, name, peak, fewer))
    for storage in (s for s in cluster.storage.values() if s.quota is not None):
        roots = {storage.path, os.path.expandvars(storage.path) if on_site else storage.path}
        inside = [p for p in parts if any(f"{p[0]}/".startswith(root.rstrip("/") + "/") for root in roots)]
        total, quota = sum(size for _, _, size, _ in inside), storage.quota or 0
        text = f"{' and '.join(f'{name} ({print_quota(size)})' for _, name, size, _ in inside)} on {storage.path}"
        if total > quota:
            larger = [f"{s.path} ({print_quota(s.quota)})" for s in cluster.storage.values() if (s.quota or 0) >= total]
            hint = " or ".join(remedy for *_, remedy in inside)
            hint += f"; the quota of {', '.join(larger)} is large enough" if larger else ""
            message = f"{text}: {print_quota(total)} are more than its quota of {print_quota(quota)}"
            findings.append(Finding("quota", "refuse", message, hint, source))
        elif inside:
            findings.append(Finding("quota", "ok", f"{text}, quota {print_quota(quota)}", None, source))
    return findings


# -- this machine -----------------------------------------------------------------------------------------------------


def check_site(
    job: BatchJob, recipe: Recipe, cluster: Cluster, checkpoint_bytes: int | None, steps: int | None
) -> list[Finding]:
    folder = Path(job.run_dir).resolve()
    kind, storage = file_system(folder), [s.path for s in cluster.storage.values() if not s.path.startswith("$TMPDIR")]
    # A folder that only this node has exists here but is missing where the job runs.
    is_local = kind in LOCAL_TYPES or any(folder.is_relative_to(prefix) for prefix in LOCAL_PREFIXES)
    is_shared = any(folder.is_relative_to(p) for p in map(os.path.expandvars, storage) if p.startswith("/"))
    choices = " or ".join(p for p in storage if not p.startswith("$HOME")) or "a shared file system"
    folder_row: Row = (
        cluster.slurm is not None and is_local and not is_shared,
        "shared_folder",
        f"{folder} is on this node's own {kind or 'disk'}: compute nodes cannot see it",
        f"choose a folder on {choices} with --run",
        source_of(cluster, "storage"),
    )
    space = Finding("disk", "note", "the checkpoint size of this model is unknown: free disk space was not checked")
    if checkpoint_bytes is not None and steps is not None:
        from windlass.checkpoint.keep import forecast

        free_bytes = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
        batch_tokens = recipe.data.batch_tokens or 0
        need = forecast(checkpoint_bytes, recipe.save, steps=steps, batch_tokens=batch_tokens, free_bytes=free_bytes)
        too_much = (
            "keep fewer checkpoints (save.keep_last, save.keep_best, save.keep_every) or use a larger file system",
            "[save] of the recipe and the free space now",
        )
        space = (
            Finding("disk", "refuse", need.text, *too_much) if need.fits is False else Finding("disk", "ok", need.text)
        )
    return [*_findings([folder_row]), space, *check_environment(job), _check_store(recipe)]


def file_system(path: Path) -> str | None:
    """The type of the file system a path is on, from the mount table."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    kinds = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place)]
    return max(kinds)[1] if kinds else None


def check_environment(job: BatchJob) -> list[Finding]:
    return _findings(_environment_rows(job))


def _environment_rows(job: BatchJob) -> list[Row]:
    env, image = job.environment, Path(os.path.expandvars(job.environment.image or ""))
    has_image = env.kind == "container" and bool(env.image)
    return [
        (
            env.kind == "venv"
            and bool(env.venv)
            and not Path(os.path.expandvars(env.venv or ""), "bin", "activate").is_file(),
            "venv",
            f"{env.venv} is not a virtual environment (bin/activate is missing)",
            "set launch.venv",
            None,
        ),
        (
            env.kind == "container" and not env.image,
            "image",
            "the environment is a container, but no image is named",
            "set launch.container to a .sif file or an unpacked folder",
            None,
        ),
        (
            has_image and not image.exists(),
            "image",
            f"the container image {image} does not exist",
            "check launch.container",
            None,
        ),
        (
            has_image and image.exists() and not os.access(image, os.R_OK),
            "image",
            f"the container image {image} cannot be read",
            "check its permissions",
            None,
        ),
        *(
            (
                has_image and source.startswith("/") and "$" not in source and not Path(source).exists(),
                "binds",
                f"{source} is bound into the container but does not exist on this node",
                "create it, or correct launch.binds: every rank fails if compute nodes lack it too",
                None,
            )
            for source in (os.path.expandvars(bind.split(":")[0]) for bind in env.binds)
        ),
    ]


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
            fault = f"{shard.file.name} {'is missing' if size is None else f'has {size:,} of {needed:,} bytes'}"
            return Finding(
                "store",
                "refuse",
                f"the token store {recipe.data.store} is not complete: {fault}",
                "run `windlass tokenize` again, which processes only the missing parts",
            )
    return Finding("store", "ok", f"token store {recipe.data.store}: complete")


# -- the budget, and refusing -----------------------------------------------------------------------------------------


def check_chain(job: BatchJob, expected_links: int | None) -> list[Finding]:
    """Whether the jobs that are submitted are enough for the whole run."""
    if expected_links is None or job.chain == "self" or expected_links <= job.links:
        return []
    text = f"the whole run needs about {expected_links} jobs, and {job.links} would be submitted"
    return [
        Finding(
            "chain", "note", text, f"use --chain {expected_links}, or --chain self, where each job submits the next"
        )
    ]


def check_budget(
    asked_node_hours: float, used_node_hours: float, budget: float | None, needed_node_hours: float | None = None
) -> list[Finding]:
    """Compare the remaining budget with the jobs at their limit, and with what the whole run is expected to need."""
    if budget is None:
        return [Finding("budget", "note", "no allocation budget set (launch.budget_node_hours); skipped")]
    left = budget - used_node_hours
    available = f"{print_figure(left)} of {print_figure(budget)} left ({print_figure(used_node_hours)} used or running)"
    run = (
        ""
        if needed_node_hours is None
        else f"; the whole run is expected to need {print_figure(needed_node_hours)} more"
    )
    text = f"up to {print_node_hours(asked_node_hours)} requested, {available}{run}"
    advice = (
        "shorten launch.time or --chain, or correct launch.budget_node_hours",
        "launch.budget_node_hours and the ledger (`windlass jobs --ledger`)",
    )
    if needed_node_hours is not None and needed_node_hours > left:
        need = (
            f"the whole run is expected to need {print_node_hours(needed_node_hours)} until it is finished, {available}"
        )
        return [
            Finding("budget", "refuse", need, "train on fewer tokens or a smaller model (`windlass budget`)", advice[1])
        ]
    if asked_node_hours > left:
        return [Finding("budget", "refuse", text, *advice)]
    return [Finding("budget", "ok", text)]


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
