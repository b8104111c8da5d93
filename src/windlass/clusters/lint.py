"""Checks of the CPU masks of a cluster file: disjoint, free of reserved cores, each on its device's NUMA domain."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.clusters.model import Cluster


def cores_of_mask(mask: str) -> set[int]:
    """`"0xfe00"` -> {9, ..., 15}."""
    value = int(mask, 16)
    return {bit for bit in range(value.bit_length()) if value >> bit & 1}


def cores_of_list(text: str) -> set[int]:
    """`"1-7,9"` -> {1, ..., 7, 9}."""
    ranges = (part.partition("-") for part in text.replace(" ", "").split(",") if part)
    return {core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)}


def lint_masks(cluster: Cluster, masks: list[str]) -> Iterator[str]:
    """One sentence for each fault of a set of masks."""
    node = cluster.node
    if len(masks) != node.devices:
        yield f"{len(masks)} CPU masks for {node.devices} devices"
    owner: dict[int, int] = {}
    for rank, mask in enumerate(masks):
        cores, name = cores_of_mask(mask), f"the CPU mask of local rank {rank} ({mask})"
        if shared := sorted({owner[core] for core in cores & set(owner)}):
            yield f"{name} shares cores with rank {', '.join(map(str, shared))}"
        owner = dict.fromkeys(cores, rank) | owner
        if reserved := sorted(cores & set(node.reserved_cores)):
            yield f"{name} uses reserved cores {reserved}"
        if beyond := sorted(core for core in cores if core >= node.cores):
            yield f"{name} names cores {beyond} of {node.cores}"
        for domain in node.numa:
            if rank in domain.devices and not cores <= cores_of_list(domain.cores):
                yield f"{name} is not on NUMA domain {domain.id} of its device"


def lint(cluster: Cluster) -> list[str]:
    """Faults of a cluster file that its types do not exclude."""
    faults = list(lint_masks(cluster, cluster.binding.masks)) if cluster.binding.kind == "mask" else []
    if (cluster.node.cores_usable or 0) > cluster.node.cores:
        faults.append(f"cores_usable ({cluster.node.cores_usable}) is more than cores ({cluster.node.cores})")
    return faults
