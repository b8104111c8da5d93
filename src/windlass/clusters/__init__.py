"""One TOML file per machine, every number with its source and date; and the one reader of scheduler variables."""

from windlass.clusters.load import cluster_names, device_by_driver_name, devices, find_device, load_cluster, load_device
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
