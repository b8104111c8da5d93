"""What does the scheduler tell this process? The one reader of its environment variables."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LOCAL_JOB = "WINDLASS_JOB"
"""Set by the local launcher, which has no scheduler to name its jobs."""


@dataclass(frozen=True)
class Place:
    """Where this process stands in a distributed job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master_addr: str | None
    master_port: int | None
    source: str
    """"torchrun", "slurm" or "single"."""


def job_id(env: Mapping[str, str] | None = None) -> str | None:
    """The scheduler's job id, or None outside a job."""
    env = os.environ if env is None else env
    array = env.get("SLURM_ARRAY_JOB_ID")
    if array and "SLURM_ARRAY_TASK_ID" in env:
        return f"{array}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get(LOCAL_JOB)


def restart_count(env: Mapping[str, str] | None = None) -> int:
    """How often SLURM has requeued this job; the variable is unset before the first time."""
    return int((os.environ if env is None else env).get("SLURM_RESTART_COUNT", "0"))


def place(env: Mapping[str, str] | None = None) -> Place:
    """Rank and world size from torchrun's variables, else from an srun step's, else a single process."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        world, local_world = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
        rank = int(env["RANK"])
        return Place(rank, world, int(env.get("LOCAL_RANK", rank)), local_world, int(env.get("GROUP_RANK", rank // local_world)),
                     max(1, world // local_world), env.get("MASTER_ADDR"), _port(env), "torchrun")  # fmt: skip
    # A batch script has SLURM_PROCID too; only a step started by srun has a step id that is a number and several tasks.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")))
        world = int(env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"]))
        return Place(int(env["SLURM_PROCID"]), world, int(env["SLURM_LOCALID"]), world // nodes, int(env.get("SLURM_NODEID", "0")),
                     nodes, env.get("MASTER_ADDR"), _port(env), "slurm")  # fmt: skip
    return Place(0, 1, 0, 1, 0, 1, None, None, "single")


def _port(env: Mapping[str, str]) -> int | None:
    if "MASTER_PORT" in env:
        return int(env["MASTER_PORT"])
    job = env.get("SLURM_JOB_ID")
    return port_of(job) if job else None


def port_of(job: str) -> int:
    """A rendezvous port from the job id, so that two jobs on one node do not meet."""
    digits = re.sub(r"\D", "", job)
    return 20000 + int(digits or "0") % 10000


def array_task(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """(index, count) of an array task, counted from 0, or None."""
    env = os.environ if env is None else env
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    low = int(env.get("SLURM_ARRAY_TASK_MIN", "0"))
    return int(env["SLURM_ARRAY_TASK_ID"]) - low, int(env.get("SLURM_ARRAY_TASK_COUNT", "1"))


def cluster_name(env: Mapping[str, str] | None = None) -> str | None:
    """The name the site gave its SLURM, inside a job."""
    return (os.environ if env is None else env).get("SLURM_CLUSTER_NAME")


def node_list(env: Mapping[str, str] | None = None) -> str | None:
    """The job's nodes in SLURM's short form (`node[01-04]`), or None outside a job."""
    env = os.environ if env is None else env
    return env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")


def without_scheduler(env: Mapping[str, str]) -> dict[str, str]:
    """The environment a nested sbatch should see: variables of the outer job would shape the new one.

    SBATCH_* stay: they are what a user sets on purpose in a login shell (SBATCH_ACCOUNT).
    """
    return {k: v for k, v in env.items() if not k.startswith(("SLURM_", "SLURMD_", "SRUN_"))}


def end_time(env: Mapping[str, str] | None = None, ask: Callable[[str], str | None] | None = None) -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None outside a job and without a limit.

    squeue is asked first, because a limit can be changed while the job runs; without it the variable counts, which
    SLURM before 23.02 does not set and our job scripts export.
    """
    env = os.environ if env is None else env
    answer = (ask or _squeue_end)(env["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in env else None
    if answer is None:
        said = env.get("SLURM_JOB_END_TIME", "")
        return float(said) if said.isdigit() else None
    try:
        return time.mktime(time.strptime(answer.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):  # N/A, NONE or UNLIMITED
        return None


def _squeue_end(job: str) -> str | None:
    try:
        done = subprocess.run(["squeue", "-h", "-j", job, "-o", "%e"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout.strip() else None
