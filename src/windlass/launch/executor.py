"""The common interface of everything that runs jobs (SLURM, this machine), and the state of one job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")
ENDED = (
    "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED",
)  # fmt: skip
UNKNOWN = "UNKNOWN"
# Reasons for which SLURM leaves a job pending forever, and what they mean.
NEVER_STARTS = {
    "DependencyNeverSatisfied": "the job it waits for did not end as asked",
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

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None) -> str:
        """Hand the script over and return the job's id at once. `after`: a dependency such as `afterany:123`."""
        ...

    def states(self, jobs: Sequence[str]) -> Mapping[str, JobState]:
        """The jobs' states, without those that the executor does not know (any more)."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None: ...
