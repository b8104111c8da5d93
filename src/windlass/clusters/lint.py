"""Do the CPU masks of a cluster file make sense? Disjoint, free of reserved cores, and each on its device's NUMA domain."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.clusters.model import Cluster


def cores_of_mask(mask: str) -> set[int]:
    """`"0xfe00"` -> {9, ..., 15}."""
    value = int(mask, 16)
    return {bit for bit in range(value.bit_length()) if value >> bit & 1}


def cores_of_list(text: str) -> set[int]:
    """`"1-7,9"` -> {1, ..., 7, 9}."""
    found: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def lint_masks(cluster: Cluster, masks: list[str]) -> Iterator[str]:
    """Every fault of a set of masks, in words."""
    node = cluster.node
    if len(masks) != node.devices:
        yield f"{len(masks)} CPU masks for {node.devices} devices"
    owner: dict[int, int] = {}
    for rank, mask in enumerate(masks):
        cores = cores_of_mask(mask)
        shared = sorted({owner[c] for c in cores if c in owner})
        if shared:
            yield f"the CPU mask of local rank {rank} ({mask}) shares cores with rank {', '.join(map(str, shared))}"
        owner |= {c: rank for c in cores if c not in owner}
        if reserved := sorted(cores & set(node.reserved_cores)):
            yield f"the CPU mask of local rank {rank} ({mask}) uses reserved cores {reserved}"
        if beyond := sorted(c for c in cores if c >= node.cores):
            yield f"the CPU mask of local rank {rank} ({mask}) names cores {beyond} of {node.cores}"
        for domain in node.numa:
            if rank in domain.devices and not cores <= cores_of_list(domain.cores):
                yield f"the CPU mask of local rank {rank} ({mask}) is not on NUMA domain {domain.id} of its device"


def lint(cluster: Cluster) -> list[str]:
    """Faults of a cluster file that its shape alone does not show."""
    found = list(lint_masks(cluster, cluster.binding.masks)) if cluster.binding.kind == "mask" else []
    usable = cluster.node.cores_usable
    if usable is not None and usable > cluster.node.cores:
        found.append(f"cores_usable ({usable}) is more than cores ({cluster.node.cores})")
    return found
