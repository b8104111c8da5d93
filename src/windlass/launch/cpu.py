"""Jobs on CPU partitions: which partition can hold the work, and the job itself."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.clusters.model import Cluster, Partition, SlurmLimits
from windlass.clusters.scheduler import default_account
from windlass.errors import LaunchError
from windlass.launch.job import BatchJob, JobEnvironment, plain_environment
from windlass.units import print_seconds

# Wall time of a CPU job unless the partition's limit is shorter: tokenizing restarts where it stopped, so short is
# fine.
CPU_SECONDS = 4 * 3600.0
CPU_CORES = 8


def active_venv() -> str | None:
    return sys.prefix if sys.prefix != sys.base_prefix else None


@dataclass(frozen=True, kw_only=True)
class CpuWork:
    """What a job has to do: time that cores shorten, and time that they do not."""

    core_seconds: float = 0.0
    seconds: float = 0.0
    tasks: int = 1

    def needs(self, queue: Partition, cores: int) -> float:
        """Seconds on a partition, all tasks together; a limit per user makes tasks wait for each other."""
        return self.seconds + self.core_seconds / min(self.tasks * cores, queue.user_cores or math.inf)


def choose_cpu_queue(cluster: Cluster, slurm: SlurmLimits, work: CpuWork | None) -> tuple[Partition | None, float, str]:
    """Partition, wall time and reason: the file's CPU partition where its limits hold the work, else the first other
    one.

    Where none does, the one with the longest limit: this work goes on where it stopped when it is submitted again."""
    name, rows = slurm.cpu_partition or slurm.partition, slurm.partitions
    queues = [p for p in rows if p.name == name] + [p for p in rows if p.name != name and not p.gpus]
    queues = [p for p in queues if p.min_nodes == 1] or ([Partition(name=name)] if name else [])
    if work is None or not queues:
        queue = queues[0] if queues else None
        limit = queue.max_time if queue and queue.max_time else CPU_SECONDS
        return queue, min(CPU_SECONDS, limit), "partition for CPU work; the duration of the work is unknown"
    needs = {id(p): work.needs(p, cpu_cores(cluster, p)) for p in queues}
    texts = [
        f"{p.name}{'/' + p.qos if p.qos else ''}: {print_seconds(needs[id(p)])} of "
        + (f"at most {print_seconds(p.max_time)}" if p.max_time else "an unknown limit")
        for p in queues
    ]
    fitting = [i for i, p in enumerate(queues) if needs[id(p)] <= (p.max_time or math.inf)]
    index = fitting[0] if fitting else max(range(len(queues)), key=lambda i: queues[i].max_time or 0.0)
    queue, before = queues[index], "; ".join(texts[:index])
    seconds = min(max(CPU_SECONDS, 2 * needs[id(queue)]), queue.max_time or math.inf)
    reason = f"partition {texts[index]}" + (f" (not {before})" if before and fitting else "")
    if not fitting:
        tasks = math.ceil(work.tasks * needs[id(queue)] / (queue.max_time or CPU_SECONDS))
        reason += f"; no partition is long enough: use --array {tasks}, or submit again until it is done"
    return queue, seconds, reason


def cpu_cores(cluster: Cluster, queue: Partition | None) -> int:
    node = (queue.cores if queue else None) or cluster.node.cores_usable or cluster.node.cores
    return min(CPU_CORES, node)


def cpu_job(
    cluster: Cluster,
    folder: Path,
    kind: str,
    command: Sequence[str],
    *,
    account: str | None,
    env: Mapping[str, str] | None = None,
    work: CpuWork | None = None,
    environment: JobEnvironment | None = None,
) -> BatchJob:
    if cluster.slurm is None:
        raise LaunchError(
            "launch.cluster-without-slurm",
            f"{cluster.name} has no SLURM, so there is no queue for CPU jobs",
            hint="run the command here, without --array",
        )
    queue, seconds, reason = choose_cpu_queue(cluster, cluster.slurm, work)
    return BatchJob(
        name=f"{folder.name}-{kind}",
        kind=kind,
        run_dir=str(folder),
        workdir=str(Path.cwd()),
        command=tuple(command),
        cpus_per_task=cpu_cores(cluster, queue),
        seconds=seconds,
        partition=queue.name if queue else None,
        qos=queue.qos if queue else None,
        account=account or default_account(cluster.slurm.account),
        environment=environment or plain_environment(cluster, active_venv()),
        env=env or {},
        requeue=True,
        about=("CPU work: no accelerators are requested", reason),
    )
