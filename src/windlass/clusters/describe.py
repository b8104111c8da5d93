"""What do we know of a machine, how sure are we, and where did we read it? Rows for a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.clusters.model import Cluster, Device, Source
from windlass.units import print_bytes, print_seconds


@dataclass(frozen=True)
class Fact:
    key: str
    value: Any
    shown: str
    source: str
    on: str
    status: str


def source_of(key: str, sources: dict[str, Source]) -> Source | None:
    """The entry for a dotted key, else for its nearest table, else the file's `"*"`."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (found := sources.get(".".join(parts[:end]))) is not None:
            return found
    return sources.get("*")


def leaves(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a frozen table; lists of tables count as one value."""
    for name in type(table).model_fields:
        value, key = getattr(table, name), f"{prefix}{name}"
        if name == "sources" and prefix == "":
            continue
        if hasattr(type(value), "model_fields"):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, dict):
            for inner, item in value.items():
                if hasattr(type(item), "model_fields"):
                    yield from leaves(item, f"{key}.{inner}.")
                else:
                    yield f"{key}.{inner}", item
        else:
            yield key, value


def unsourced_numbers(table: Cluster | Device) -> list[str]:
    """Numbers that no source covers; a test keeps this empty for every shipped file."""
    unsourced = {
        "per_module",
        "efficiency",
    }  # the first is what the part is, the second carries its own date and origin
    numbers = (k for k, v in leaves(table) if isinstance(v, (int, float)) and not isinstance(v, bool))
    return [k for k in numbers if k.split(".")[0] not in unsourced and source_of(k, table.sources) is None]


def facts(table: Cluster | Device) -> Iterator[Fact]:
    """Every value that is set, with its source; environment variables carry theirs in themselves."""
    for key, value in leaves(table):
        if value in (None, "", [], {}) or key.startswith("notes"):
            continue
        source = source_of(key, table.sources)
        yield Fact(
            key,
            value,
            show(key, value),
            source.source if source else "",
            (source.on or "") if source else "",
            source.status if source else "",
        )


def show(key: str, value: Any) -> str:
    name = key.rpartition(".")[2]
    if name in ("memory", "memory_usable", "usable_memory", "quota"):
        return print_bytes(value)
    if name == "partitions":
        return "; ".join(_partition(p) for p in value)
    if name == "numa":
        return "; ".join(f"{d.id}: cores {d.cores}, devices {d.devices}" for d in value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _partition(p: Any) -> str:
    limit = print_seconds(p.max_time) if p.max_time else "no limit known"
    nodes = (
        f"{p.min_nodes}-{p.max_nodes}"
        if p.max_nodes and p.min_nodes > 1
        else (f"<= {p.max_nodes}" if p.max_nodes else "any number of")
    )
    return f"{p.name}{'/' + p.qos if p.qos else ''}: {limit}, {nodes} nodes"
