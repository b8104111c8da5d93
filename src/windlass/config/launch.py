"""How is the job submitted? The `[launch]` table; what a site prescribes stands in its cluster file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from windlass.config.base import Seconds, Table


class LaunchConfig(Table):
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time: Seconds | None = None
    """Wall time of one job; the partition's limit when left out."""
    starter: Literal["srun", "torchrun"] = "srun"
    """srun: one task per device, so that signals arrive. torchrun: one task per node."""
    environment: Literal["auto", "venv", "module", "container"] = "auto"
    venv: str | None = None
    container: str | None = None
    """Image (.sif) or folder; with environment = "container"."""
    binds: list[str] = Field(default_factory=list)
    modules: list[str] | None = None
    """Overrides the cluster's modules."""
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables; they win over the cluster's."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Any further sbatch option: { "exclude" = "nid001234" }."""
    requeue: bool = False
    signal_lead: Seconds | Literal["auto"] = "auto"
    stage_data: bool | None = None
    """Copy the token store to the fast file system first; None: when the cluster has one."""
    chain: NonNegativeInt = 0
    """Pre-submitted further links."""
    budget_node_hours: float | None = Field(default=None, gt=0)
    """The allocation; launch refuses to go beyond it."""
