"""The common interface of everything that runs jobs, the state of one job, and jobs on a machine without a scheduler.

Those are detached processes with a pid file beside their log. SLURM is in `slurm.py`.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.clusters.scheduler import LOCAL_JOB
from windlass.errors import LaunchError
from windlass.files import read_json, write_json

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")
ENDED = (
    "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED",
)  # fmt: skip
UNKNOWN = "UNKNOWN"
# Keeps the exit code of a local job, which no process waits for once the launching shell is gone.
WRAPPER = 'bash "$1"; code=$?; echo $code > "$2.part"; mv "$2.part" "$2"; exit $code'
# Reasons for which SLURM leaves a job pending forever, and what they mean.
NEVER_STARTS = {
    "DependencyNeverSatisfied": "the job it depends on did not end as required",
    "PartitionNodeLimit": "more nodes than the partition allows",
    "PartitionConfig": "more nodes than the partition has",
    "PartitionTimeLimit": "more time than the partition allows",
    "QOSMaxNodePerJobLimit": "more nodes than the QOS allows",
    "QOSMaxWallDurationPerJobLimit": "more time than the QOS allows",
    "AccountNotAllowed": "the account may not use this partition",
    "QOSNotAllowed": "the QOS is not allowed in this partition",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "BadConstraints": "no node has what the job asks for",
}


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of one job and its source. None: unknown."""

    job: str
    state: str  # SLURM's name, also for local jobs; UNKNOWN when no source has it
    reason: str | None = None
    nodes: int | None = None
    node_list: str | None = None
    elapsed_seconds: float | None = None
    limit_seconds: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    energy_joules: float | None = None
    user: str | None = None
    evidence: str = "none"  # squeue, sacct, record (jobs.jsonl), heartbeat, log or process

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def never_starts(self) -> bool:
        """Pending for a reason that waiting does not fix."""
        return self.waiting and (self.reason or "") in NEVER_STARTS

    @property
    def active(self) -> bool:
        return self.waiting or self.state in RUNNING


class Executor(Protocol):
    name: str

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None, comment: str | None = None) -> str:
        """Hand the script over and return the job's id at once. `after`: a dependency such as `afterany:123`.

        `comment` ends with a mark of its own, by which the job is recognised in the queue when the answer is lost.
        """
        ...

    def marked(self, mark: str) -> Mapping[str, str]:
        """Jobs in the queue with a mark that begins like this: id -> its complete mark."""
        ...

    def states(self, jobs: Sequence[str]) -> Mapping[str, JobState]:
        """The jobs' states, without those that the executor does not know (any more)."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None: ...


class LocalExecutor:
    name = "local"

    def __init__(self, run_dir: Path) -> None:
        self._logs = run_dir / "logs"

    def marked(self, mark: str) -> Mapping[str, str]:
        return {}  # a process is recorded by whoever starts it

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None, comment: str | None = None) -> str:
        if after:
            raise LaunchError(
                "launch.no-scheduler-for-dependency",
                "there is no scheduler on this machine to wait for another job",
                hint="run the commands one after the other",
            )
        self._logs.mkdir(parents=True, exist_ok=True)
        job = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        with (self._logs / f"{job}.out").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", WRAPPER, "windlass", str(script), str(self._logs / f"{job}.rc")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, LOCAL_JOB: job},
            )
        record = {"pid": process.pid, "ticks": start_ticks(process.pid), "started_at": time.time(), "run": str(run_dir)}
        write_json(self._logs / f"{job}.pid", record)
        return job

    def states(self, jobs: Sequence[str]) -> Mapping[str, JobState]:
        records = {job: read_json(self._logs / f"{job}.pid") for job in jobs}
        states = {}
        for job, record in ((job, record) for job, record in records.items() if record is not None):
            state, code, ended_at, elapsed_seconds = "CANCELLED", None, None, None
            started_at, result = float(record["started_at"]), self._logs / f"{job}.rc"
            if result.is_file():
                code, ended_at = int(result.read_text().strip() or 1), result.stat().st_mtime
                state, elapsed_seconds = "COMPLETED" if code == 0 else "FAILED", ended_at - started_at
            elif start_ticks(int(record["pid"])) == record["ticks"]:
                state, elapsed_seconds = "RUNNING", time.time() - started_at
            states[job] = JobState(
                job=job,
                state=state,
                nodes=1,
                exit_code=code,
                started_at=started_at,
                ended_at=ended_at,
                elapsed_seconds=elapsed_seconds,
                evidence="process",
            )
        return states

    def cancel(self, jobs: Sequence[str]) -> None:
        for record in (read_json(self._logs / f"{job}.pid") for job in jobs):
            # The start time tells our job from another process that was given the same pid.
            if record and start_ticks(int(record["pid"])) == record["ticks"]:
                os.killpg(int(record["pid"]), signal.SIGTERM)


def start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None when it is gone (a zombie is gone too)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
