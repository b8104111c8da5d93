"""The `[launch]` table: how a job is submitted. What a site prescribes is in its cluster file."""

import re
from typing import Literal

from pydantic import Field, NonNegativeInt, field_validator

from windlass.config.base import Seconds, SecondsOrAuto, Table

_SECRET_NAME = re.compile(
    r"(api_?key|secret|passw(or)?d|credential|private_?key|access_?key|auth_?token|bearer|(^|_)token$|(^|_)key$)",
    re.IGNORECASE,
)


def looks_secret(name: str) -> bool:
    """Names of keys and passwords, which may be in a shell's environment and never in a recipe or a run folder.

    `WANDB_API_KEY`, `HF_TOKEN`, `password`; not `tokens`, `tokenizer` or `NCCL_DEBUG`.
    """
    return _SECRET_NAME.search(name) is not None


class LaunchConfig(Table):
    account: str | None = None
    """SLURM account to charge."""
    partition: str | None = None
    """SLURM partition (default: the cluster's)."""
    qos: str | None = None
    """Quality of service (default: the cluster's)."""
    time: Seconds | None = None
    """Wall-time limit of one job (default: the partition's limit)."""
    starter: Literal["srun", "torchrun"] = "srun"
    """srun: one task per device, so that signals arrive. torchrun: one task per node."""
    environment: Literal["auto", "venv", "module", "container"] = "auto"
    """auto: the container when one is named, else the virtual environment (named, or the active one), else modules."""
    venv: str | None = None
    """Virtual environment to run in."""
    container: str | None = None
    """Image (.sif) or folder; with environment = "container"."""
    runtime: Literal["singularity", "apptainer", "charliecloud"] | None = None
    """Container runtime (default: the cluster's)."""
    binds: list[str] = Field(default_factory=list)
    """Additional folders that the container sees: "/scratch/project" or "/from:/to"."""
    modules: list[str] | None = None
    """Modules to load (default: the cluster's)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables; they override the cluster's."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Additional sbatch options: { "exclude" = "nid001234" }; true writes a bare flag, false removes a directive."""
    requeue: bool = False
    """Let SLURM start the same job again after a node failure or pre-emption, and request it after an early stop with a
    save."""
    signal_lead: SecondsOrAuto = "auto"
    """How long before the wall-time limit SLURM sends SIGUSR1; auto: from the measured save time, else 5 minutes."""
    stage_data: bool | None = None
    """Copy the token store to the fast file system first (default: when the cluster has a shared one)."""
    chain: NonNegativeInt | Literal["self"] = 0
    """Jobs in the chain, submitted at once, each after the one before it; "self": each job submits the next at its end.
    0 and 1 are a single job."""
    budget_node_hours: float | None = Field(default=None, gt=0)
    """Budget of the allocation in node-hours; launch refuses to exceed it."""

    @field_validator("env")
    @classmethod
    def _no_keys(cls, value: dict[str, str]) -> dict[str, str]:
        secrets = ", ".join(name for name in value if looks_secret(name))
        if secrets:
            advice = "export it in the shell that submits instead (or run `wandb login`)"
            raise ValueError(f"{secrets} would be written into the run folder; {advice}")
        return value
