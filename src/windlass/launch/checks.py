"""Would this job be refused, hang in the queue or run badly? Asked before the queue does; every refusal names its rule and source.

`check_request` compares the job with the cluster file and touches nothing. `check_site` looks at this machine: files, disks,
image, token store. Both return findings; only `refuse` raises.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.clusters import describe
from windlass.clusters.lint import lint_masks
from windlass.clusters.model import Cluster
from windlass.config import Recipe
from windlass.errors import LaunchError, WindlassError
from windlass.launch.job import Job, find_partition
from windlass.units import print_bytes, print_seconds

if TYPE_CHECKING:
    from windlass.data.store import Store


@dataclass(frozen=True)
class Finding:
    """One check's answer."""

    rule: str
    level: str
    """ok, note, warn or refuse."""
    message: str
    hint: str | None = None
    source: str | None = None
    """Where the rule was read, with its date and how sure we are."""


def source_of(cluster: Cluster, key: str) -> str:
    """Where the cluster file has a value from: the key's own source or that of the table around it."""
    found = describe.source_of(key, cluster.sources)
    if found is not None:
        sure = "" if found.status == "documented" else f", {found.status}"
        return f"{found.source}{f' ({found.on}{sure})' if found.on else sure}"
    return f"cluster file {cluster.name}"


EARLY_SECONDS = 60.0
"""How much earlier than asked SLURM may send --signal (man sbatch)."""
START_SECONDS = 60.0
"""What a job needs at least until its ranks listen."""


# -- the request against the cluster file ---------------------------------------------------------------------------------


def check_request(job: Job, cluster: Cluster) -> list[Finding]:
    """Everything that can be said without looking at a disk."""
    if cluster.slurm is None:
        return []
    checks = (_queue, _account, _shape, _memory, _masks, _lead, _options, _container_arch)
    return [finding for check in checks for finding in check(job, cluster)]


def _queue(job: Job, cluster: Cluster) -> Iterator[Finding]:
    slurm, source = cluster.slurm, source_of(cluster, "slurm.partitions")
    assert slurm is not None
    known = sorted({p.name for p in slurm.partitions})
    queue = find_partition(cluster, job.partition, job.qos)
    if queue is None:
        names = [p.name for p in slurm.partitions]
        if job.partition in names:
            options = ", ".join(str(p.qos) for p in slurm.partitions if p.name == job.partition)
            yield Finding(
                "qos",
                "refuse",
                f"QOS {job.qos!r} is not one of partition {job.partition} ({options})",
                "set launch.qos",
                source,
            )
        elif known:
            yield Finding("partition", "refuse", f"{cluster.name} has no partition {job.partition!r} that we know of", f"known: {', '.join(known)}; `windlass clusters {cluster.name} --probe` asks the machine", source)  # fmt: skip
        return
    name = queue.name + (f" with QOS {queue.qos}" if queue.qos else "")
    if queue.max_time is not None and job.seconds > queue.max_time:
        yield Finding("wall_time", "refuse", f"{print_seconds(job.seconds)} is more than the {print_seconds(queue.max_time)} of {name}: the job would pend for ever", f"set launch.time to at most {print_seconds(queue.max_time)} and use --chain", source)  # fmt: skip
    if queue.max_nodes is not None and job.nodes > queue.max_nodes:
        yield Finding(
            "nodes",
            "refuse",
            f"{job.nodes} nodes are more than the {queue.max_nodes} of {name}",
            _larger_queue(job, cluster),
            source,
        )
    if job.nodes < queue.min_nodes:
        rule = slurm.rules.get("bprod_minimum", f"{name} begins at {queue.min_nodes} nodes")
        yield Finding("nodes", "refuse", f"{job.nodes} nodes are fewer than the {queue.min_nodes} of {name}: {rule}", "ask for more nodes or leave partition and QOS out", source)  # fmt: skip
    if cluster.nodes is not None and job.nodes > cluster.nodes:
        yield Finding(
            "nodes",
            "refuse",
            f"{job.nodes} nodes are more than the {cluster.nodes} that {cluster.title} has",
            None,
            source_of(cluster, "nodes"),
        )
    if job.devices_per_node and not queue.gpus:
        yield Finding("gpus", "refuse", f"{name} has no accelerators", "choose a partition with devices", source)
    if job.links > (slurm.max_submitted or job.links):
        yield Finding(
            "max_jobs",
            "refuse",
            f"{job.links} links are more than the {slurm.max_submitted} jobs that may be queued",
            "use --chain self",
            source,
        )


def _larger_queue(job: Job, cluster: Cluster) -> str:
    rows = cluster.slurm.partitions if cluster.slurm else []
    fits = [
        p for p in rows if p.gpus and p.min_nodes <= job.nodes and (p.max_nodes is None or job.nodes <= p.max_nodes)
    ]
    if not fits:
        return "no queue that we know of takes so many nodes"
    return "these take it: " + ", ".join(p.name + (f"/{p.qos}" if p.qos else "") for p in fits)


def _account(job: Job, cluster: Cluster) -> Iterator[Finding]:
    slurm, source = cluster.slurm, source_of(cluster, "slurm")
    assert slurm is not None
    if slurm.account_required and not (job.account or os.environ.get("SBATCH_ACCOUNT")):
        rule = slurm.rules.get("account", "--account is compulsory here")
        yield Finding(
            "account",
            "refuse",
            f"no account is given: {rule}",
            "set launch.account in the recipe or on the command line: launch.account=NAME",
            source,
        )
    if slurm.qos_required and not job.qos:
        yield Finding("qos", "refuse", "no QOS is given, and it is compulsory here", "set launch.qos", source)


def _shape(job: Job, cluster: Cluster) -> Iterator[Finding]:
    slurm, node = cluster.slurm, cluster.node
    assert slurm is not None
    if job.devices_per_node > node.devices:
        yield Finding(
            "devices",
            "refuse",
            f"{job.devices_per_node} devices per node, but a node has {node.devices}",
            None,
            source_of(cluster, "node.devices"),
        )
    if job.devices_per_node and not job.torchrun and job.tasks_per_node != job.devices_per_node:
        yield Finding("tasks", "refuse", f"{job.tasks_per_node} tasks for {job.devices_per_node} devices on a node: one rank drives one device", 'set launch.starter = "srun"', source_of(cluster, "slurm"))  # fmt: skip
    if slurm.whole_node and job.nodes > 1 and 0 < job.devices_per_node < node.devices:
        yield Finding(
            "whole_nodes",
            "refuse",
            slurm.rules.get("whole_nodes", f"several nodes only with all {node.devices} devices"),
            None,
            source_of(cluster, "slurm"),
        )
    usable = node.cores_usable or node.cores
    cores = job.tasks_per_node * (job.cpus_per_task or 1)
    if cores > usable:
        rule = slurm.rules.get("usable_cores", f"a node gives a job {usable} cores")
        yield Finding(
            "cores",
            "refuse",
            f"{job.tasks_per_node} tasks x {job.cpus_per_task} cores = {cores}, more than {usable}: {rule}",
            None,
            source_of(cluster, "node.cores"),
        )
    rule = slurm.rules.get("cores_per_gpu", "")
    if (
        rule
        and job.devices_per_node
        and cores != job.devices_per_node * (slurm.cpus_per_task or cores // job.devices_per_node)
    ):
        yield Finding(
            "cores_per_gpu",
            "refuse",
            f"{cores} cores for {job.devices_per_node} devices: {rule}",
            None,
            source_of(cluster, "slurm"),
        )


def _memory(job: Job, cluster: Cluster) -> Iterator[Finding]:
    slurm = cluster.slurm
    assert slurm is not None
    asked = str(job.sbatch.get("mem", job.mem or ""))
    if slurm.mem_forbidden and asked:
        yield Finding(
            "mem",
            "refuse",
            f"--mem={asked}: {slurm.rules.get('no_mem', '--mem must not be set here')}",
            "take launch.sbatch.mem out",
            source_of(cluster, "slurm"),
        )
    if asked == "0" and "mem_zero" in slurm.rules:
        yield Finding(
            "mem_zero", "refuse", slurm.rules["mem_zero"], "take launch.sbatch.mem out", source_of(cluster, "slurm")
        )
    limit, size = cluster.node.memory_usable or cluster.node.memory, _megabytes(asked)
    if limit is not None and size is not None and size * 10**6 > limit * 1.05:
        yield Finding(
            "mem",
            "refuse",
            f"--mem={asked} is more than the {print_bytes(limit)} a node gives: the job would pend for ever",
            None,
            source_of(cluster, "node.memory"),
        )


def _megabytes(text: str) -> float | None:
    """sbatch's --mem: megabytes, or with K, M, G, T."""
    factor = {"K": 1e-3, "M": 1.0, "G": 1e3, "T": 1e6}
    number, unit = (text[:-1], text[-1].upper()) if text and text[-1].isalpha() else (text, "M")
    return float(number) * factor[unit] if number.isdigit() and unit in factor else None


def _masks(job: Job, cluster: Cluster) -> Iterator[Finding]:
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
        rule = cluster.slurm.rules.get("full_node_masks", "masks need a full node") if cluster.slurm else ""
        yield Finding(
            "full_node_masks",
            "warn",
            f"{job.tasks_per_node} tasks: {rule}; the script binds to cores instead",
            None,
            source_of(cluster, "node"),
        )


def _lead(job: Job, cluster: Cluster) -> Iterator[Finding]:
    """SLURM looks at its clock every 30 s or so and may warn a minute early: in a short job before the ranks are there to hear it."""
    if job.kind == "train" and job.seconds - job.lead_seconds < EARLY_SECONDS + START_SECONDS:
        yield Finding("signal_lead", "warn", f"the warning comes {print_seconds(job.lead_seconds)} (up to {print_seconds(EARLY_SECONDS)} more) before the end of a {print_seconds(job.seconds)} job: perhaps before the ranks have started", "a longer launch.time or a shorter launch.signal_lead", "man sbatch, --signal; seen on SLURM 22.05")  # fmt: skip


def _options(job: Job, cluster: Cluster) -> Iterator[Finding]:
    if job.requeue and job.chain != "none":
        yield Finding("requeue", "note", "a job that SLURM requeues counts as one more link when progress is judged")
    unresolved = sorted({s.path for s in cluster.storage.values() if "$PROJECT" in s.path}) if not job.account else []
    if job.staging and "$PROJECT" in job.staging.target and unresolved:
        yield Finding("staging", "refuse", f"the store would be copied to {job.staging.target}, and no account names the project", "set launch.account or launch.stage_data=false", source_of(cluster, "storage"))  # fmt: skip

    disk = cluster.node.local_disk or ""
    if job.staging and job.staging.per_node and "--constraint=" in disk and "constraint" not in job.sbatch:
        name = disk.partition("--constraint=")[2].split(")")[0].split()[0]
        yield Finding("local_disk", "warn", f"the store is copied to a node's own disk, and only some nodes have one: {disk}", f"launch.sbatch.constraint={name}", source_of(cluster, "node.local_disk"))  # fmt: skip


def _container_arch(job: Job, cluster: Cluster) -> Iterator[Finding]:
    if job.environment.kind == "container" and cluster.node.arch == "aarch64":
        yield Finding(
            "arch",
            "note",
            "the nodes are aarch64: an x86 image ends with 'exec format error'",
            None,
            source_of(cluster, "node.arch"),
        )


# -- this machine -----------------------------------------------------------------------------------------------------------

LOCAL_TYPES = ("tmpfs", "ramfs", "devtmpfs")
LOCAL_PREFIXES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def check_site(
    job: Job, recipe: Recipe, cluster: Cluster, *, checkpoint_bytes: int | None, steps: int | None
) -> list[Finding]:
    """Files, disks, image and store, as this machine sees them."""
    return [
        *_run_folder(job, cluster),
        *_room(job, recipe, checkpoint_bytes, steps),
        *_image(job),
        *_python(job),
        *_store(recipe),
    ]


def _run_folder(job: Job, cluster: Cluster) -> Iterator[Finding]:
    """A folder that only this node has looks fine here and is missing where the job runs."""
    if cluster.slurm is None:
        return
    path = Path(job.run_dir).resolve()
    shared = [os.path.expandvars(s.path) for s in cluster.storage.values() if not s.path.startswith("$TMPDIR")]
    if any(_within(path, Path(place)) for place in shared if place.startswith("/")):
        return
    kind = file_system(path)
    if kind in LOCAL_TYPES or any(_within(path, Path(prefix)) for prefix in LOCAL_PREFIXES):
        yield Finding("shared_folder", "refuse", f"{path} is on this node's own {kind or 'disk'}: compute nodes cannot see it", f"choose a folder on {_places(cluster)} with --run", source_of(cluster, "storage"))  # fmt: skip


def _within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _places(cluster: Cluster) -> str:
    return (
        " or ".join(s.path for s in cluster.storage.values() if not s.path.startswith(("$TMPDIR", "$HOME")))
        or "a shared file system"
    )


def file_system(path: Path) -> str | None:
    """The type of the file system a path lies on, from the mount table."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    inside = [(len(place), kind) for place, kind in mounts if _within(path, Path(place))]
    return max(inside)[1] if inside else None


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return path if path.exists() else existing(path.parent)


def _room(job: Job, recipe: Recipe, checkpoint_bytes: int | None, steps: int | None) -> Iterator[Finding]:
    if checkpoint_bytes is None or steps is None:
        yield Finding("disk", "note", "the checkpoint forecast is unknown for this model: room on disk was not checked")
        return
    from windlass.checkpoint.keep import forecast

    free = shutil.disk_usage(existing(Path(job.run_dir).absolute())).free
    found = forecast(
        checkpoint_bytes, recipe.save, steps=steps, batch_tokens=recipe.data.batch_tokens or 0, free_bytes=free
    )
    if found.fits is False:
        yield Finding(
            "disk",
            "refuse",
            found.text,
            "keep fewer (save.keep_last, save.keep_best, save.keep_every) or use a larger file system",
            "[save] of the recipe and the free space now",
        )
    else:
        yield Finding("disk", "ok", found.text)


def _image(job: Job) -> Iterator[Finding]:
    env = job.environment
    if env.kind != "container":
        return
    if not env.image:
        yield Finding(
            "image",
            "refuse",
            "environment is a container, but no image is named",
            "set launch.container to a .sif file or an unpacked folder",
        )
        return
    image = Path(os.path.expandvars(env.image))
    if not image.exists():
        yield Finding("image", "refuse", f"the container image {image} does not exist", "check launch.container")
    elif not os.access(image, os.R_OK):
        yield Finding("image", "refuse", f"the container image {image} cannot be read", "check its permissions")
    for bind in env.binds:
        source = os.path.expandvars(bind.split(":")[0])
        if source.startswith("/") and "$" not in source and not Path(source).exists():
            yield Finding(
                "binds",
                "warn",
                f"{source} is bound into the container but does not exist on this node",
                "every rank fails when compute nodes lack it too",
            )


def _python(job: Job) -> Iterator[Finding]:
    venv = job.environment.venv
    if job.environment.kind == "venv" and venv and not Path(venv, "bin", "activate").is_file():
        yield Finding(
            "venv", "refuse", f"{venv} is no virtual environment (bin/activate is missing)", "set launch.venv"
        )


def _store(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.store is None:
        yield Finding("store", "note", "no token store: the run trains on synthetic tokens")
        return
    from windlass.data.store import open_store

    try:
        store = open_store(os.path.expandvars(recipe.data.store))
    except WindlassError as error:
        yield Finding("store", "refuse", f"the token store is not usable: {error.message}", error.hint)
        return
    problems = _size_problems(store)
    if problems:
        yield Finding(
            "store",
            "refuse",
            f"the token store {recipe.data.store} is not complete: {problems[0]}",
            "run `windlass tokenize` again: it makes what is missing",
        )
    else:
        yield Finding("store", "ok", f"token store {recipe.data.store}: complete")


def _size_problems(store: Store) -> list[str]:
    """Missing or short shards, by their sizes only: a full check reads every byte."""
    found = []
    for shard in (shard for splits in store.shards.values() for shards in splits.values() for shard in shards):
        needed = shard.offset + shard.tokens * shard.dtype.itemsize
        size = shard.file.stat().st_size if shard.file.is_file() else None
        if size is None or size < needed:
            found.append(f"{shard.file.name} {'is missing' if size is None else f'has {size:,} bytes'} of {needed:,}")
    return found


# -- money --------------------------------------------------------------------------------------------------------------------


def check_budget(asked_node_hours: float, used_node_hours: float, budget: float | None) -> list[Finding]:
    """Node-hours the job may use against what the allocation has left."""
    if budget is None:
        return [Finding("budget", "note", "no allocation is named (launch.budget_node_hours): not checked")]
    left = budget - used_node_hours
    text = f"up to {asked_node_hours:,.1f} node-hours asked, {left:,.1f} of {budget:,.1f} left ({used_node_hours:,.1f} used or running)"
    if asked_node_hours > left:
        return [
            Finding(
                "budget",
                "refuse",
                text,
                "shorten launch.time or --chain, or correct launch.budget_node_hours",
                "launch.budget_node_hours and the ledger (`windlass jobs --ledger`)",
            )
        ]
    return [Finding("budget", "ok", text)]


def refusals(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.level == "refuse"]


def refuse(findings: Sequence[Finding], *, force: bool) -> None:
    """Raise with every refusal, its rule and its source, unless forced."""
    bad = refusals(findings)
    if not bad or force:
        return
    lines = [
        f"{f.rule}: {f.message}" + (f" [{f.source}]" if f.source else "") + (f" -> {f.hint}" if f.hint else "")
        for f in bad
    ]
    raise LaunchError(
        "launch.submitted-check-failed",
        f"not submitted, {len(bad)} check{'s' if len(bad) > 1 else ''} failed:\n  " + "\n  ".join(lines),
        hint="--force submits all the same; --dry-run shows the script",
    )
