"""One TOML file per machine, every number with its source and date; and the one reader of scheduler variables.

A name is imported when it is first asked for: who only wants the job's number, as a lock does, starts without the model of a machine.
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

_HOMES = {"model": ("Cluster", "Device"), "scheduler": ("Place", "job_id", "place")}
"""The module of a name; all others live in `load`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "load")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value
