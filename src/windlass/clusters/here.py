"""Which GPUs does the machine have on which this runs? Asked of the driver's own files, without torch: for plans of "this machine"."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from windlass.clusters.load import device_by_driver_name
from windlass.clusters.model import Cluster

DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """What NVIDIA's driver calls the GPUs of this machine that this process may use; empty where there is no driver."""
    try:
        files = sorted(DRIVER.glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    except OSError:
        return []
    names = [line.partition(":")[2].strip() for line in lines]
    return names[: len(visible_devices(os.environ, len(names)))]


def visible_devices(env: Mapping[str, str], count: int, variable: str = "CUDA_VISIBLE_DEVICES") -> list[str]:
    """What the variable lets the job see: numbers or UUIDs; as in CUDA, the list ends at the first invalid entry."""
    if variable not in env:
        return [str(i) for i in range(count)]
    words: list[str] = []
    for word in env[variable].split(","):
        word = word.strip()
        valid = (word.isdigit() and int(word) < count) or word.startswith(("GPU-", "MIG-"))
        if not valid or word in words:
            break
        words.append(word)
    return words


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
    node = cluster.node.model_copy(update={"devices": len(names), "cores": os.cpu_count() or cluster.node.cores})
    links = cluster.gpu_links or cluster.links
    said = f"planned for the {len(names)} x {names[0]} of this machine, of which its file says nothing" + (
        f"; {links.intra_gbs:.0f} GB/s between them are assumed" if len(names) > 1 and links.intra_gbs else ""
    )
    return cluster.model_copy(update={"device": device.name, "node": node, "links": links}), said
