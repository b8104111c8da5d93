"""CPU masks: the cores of each local rank, ranks that share cores, and binding lists in shell text. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from windlass.clusters.model import Cluster, Node

# The list of --cpu-bind or SLURM_CPU_BIND: masks, or one core number per rank; `$NAME` where a variable holds it.
BINDING = re.compile(r"\b(mask_cpu|map_cpu):([^\s\"']+)")
ASSIGNMENT = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=[\"']?([0-9A-Za-z][0-9A-Za-z,*]*)[\"']?(?=[\s;&\"']|$)")
MAX_RANKS = 1024  # of one node: a list that repeats an entry more often is cut


@dataclass(frozen=True)
class RankBinding:
    """The list of a `--cpu-bind` option: entry i binds local rank i."""

    kind: str  # mask_cpu or map_cpu
    written: str  # as it stands in the text
    entries: tuple[str, ...]


def cores_of_mask(mask: str) -> set[int]:
    """`"0xfe00"` -> {9, ..., 15}."""
    value = int(mask, 16)
    return {bit for bit in range(value.bit_length()) if value >> bit & 1}


def cores_of_list(text: str) -> set[int]:
    """`"1-7,9"` -> {1, ..., 7, 9}."""
    ranges = (part.partition("-") for part in text.replace(" ", "").split(",") if part)
    return {core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)}


def print_cores(cores: Iterable[int]) -> str:
    """{1, 2, 3, 9} -> `"1-3,9"`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def find_bindings(text: str, variables: Mapping[str, str] | None = None) -> list[RankBinding]:
    """Every binding list in a command or script, also one that it assigns to a variable first."""
    values = {**(variables or {}), **{m[1]: m[2] for m in ASSIGNMENT.finditer(text)}}
    bindings = {}
    for kind, written in BINDING.findall(text):
        name = re.fullmatch(r"\$\{?(\w+)\}?;?", written)
        written = values.get(name[1], "") if name else written.rstrip(";")
        if not written or "$" in written or "{" in written:  # known to the shell only
            continue
        entries: list[str] = []
        for part in written.split(","):
            entry, _, count = part.partition("*")
            entries += [entry] * min(int(count) if count.isdigit() else 1, MAX_RANKS)
        bindings[kind, written] = RankBinding(kind, written, tuple(entries))
    return list(bindings.values())


def lint_entries(
    entries: Sequence[str], *, kind: str = "mask_cpu", tasks: int | None = None, node: Node | None = None
) -> Iterator[str]:
    """What is wrong with the entries of local ranks 0, 1, ...; with fewer entries than `tasks` SLURM starts over."""
    cores: list[set[int]] = []
    for rank, entry in enumerate(entries):
        try:
            cores.append(cores_of_mask(entry) if kind == "mask_cpu" else {int(entry, 0)})
        except ValueError:
            shape = "a hexadecimal mask such as 0xfe00" if kind == "mask_cpu" else "the number of a core"
            yield f"entry {rank} ({entry}) is not {shape}"
            return
        if not cores[rank]:
            yield f"the CPU mask of local rank {rank} ({entry}) has no core"
    owner: dict[int, int] = {}
    for rank in range(min(max(len(entries), tasks or 0), MAX_RANKS)):
        entry, own = entries[rank % len(entries)], cores[rank % len(entries)]
        name = f"the CPU mask of local rank {rank} ({entry})"
        for other in sorted({owner[core] for core in own & owner.keys()}):
            shared = print_cores(core for core in own if owner.get(core) == other)
            reused = f"; {len(entries)} entries for {tasks} tasks start over" if rank >= len(entries) else ""
            yield (
                f"local ranks {other} and {rank} share cores {shared} ({entries[other % len(entries)]} and {entry}{reused})"
            )
        owner = dict.fromkeys(own, rank) | owner
        if node is None or rank >= len(entries):
            continue
        if reserved := own & set(node.reserved_cores):
            yield f"{name} uses reserved cores {print_cores(reserved)}"
        if beyond := {core for core in own if core >= node.cores}:
            yield f"{name} names cores {print_cores(beyond)}, but the node has {node.cores}"
        for domain in node.numa:
            if rank in domain.devices and not own <= cores_of_list(domain.cores):
                yield f"{name} is not on NUMA domain {domain.id} (cores {domain.cores}) of its device"


def lint_masks(cluster: Cluster, masks: Sequence[str]) -> Iterator[str]:
    """What is wrong with the masks of a cluster file: one for each device of a node."""
    if len(masks) != cluster.node.devices:
        yield f"{len(masks)} CPU masks for {cluster.node.devices} devices"
    yield from lint_entries(masks, node=cluster.node)
