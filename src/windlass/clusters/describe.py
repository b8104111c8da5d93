"""The facts of a cluster or device file with their sources, as rows for a table or JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from windlass.clusters.model import Cluster, Device, FactSource
from windlass.units import print_bytes, print_seconds


@dataclass(frozen=True)
class Fact:
    key: str
    value: Any
    shown: str
    source: str
    on: str
    status: str


def source_of(key: str, sources: Mapping[str, FactSource]) -> FactSource | None:
    """The entry for a dotted key, else for its nearest table, else the file's `"*"`."""
    while key and key not in sources:
        key = key.rpartition(".")[0]
    return sources.get(key or "*")


def leaves(table: BaseModel | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a file; lists of tables count as one value."""
    for name, value in (dict(table) if isinstance(table, BaseModel) else table).items():
        if f"{prefix}{name}" == "sources":
            continue
        if isinstance(value, (BaseModel, dict)):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def facts(table: Cluster | Device) -> Iterator[Fact]:
    """Every value that is set, with its source; environment variables carry their own."""
    for key, value in leaves(table):
        if value not in (None, "", [], {}) and not key.startswith("notes"):
            source = source_of(key, table.sources)
            origin = (
                (source.source, source.on or "", source.status if source.source else "") if source else ("", "", "")
            )
            yield Fact(key, value, _shown(key, value), *origin)
    if isinstance(table, Cluster) and table.slurm is not None and not table.modules:
        yield Fact("modules", None, "not known", "", "", "")


def _shown(key: str, value: Any) -> str:
    name = key.rpartition(".")[2]
    if name in ("memory", "memory_usable", "usable_memory", "quota"):
        return print_bytes(value)
    if name == "numa":
        return "; ".join(f"{d.id}: cores {d.cores}, devices {d.devices}" for d in value)
    if name == "partitions":
        texts = []
        for p in value:
            limit = print_seconds(p.max_time) if p.max_time else "no limit known"
            most = f"{p.min_nodes}-{p.max_nodes}" if p.min_nodes > 1 else f"<= {p.max_nodes}"
            nodes = most if p.max_nodes else "any number of"
            texts.append(f"{p.name}{'/' + p.qos if p.qos else ''}: {limit}, {nodes} nodes")
        return "; ".join(texts)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
