"""How is the job submitted? The `[launch]` table; what a site prescribes stands in its cluster file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, field_validator

from windlass.config.base import Seconds, SecondsOrAuto, Table
from windlass.config.secret import looks_secret


class LaunchConfig(Table):
    account: str | None = None
    """The project that is charged."""
    partition: str | None = None
    """Queue; the cluster's usual one when left out."""
    qos: str | None = None
    """Quality of service; the cluster's usual one when left out."""
    time: Seconds | None = None
    """Wall time of one job; the partition's limit when left out."""
    starter: Literal["srun", "torchrun"] = "srun"
    """srun: one task per device, so that signals arrive. torchrun: one task per node."""
    environment: Literal["auto", "venv", "module", "container"] = "auto"
    """auto: the container when one is named, else the virtual environment (named, or the one launch runs in), else modules."""
    venv: str | None = None
    """Virtual environment to run in."""
    container: str | None = None
    """Image (.sif) or folder; with environment = "container"."""
    runtime: Literal["singularity", "apptainer", "charliecloud"] | None = None
    """Container runtime; the cluster's own when left out."""
    binds: list[str] = Field(default_factory=list)
    """Further folders that the container sees: "/scratch/project" or "/from:/to"."""
    modules: list[str] | None = None
    """Overrides the cluster's modules."""
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables; they win over the cluster's."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Any further sbatch option: { "exclude" = "nid001234" }; true writes a bare flag, false takes a directive out."""
    requeue: bool = False
    """Let SLURM start the same job again after a node failure or pre-emption, and ask it to after an early stop with a save."""
    signal_lead: SecondsOrAuto = "auto"
    """How long before the wall-time limit SLURM sends SIGUSR1; auto: from the measured save time, else 5 minutes."""
    stage_data: bool | None = None
    """Copy the token store to the fast file system first; None: when the cluster has a shared one."""
    chain: NonNegativeInt | Literal["self"] = 0
    """Links of the job chain: this many jobs in all, submitted at once, each after the one before it; "self": each link
    submits the next at its end. 0 and 1 are a single job."""
    budget_node_hours: float | None = Field(default=None, gt=0)
    """The allocation; launch refuses to go beyond it."""

    @field_validator("env")
    @classmethod
    def _no_keys(cls, value: dict[str, str]) -> dict[str, str]:
        found = [name for name in value if looks_secret(name)]
        if found:
            raise ValueError(
                f"{', '.join(found)} would be written into the run folder; export it in the shell that submits instead (or run `wandb login`)"
            )
        return value
