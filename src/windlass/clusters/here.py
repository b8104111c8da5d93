"""The GPUs of this machine that this process may use, from the driver's files and the environment. No torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.clusters.load import device_by_driver_name
from windlass.clusters.model import Cluster

DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """The NVIDIA driver's names of the GPUs that this process may use; empty where there is no driver."""
    try:
        lines = [line for file in sorted(DRIVER.glob("*/information")) for line in file.read_text().splitlines()]
    except OSError:
        return []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names[: len(visible_devices(os.environ, len(names)))]


def visible_devices(env: Mapping[str, str], count: int, variable: str = "CUDA_VISIBLE_DEVICES") -> list[str]:
    """Numbers or UUIDs that the variable lets the job see; as in CUDA, the list ends at the first invalid entry."""
    if variable not in env:
        return [str(i) for i in range(count)]
    devices: list[str] = []
    for device in map(str.strip, env[variable].split(",")):
        is_valid = (device.isdigit() and int(device) < count) or device.startswith(("GPU-", "MIG-"))
        if not is_valid or device in devices:
            break
        devices.append(device)
    return devices


def visible_amd_devices(env: Mapping[str, str], count: int, devices: Sequence[int] | None = None) -> list[int]:
    """Numbers of the AMD devices that the job sees; of those, the local numbers `devices`."""
    variable = "ROCR_VISIBLE_DEVICES" if "ROCR_VISIBLE_DEVICES" in env else "HIP_VISIBLE_DEVICES"
    visible = [int(device) for device in visible_devices(env, count, variable) if device.isdigit()]
    # A launcher may show each rank one device only; the node's meter then gets numbers beyond that list.
    is_listed = devices is not None and max(devices, default=0) < len(visible)
    return visible if devices is None else [visible[i] if is_listed else i for i in devices]


def with_gpus(cluster: Cluster) -> tuple[Cluster, str | None]:
    """The shipped workstation, which is a CPU, with the GPUs of this machine and a note on them; others unchanged."""
    names = gpu_names() if cluster.name == "workstation" and cluster.device == "cpu" else []
    if not names:
        return cluster, None
    device = device_by_driver_name(names[0])
    if device is None or len(set(names)) > 1:
        gpus = f"the GPUs of this machine ({', '.join(sorted(set(names)))})"
        return cluster, f"the planner has no data for {gpus}: this is a plan for its CPU"
    node = cluster.node.model_copy(update={"devices": len(names), "cores": os.cpu_count() or cluster.node.cores})
    links = cluster.gpu_links or cluster.links
    note = f"planned for the {len(names)} x {names[0]} of this machine, which the cluster file does not describe"
    if len(names) > 1 and links.intra_gbs:
        note += f"; {links.intra_gbs:.0f} GB/s between them are assumed"
    return cluster.model_copy(update={"device": device.name, "node": node, "links": links}), note
