"""What can every place that runs jobs do? Submit, say how jobs stand, cancel. SLURM and this machine answer alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING", "SPECIAL_EXIT")
LIVE = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")
ENDED = (
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "CANCELLED",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
)
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, kw_only=True)
class State:
    """How one job stands, and who said so."""

    job: str
    state: str
    """SLURM's word, also for local jobs; UNKNOWN when nobody knows."""
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
    evidence: str = "none"
    """squeue, sacct, record (jobs.jsonl), heartbeat, log or process."""

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def never(self) -> bool:
        """Pending for a reason that waiting does not cure."""
        return self.waiting and (self.reason or "") in NEVER


NEVER = {
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
"""Reasons for which SLURM leaves a job pending for ever, and what they mean."""


class Executor(Protocol):
    """Where jobs run."""

    name: str

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None, options: Sequence[str] = ()) -> str:
        """Hand the script over and return the job's id at once. `after`: a dependency such as `afterany:123`."""
        ...

    def states(self, jobs: Sequence[str]) -> Mapping[str, State]:
        """How the jobs stand; a job the executor has never heard of or has forgotten is left out."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None: ...
