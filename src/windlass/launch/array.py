"""How does work that needs no accelerator go through the queue? As an array with a merge after it, or as one plain CPU job.

`windlass tokenize DATA.toml --array N` and `windlass launch --pretokenize` come here; any other command of ours
(`windlass eval RUN`) goes through `submit_command`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.model import Node, Partition, SlurmLimits
from windlass.clusters.probe import recognise
from windlass.errors import LaunchError
from windlass.files import append_line, write_atomic
from windlass.launch.executor import Executor
from windlass.launch.job import Environment, Job
from windlass.launch.script import render
from windlass.launch.slurm import Slurm
from windlass.launch.submit import active_venv, check_known, submission_record

CPU_SECONDS = 4 * 3600.0
"""Wall time of a CPU job when the partition has no shorter limit: tokenising restarts where it stopped, so short is fine."""
CPU_CORES = 8


@dataclass(frozen=True)
class Submitted:
    folder: Path
    """Scripts, logs and jobs.jsonl of the jobs."""
    array_job: str
    merge_job: str
    """Train after this one: `windlass launch RECIPE --after ID`."""


def submit_array(
    command: Sequence[str], *, count: int, then: Sequence[str], cluster: Cluster | str | None = None, folder: Path | None = None, account: str | None = None,
    options: Mapping[str, str | int | bool] | None = None, env: Mapping[str, str] | None = None, executor: Executor | None = None, after: str | None = None,
    seconds: float | None = None,
) -> Submitted:  # fmt: skip
    """`command` as an array of `count` tasks, `then` once they are all done; returns at once.

    A task that fails leaves the last job cancelled, not waiting for ever; submitting again does only what is missing.
    """
    machine = _machine(cluster)
    executor = executor or Slurm()
    folder = folder or Path("runs") / f"{_name(command)}-{time.strftime('%Y%m%d-%H%M%S')}"
    array, merge = _pair(command, then, count, machine, folder, account, options, env, seconds)
    if after is not None:
        check_known(executor, after)
    first = _submit(array, machine, executor, f"afterok:{after}" if after else None)
    return Submitted(Path(array.run_dir), first, _submit(merge, machine, executor, f"afterok:{first}"))


def _pair(
    command: Sequence[str], then: Sequence[str], count: int, machine: Cluster, folder: Path, account: str | None = None,
    options: Mapping[str, str | int | bool] | None = None, env: Mapping[str, str] | None = None, seconds: float | None = None,
) -> tuple[Job, Job]:  # fmt: skip
    """The array, and the one job after it."""
    _check(machine, count)
    make = _maker(machine, folder.absolute(), account, options or {}, env or {}, seconds)
    return make("array", tuple(command), array=count), make("merge", tuple(then))


def tokenize_array(data: Path, count: int, **more: Any) -> Submitted:
    """`windlass tokenize DATA.toml` as an array; train after `merge_job`."""
    words = _tokenize(data)
    return submit_array([*words, "--array-task", "auto"], count=count, then=words, **more)


def tokenize_scripts(
    data: Path, count: int, *, cluster: Cluster, account: str | None, env: Mapping[str, str]
) -> dict[str, str]:
    """What `tokenize_array` would submit: the array's script and that of the merge after it."""
    words = _tokenize(data)
    jobs = _pair([*words, "--array-task", "auto"], words, count, cluster, Path("runs") / _name(words), account, env=env)
    return {job.kind: render(job, cluster) for job in jobs}


def _tokenize(data: Path) -> list[str]:
    return ["windlass", "tokenize", str(data.absolute())]


def _name(command: Sequence[str]) -> str:
    """tokenize-DATA for `windlass tokenize path/DATA.toml`."""
    words = [Path(w).stem for w in command[:3] if not w.startswith("-")]
    return "-".join(w for w in words if w != "windlass") or "array"


def _machine(cluster: Cluster | str | None) -> Cluster:
    """The cluster that is named, else the one this host belongs to, else a plain SLURM with its own defaults."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        return load_cluster(cluster)
    if named := os.environ.get("WINDLASS_CLUSTER"):
        return load_cluster(named)
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


def submit_command(
    words: Sequence[str], *, cluster: Cluster | str | None = None, folder: Path, account: str | None = None, options: Mapping[str, str | int | bool] | None = None,
    env: Mapping[str, str] | None = None, executor: Executor | None = None, after: str | None = None, seconds: float | None = None,
) -> str:  # fmt: skip
    """Any command as one CPU job; its log and script lie in `folder`. Returns the job's id."""
    cluster = _machine(cluster)
    _check(cluster, 1)
    executor = executor or Slurm()
    if after is not None:
        check_known(executor, after)
    job = _maker(cluster, folder.absolute(), account, options or {}, env or {}, seconds)("command", tuple(words))
    return _submit(job, cluster, executor, f"afterok:{after}" if after else None)


def _check(cluster: Cluster, tasks: int) -> None:
    if cluster.slurm is None:
        raise LaunchError(
            "launch.slurm-queue-cpu-jobs",
            f"{cluster.name} has no SLURM, so there is no queue for CPU jobs",
            hint="run the command here, without --array",
        )
    if tasks < 1:
        raise LaunchError(
            "launch.array-tasks-possible", f"an array of {tasks} tasks is not possible", hint="the smallest number is 1"
        )
    if cluster.slurm.max_array is not None and tasks > cluster.slurm.max_array:
        raise LaunchError(
            "launch.tasks-array-may",
            f"{tasks} tasks are more than the {cluster.slurm.max_array} an array may have on {cluster.name}",
            hint=f"use --array {cluster.slurm.max_array}",
        )


def cpu_queue(cluster: Cluster) -> Partition | None:
    """The partition for work without accelerators: the file's choice, else the first of that kind, else the default one."""
    slurm = cluster.slurm
    if slurm is None:
        return None
    wanted = slurm.cpu_partition or slurm.partition
    rows = [p for p in slurm.partitions if p.name == wanted] or [p for p in slurm.partitions if not p.gpus]
    return rows[0] if rows else (Partition(name=wanted) if wanted else None)


def _maker(
    cluster: Cluster, folder: Path, account: str | None, options: Mapping[str, str | int | bool], env: Mapping[str, str], seconds: float | None
) -> Callable[..., Job]:  # fmt: skip
    queue, venv = cpu_queue(cluster), active_venv()
    limit = min(seconds or CPU_SECONDS, queue.max_time if queue and queue.max_time else CPU_SECONDS)
    environment = Environment(kind="venv" if venv else "module", modules=tuple(cluster.modules), venv=venv)

    def make(kind: str, command: tuple[str, ...], array: int | None = None) -> Job:
        return Job(
            name=f"{folder.name}-{kind}", kind=kind, run_dir=str(folder), workdir=str(Path.cwd()), command=command, array=array,
            cpus_per_task=min(CPU_CORES, cluster.node.cores_usable or cluster.node.cores), seconds=limit, partition=queue.name if queue else None,
            qos=queue.qos if queue else None, account=account or os.environ.get("SBATCH_ACCOUNT"), environment=environment, env=env, sbatch=options,
            requeue=True, about=("CPU work: no accelerators are asked for",),
        )  # fmt: skip

    return make


def _submit(job: Job, cluster: Cluster, executor: Executor, after: str | None) -> str:
    folder, script = Path(job.run_dir), Path(job.job_file)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_atomic(script, render(job, cluster))
    job_id = executor.submit(script, run_dir=folder, after=after)
    append_line(
        folder / "jobs.jsonl",
        {**submission_record(job, cluster, executor.name, job_id), "array": job.array, "after": after},
    )
    return job_id
