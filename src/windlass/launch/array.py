"""CPU work in the queue: an array with a merge job after it, or one plain job, on a partition that can hold it.

`windlass tokenize DATA.toml --array N`, `windlass launch`, `windlass image` and `windlass submit` use this.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.model import Node, SlurmLimits
from windlass.clusters.probe import recognise
from windlass.config.sources import DataFile
from windlass.data.inputs import find_files
from windlass.errors import LaunchError, WindlassError
from windlass.launch.cpu import CpuWork, cpu_job
from windlass.launch.job import BatchJob
from windlass.launch.script import render
from windlass.launch.slurm import SlurmScheduler
from windlass.launch.submit import check_known, submit_job

# Text that one core tokenizes per second with the slowest engine (benchmarks/results/tokenize.md, the row of
# datatrove): a partition chosen by it errs on the long side.
TOKENIZED_BYTES_PER_SECOND = 2e6
# Text of one token where the sources cannot be read here.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class SubmittedArray:
    """The jobs of an array; train after the merge job: `windlass launch RECIPE --after ID`."""

    folder: Path  # scripts, logs and jobs.jsonl of the jobs
    array_job: str
    merge_job: str
    partition: str  # the choice and its reason


def submit_array(
    command: Sequence[str],
    *,
    count: int,
    then: Sequence[str],
    cluster: Cluster | str | None = None,
    folder: Path | None = None,
    account: str | None = None,
    env: Mapping[str, str] | None = None,
    size: int | None = None,
) -> SubmittedArray:
    """`command` as an array of `count` tasks, `then` once they are all done; returns at once.

    A task that fails leaves the merge job cancelled, not waiting forever; submitting again does only what is missing.
    `size`: bytes of text, by which the partition is chosen; None: unknown.
    """
    machine, executor = find_cluster(cluster), SlurmScheduler()
    folder = (folder or Path("runs") / f"{_name(command)}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    array, merge = _array_and_merge(command, then, count, machine, folder, account, env, size)
    array_id = submit_job(array, machine, executor)
    merge_id = submit_job(merge, machine, executor, after=f"afterok:{array_id}")
    return SubmittedArray(folder, array_id, merge_id, array.about[-1])


def input_bytes(data: DataFile, tokens: int | None = None) -> int | None:
    """Text of all sources; where they cannot be read here, from the tokens that are expected. None: unknown."""
    with contextlib.suppress(WindlassError, OSError):
        return sum(file.weight for name, source in data.sources.items() for file in find_files(name, source))
    return None if tokens is None else tokens * BYTES_PER_TOKEN


def tokenize_commands(data: Path) -> tuple[list[str], list[str]]:
    """Of the tasks of an array, and of the job that joins their shards."""
    merge = ["windlass", "tokenize", str(data.absolute())]
    return [*merge, "--array-task", "auto"], merge


def tokenize_array(
    data: Path,
    count: int,
    *,
    cluster: Cluster,
    account: str | None,
    env: Mapping[str, str],
    size: int | None = None,
) -> SubmittedArray:
    tasks, merge = tokenize_commands(data)
    return submit_array(tasks, count=count, then=merge, cluster=cluster, account=account, env=env, size=size)


def tokenize_scripts(
    data: Path,
    count: int,
    *,
    cluster: Cluster,
    account: str | None,
    env: Mapping[str, str],
    size: int | None = None,
) -> dict[str, str]:
    """What `tokenize_array` would submit: the array's script and that of the merge job."""
    tasks, merge = tokenize_commands(data)
    folder = (Path("runs") / _name(merge)).absolute()
    jobs = _array_and_merge(tasks, merge, count, cluster, folder, account, env, size)
    return {job.kind: render(job, cluster) for job in jobs}


def command_job(
    argv: Sequence[str], *, cluster: str | None, folder: Path, account: str | None = None
) -> tuple[Cluster, BatchJob]:
    """Any command as one CPU job; its log and script are in `folder`."""
    machine = find_cluster(cluster)
    return machine, cpu_job(machine, folder.absolute(), "command", argv, account=account)


def submit_command(machine: Cluster, job: BatchJob, *, after: str | None = None) -> str:
    """Returns the job's id."""
    executor = SlurmScheduler()
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
    size: int | None,
) -> tuple[BatchJob, BatchJob]:
    limit = cluster.slurm.max_array if cluster.slurm else None
    if count < 1 or (limit is not None and count > limit):
        raise LaunchError(
            "launch.array-size",
            f"an array of {count} tasks is not possible on {cluster.name}: use 1 to {limit or 'any number'}",
            hint=f"use --array {max(1, min(count, limit or count))}",
        )
    work = None if size is None else CpuWork(core_seconds=size / TOKENIZED_BYTES_PER_SECOND, tasks=count)
    merge = cpu_job(cluster, folder, "merge", then, account=account, env=env, work=work)
    return replace(merge, name=f"{folder.name}-array", kind="array", command=tuple(command), array=count), merge
