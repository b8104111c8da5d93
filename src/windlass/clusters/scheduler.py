"""The scheduler's environment variables: rank, world size, job, array task and end time of this process."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LOCAL_JOB = "WINDLASS_JOB"  # set by the local launcher, which has no scheduler to name its jobs


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master_addr: str | None
    master_port: int | None
    source: str  # "torchrun", "slurm" or "single"


def step_start(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """(job, restart) that name the start of this srun step or torchrun call, the same on all of its ranks."""
    if (job := job_id(env)) is not None:
        return f"{job}-{env.get('SLURM_STEP_ID', '0')}", restart_count(env)
    name = f"torchrun-{env.get('TORCHELASTIC_RUN_ID', 'none')}-{env.get('MASTER_PORT', '0')}"
    return name, int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


def place(env: Mapping[str, str] = os.environ) -> Place:
    """Rank and world size from torchrun's variables, else from an srun step's, else of a single process."""

    def number(name: str, default: object) -> int:
        return int(env.get(name, str(default)))

    job = env.get("SLURM_JOB_ID")
    port = env.get("MASTER_PORT") or (port_of(job) if job else None)
    master = env.get("MASTER_ADDR"), None if port is None else int(port)
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        local_size = number("LOCAL_WORLD_SIZE", world_size)
        nodes, node_rank = max(1, world_size // local_size), number("GROUP_RANK", rank // local_size)
        return Place(rank, world_size, number("LOCAL_RANK", rank), local_size, node_rank, nodes, *master, "torchrun")
    # A batch script has SLURM_PROCID too; only a step started by srun has a step id and several tasks.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and number("SLURM_NTASKS", 1) > 1:
        nodes = number("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", 1))
        world_size = number("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])
        rank, local_rank, node_rank = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), number("SLURM_NODEID", 0)
        return Place(rank, world_size, local_rank, world_size // nodes, node_rank, nodes, *master, "slurm")
    return Place(0, 1, 0, 1, 0, 1, None, None, "single")


def port_of(job: str) -> int:
    """A rendezvous port from the job id, so that two jobs on one node use different ones."""
    return 20000 + int(re.sub(r"\D", "", job) or "0") % 10000


def job_id(env: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's job id, or None outside a job."""
    if env.get("SLURM_ARRAY_JOB_ID") and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get(LOCAL_JOB)


def restart_count(env: Mapping[str, str] = os.environ) -> int:
    """How often SLURM has requeued this job; the variable is unset before the first time."""
    return int(env.get("SLURM_RESTART_COUNT", "0"))


def job_shape(env: Mapping[str, str] = os.environ) -> tuple[int | None, int | None]:
    """(nodes, tasks per node) of this SLURM job as its batch script sees them; None where SLURM does not say."""
    nodes, tasks = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES"), env.get("SLURM_NTASKS_PER_NODE")
    return int(nodes) if nodes else None, int(tasks) if tasks else None


def array_task(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(index, count) of an array task, counted from 0, or None."""
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    first = int(env.get("SLURM_ARRAY_TASK_MIN", "0"))
    return int(env["SLURM_ARRAY_TASK_ID"]) - first, int(env.get("SLURM_ARRAY_TASK_COUNT", "1"))


def without_scheduler(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for a nested sbatch: variables of the outer job would shape the new one.

    SBATCH_* stay: users set them on purpose in a login shell (SBATCH_ACCOUNT).
    """
    return {k: v for k, v in env.items() if not k.startswith(("SLURM_", "SLURMD_", "SRUN_"))}


# Variables of a job with which srun fills in options that its call leaves out.
STEP_VARIABLES = re.compile(
    r"SRUN_.*|SLURM_(NTASKS|NPROCS|NNODES|TASKS_PER|CPUS_PER|GPUS|CPU_BIND|DISTRIBUTION|THREADS_PER|MEM_PER).*"
)


def without_step_options(env: Mapping[str, str]) -> dict[str, str]:
    """For a command that calls srun itself: inside our job its call means what it means on a login node.

    SLURM_NTASKS of the job would start as many tasks as the job has, and SRUN_CPUS_PER_TASK would confine the step to
    cores that its masks do not name.
    """
    return {name: value for name, value in env.items() if not STEP_VARIABLES.fullmatch(name)}


def default_account(cluster_account: str | None, env: Mapping[str, str] = os.environ) -> str | None:
    """The account of a job whose recipe and command line name none: sbatch's own variable, else the cluster file's."""
    return env.get("SBATCH_ACCOUNT") or cluster_account


def end_time(env: Mapping[str, str] = os.environ, ask: Callable[[str], str | None] | None = None) -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None outside a job and without a limit.

    squeue comes first, because a limit can change while the job runs. Else the variable counts, which SLURM before
    23.02 does not set and our job scripts export.
    """
    job, answer, exported = env.get("SLURM_JOB_ID"), None, env.get("SLURM_JOB_END_TIME", "")
    if job is not None:
        answer = ask(job) if ask else command_output(["squeue", "-h", "-j", job, "-o", "%e"], timeout_seconds=20)
    if not answer or not answer.strip():
        return float(exported) if exported.isdigit() else None
    try:
        return time.mktime(time.strptime(answer.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):  # N/A, NONE or UNLIMITED
        return None


def command_output(argv: Sequence[str], timeout_seconds: float = 30) -> str | None:
    """What a command of the scheduler prints; None when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
