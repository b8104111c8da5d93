"""CPU work in the queue: an array with a merge job after it, or one plain job.

`windlass tokenize DATA.toml --array N`, `windlass launch --pretokenize` and `windlass submit` use this.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.model import Node, Partition, SlurmLimits
from windlass.clusters.probe import recognise
from windlass.clusters.scheduler import default_account
from windlass.errors import LaunchError
from windlass.launch.job import BatchJob, plain_environment
from windlass.launch.script import render
from windlass.launch.slurm import SlurmScheduler
from windlass.launch.submit import active_venv, check_known, submit_job

# Wall time of a CPU job unless the partition's limit is shorter: tokenizing restarts where it stopped, so short is
# fine.
CPU_SECONDS = 4 * 3600.0
CPU_CORES = 8


@dataclass(frozen=True)
class SubmittedArray:
    """The jobs of an array; train after the merge job: `windlass launch RECIPE --after ID`."""

    folder: Path  # scripts, logs and jobs.jsonl of the jobs
    array_job: str
    merge_job: str


def submit_array(
    command: Sequence[str],
    *,
    count: int,
    then: Sequence[str],
    cluster: Cluster | str | None = None,
    folder: Path | None = None,
    account: str | None = None,
    env: Mapping[str, str] | None = None,
) -> SubmittedArray:
    """`command` as an array of `count` tasks, `then` once they are all done; returns at once.

    A task that fails leaves the merge job cancelled, not waiting forever; submitting again does only what is missing.
    """
    machine, executor = find_cluster(cluster), SlurmScheduler()
    folder = (folder or Path("runs") / f"{_name(command)}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    array, merge = _array_and_merge(command, then, count, machine, folder, account, env)
    array_id = submit_job(array, machine, executor)
    return SubmittedArray(folder, array_id, submit_job(merge, machine, executor, after=f"afterok:{array_id}"))


def tokenize_array(
    data: Path, count: int, *, cluster: Cluster, account: str | None, env: Mapping[str, str]
) -> SubmittedArray:
    argv = ["windlass", "tokenize", str(data.absolute())]
    tasks = [*argv, "--array-task", "auto"]
    return submit_array(tasks, count=count, then=argv, cluster=cluster, account=account, env=env)


def tokenize_scripts(
    data: Path, count: int, *, cluster: Cluster, account: str | None, env: Mapping[str, str]
) -> dict[str, str]:
    """What `tokenize_array` would submit: the array's script and that of the merge job."""
    argv = ["windlass", "tokenize", str(data.absolute())]
    folder = (Path("runs") / _name(argv)).absolute()
    jobs = _array_and_merge([*argv, "--array-task", "auto"], argv, count, cluster, folder, account, env)
    return {job.kind: render(job, cluster) for job in jobs}


def submit_command(
    argv: Sequence[str], *, cluster: str | None, folder: Path, account: str | None = None, after: str | None = None
) -> str:
    """Any command as one CPU job; its log and script are in `folder`. Returns the job's id."""
    machine, executor = find_cluster(cluster), SlurmScheduler()
    job = _cpu_job(machine, folder.absolute(), "command", argv, account)
    if after is not None:
        check_known(executor, after)
    return submit_job(job, machine, executor, after=f"afterok:{after}" if after else None)


def _name(command: Sequence[str]) -> str:
    """tokenize-DATA for `windlass tokenize path/DATA.toml`."""
    parts = [Path(part).stem for part in command[:3] if not part.startswith("-")]
    return "-".join(part for part in parts if part != "windlass") or "array"


def find_cluster(cluster: Cluster | str | None) -> Cluster:
    """The cluster that is named, else the one this host belongs to, else a plain SLURM with its own defaults."""
    if isinstance(cluster, Cluster):
        return cluster
    if name := cluster or os.environ.get("WINDLASS_CLUSTER"):
        return load_cluster(name)
    try:
        return recognise()
    except LaunchError:
        return Cluster(
            name="slurm",
            title="this SLURM",
            device="cpu",
            node=Node(devices=1, cores=os.cpu_count() or 1),
            slurm=SlurmLimits(),
        )


def _array_and_merge(
    command: Sequence[str],
    then: Sequence[str],
    count: int,
    cluster: Cluster,
    folder: Path,
    account: str | None,
    env: Mapping[str, str] | None,
) -> tuple[BatchJob, BatchJob]:
    limit = cluster.slurm.max_array if cluster.slurm else None
    if count < 1 or (limit is not None and count > limit):
        raise LaunchError(
            "launch.array-size",
            f"an array of {count} tasks is not possible on {cluster.name}: 1 to {limit or 'any number'}",
            hint=f"use --array {max(1, min(count, limit or count))}",
        )
    merge = _cpu_job(cluster, folder, "merge", then, account, env)
    return replace(merge, name=f"{folder.name}-array", kind="array", command=tuple(command), array=count), merge


def _cpu_job(
    cluster: Cluster,
    folder: Path,
    kind: str,
    command: Sequence[str],
    account: str | None,
    env: Mapping[str, str] | None = None,
) -> BatchJob:
    if cluster.slurm is None:
        raise LaunchError(
            "launch.cluster-without-slurm",
            f"{cluster.name} has no SLURM, so there is no queue for CPU jobs",
            hint="run the command here, without --array",
        )
    # Without accelerators: the file's choice, else the first partition of that kind, else the default.
    name, partitions = cluster.slurm.cpu_partition or cluster.slurm.partition, cluster.slurm.partitions
    rows = [p for p in partitions if p.name == name] or [p for p in partitions if not p.gpus]
    queue = rows[0] if rows else Partition(name=name) if name else None
    return BatchJob(
        name=f"{folder.name}-{kind}",
        kind=kind,
        run_dir=str(folder),
        workdir=str(Path.cwd()),
        command=tuple(command),
        cpus_per_task=min(CPU_CORES, cluster.node.cores_usable or cluster.node.cores),
        seconds=min(CPU_SECONDS, queue.max_time if queue and queue.max_time else CPU_SECONDS),
        partition=queue.name if queue else None,
        qos=queue.qos if queue else None,
        account=account or default_account(cluster.slurm.account),
        environment=plain_environment(cluster, active_venv()),
        env=env or {},
        requeue=True,
        about=("CPU work: no accelerators are asked for",),
    )
