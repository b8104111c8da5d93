"""Clusters: one TOML file per machine, every number with source and date; the only reader of scheduler variables.

Names are imported on first use: a process that only needs its job id does not load the pydantic models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.clusters.load import (
        cluster_names,
        device_by_driver_name,
        devices,
        find_device,
        load_cluster,
        load_device,
    )
    from windlass.clusters.model import Cluster, Device
    from windlass.clusters.scheduler import Place, job_id, place

__all__ = [
    "Cluster",
    "Device",
    "Place",
    "cluster_names",
    "device_by_driver_name",
    "devices",
    "find_device",
    "job_id",
    "load_cluster",
    "load_device",
    "place",
]

_MODULES = {"Cluster": "model", "Device": "model", "Place": "scheduler", "job_id": "scheduler", "place": "scheduler"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'load')}"), name)
