"""Which GPUs does the machine have on which this runs? Asked of the driver's own files, without torch: for plans of "this machine"."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.clusters.load import device_by_driver_name
from windlass.clusters.model import Cluster, Links

DRIVER = Path("/proc/driver/nvidia/gpus")
_PCIE_GBS = 20.0
"""GB/s between two GPUs of a machine about which nothing is known: PCIe 4 with all its lanes, as it is reached."""


def gpu_names() -> list[str]:
    """What NVIDIA's driver calls the GPUs of this machine that this process may use; empty where there is no driver."""
    try:
        files = sorted(DRIVER.glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    except OSError:
        return []
    names = [line.partition(":")[2].strip() for line in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([word for word in visible.split(",") if word.strip()])]


def with_gpus(cluster: Cluster) -> tuple[Cluster, str | None]:
    """The shipped workstation, which is a CPU, with the GPUs that are really here, and a sentence about them; other machines as they are."""
    names = gpu_names() if cluster.name == "workstation" and cluster.device == "cpu" else []
    if not names:
        return cluster, None
    device = device_by_driver_name(names[0])
    if device is None or len(set(names)) > 1:
        return (
            cluster,
            f"this machine has {', '.join(sorted(set(names)))}, of which the planner knows too little: this is a plan for its CPU",
        )
    many = len(names) > 1
    links = cluster.links.model_copy(
        update={"intra_gbs": _PCIE_GBS, "intra_latency_us": Links().intra_latency_us, "fabric": "PCIe, assumed"}
    )
    node = cluster.node.model_copy(update={"devices": len(names), "cores": os.cpu_count() or cluster.node.cores})
    said = f"planned for the {len(names)} x {names[0]} of this machine, of which its file says nothing" + (
        f"; {_PCIE_GBS:.0f} GB/s between them are assumed" if many else ""
    )
    return cluster.model_copy(
        update={"device": device.name, "node": node, "links": links if many else cluster.links}
    ), said
