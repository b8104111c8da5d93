"""The `[launch]` table: how a job is submitted. What a site prescribes is in its cluster file."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from windlass.config.base import Seconds, SecondsOrAuto, Table
from windlass.config.shell import (
    Line,
    ModuleName,
    PathText,
    SafeVariables,
    SbatchKey,
    SbatchSetting,
    SlurmName,
    VariableName,
)


class LaunchConfig(Table):
    account: SlurmName | None = None
    """SLURM account to charge."""
    partition: SlurmName | None = None
    """SLURM partition (default: the cluster's)."""
    qos: SlurmName | None = None
    """Quality of service (default: the cluster's)."""
    time: Seconds | None = None
    """Wall-time limit of one job (default: the expected training time plus a quarter, but at most the partition's
    limit)."""
    starter: Literal["srun", "torchrun"] = "srun"
    """srun: one task per device, so that signals reach every rank. torchrun: one task per node."""
    environment: Literal["auto", "venv", "module", "container"] = "auto"
    """auto: the container if one is named, else the virtual environment (the named or the active one), else modules.
    module: load `modules`, then activate `venv` if one is named."""
    venv: PathText | None = None
    """Virtual environment to run in."""
    container: PathText | None = None
    """Container image (.sif file or unpacked folder), for environment = "container"."""
    runtime: Literal["singularity", "apptainer", "charliecloud"] | None = None
    """Container runtime (default: the cluster's)."""
    binds: list[PathText] = Field(default_factory=list)
    """Additional folders to bind into the container: "/scratch/project" or "/from:/to"."""
    modules: list[ModuleName] | None = None
    """Modules to load (default: the cluster's)."""
    env: Annotated[dict[VariableName, Line], SafeVariables] = Field(default_factory=dict)
    """Additional environment variables; they override the cluster's."""
    sbatch: dict[SbatchKey, SbatchSetting] = Field(default_factory=dict)
    """Additional sbatch options: { "exclude" = "nid001234" }; true writes an option without a value, false removes an
    option."""
    requeue: bool = False
    """Let SLURM restart the same job after a node failure or pre-emption, and request a requeue after an early stop
    with a save."""
    signal_lead: SecondsOrAuto = "auto"
    """How long before the wall-time limit SLURM sends SIGUSR1; auto: from the measured save time, else 5 minutes."""
    stage_data: bool | None = None
    """Copy the token store to the fast file system first, in a CPU job (default: if the cluster has a shared one whose
    quota is large enough). A node's own disk is used only with true; the copy is then part of the training job."""
    checkpoints_on: str | None = None
    """Keep the checkpoints on another file system, to which the run folder links: "fast", or the name of a
    `[storage.NAME]` table of the cluster file."""
    chain: NonNegativeInt | Literal["self"] = 0
    """Number of jobs in the chain. They are submitted together, and each starts after the one before it. "self": each
    job submits the next one when it ends. 0 and 1: a single job."""
    budget_node_hours: float | None = Field(default=None, gt=0)
    """Budget of the allocation in node-hours; launch refuses to exceed it."""
