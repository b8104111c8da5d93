"""What if? The planner page's question (machine, nodes, model, tokens, days) and the planner's answer as sections. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from windlass.clusters.load import cluster_names, load_cluster
from windlass.config import Recipe
from windlass.config.load import check, validate
from windlass.errors import ConfigError, WindlassError
from windlass.figures import Card, Cards, Item, Mark, Note, Section, Table
from windlass.report.dash.blocks import section_json
from windlass.units import parse_tokens, print_tokens

Query = Mapping[str, Sequence[str]]
# Shapes in the proportions of published models: name -> (layers, width, ffn, heads, kv_heads, vocabulary).
SIZES: dict[str, tuple[int, int, int, int, int, int]] = {
    "0.2B": (12, 1024, 2816, 16, 16, 32_000),
    "0.5B": (24, 1024, 4096, 16, 8, 64_000),
    "1.1B": (22, 2048, 5632, 32, 4, 32_000),
    "3B": (28, 3072, 8192, 24, 8, 128_256),
    "8B": (32, 4096, 14_336, 32, 8, 128_256),
    "14B": (40, 5120, 17_920, 40, 8, 128_256),
    "30B": (48, 6656, 17_920, 52, 4, 128_256),
    "70B": (80, 8192, 28_672, 64, 8, 128_256),
    "180B": (96, 12_288, 33_792, 96, 8, 128_256),
}
SHOWN = 8
GIB = 2**30


@dataclass(frozen=True)
class Question:
    cluster: str
    nodes: int
    size: str
    tokens: int
    seq_len: int
    batch_tokens: int
    precision: str
    days: float | None
    """What is available; the answer says whether it suffices."""


def choices() -> dict[str, Any]:
    """What the page's controls offer."""
    known = []
    for name in cluster_names():
        try:
            cluster = load_cluster(name)
        except WindlassError:
            continue
        known.append(
            {
                "name": name,
                "title": cluster.title,
                "nodes": cluster.nodes,
                "devices": cluster.node.devices,
                "device": cluster.device,
            }
        )
    return {
        "clusters": known,
        "sizes": list(SIZES),
        "seq_lens": [1024, 2048, 4096, 8192, 16384, 32768],
        "precisions": ["bf16", "fp8", "fp32"],
    }


def question(query: Query) -> Question:
    """Read and bound what the page sent; a number that cannot be is an error with its name."""
    size = _text(query, "size", "8B")
    if size not in SIZES:
        raise ConfigError(
            "report.model-size-offered", f"model size {size!r} is not offered", hint=f"one of {', '.join(SIZES)}"
        )
    cluster = _text(query, "cluster", "snellius-h100")
    if cluster not in cluster_names():
        raise ConfigError(
            "report.unknown-cluster", f"unknown cluster {cluster!r}", hint=f"one of {', '.join(cluster_names())}"
        )
    return Question(
        cluster=cluster, nodes=_count(query, "nodes", "20", 1, 20_000), size=size, tokens=_count(query, "tokens", "450B", 1_000_000, 10**15),
        seq_len=_count(query, "seq_len", "8192", 128, 1_048_576), batch_tokens=_count(query, "batch_tokens", "4Mi", 1024, 10**9),
        precision=_text(query, "precision", "bf16"), days=_days(query),
    )  # fmt: skip


def _text(query: Query, name: str, default: str) -> str:
    found = query.get(name)
    return found[0][:64] if found and found[0] else default


def _count(query: Query, name: str, default: str, low: int, high: int) -> int:
    value = parse_tokens(_text(query, name, default))
    if not low <= value <= high:
        raise ConfigError("report.outside", f"{name} = {value:,} is outside {low:,} to {high:,}")
    return value


def _days(query: Query) -> float | None:
    text = _text(query, "days", "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError("report.days-number", f"days = {text!r} is not a number") from None


def recipe_of(q: Question) -> Recipe:
    layers, width, ffn, heads, kv_heads, vocab = SIZES[q.size]
    model = {
        "family": "llama",
        "layers": layers,
        "width": width,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocab": vocab,
    }
    data = {
        "tokens": q.tokens,
        "seq_len": q.seq_len,
        "batch_tokens": batch_near(q),
    }
    raw = {
        "name": f"what-if-{q.size}",
        "cluster": q.cluster,
        "nodes": q.nodes,
        "model": model,
        "data": data,
        "train": {"precision": q.precision},
    }
    recipe = validate(Recipe, raw, "planner page")
    check(recipe)
    return recipe


def batch_near(q: Question) -> int:
    """The batch nearest to the asked one that the devices divide; with more devices than sequences, groups of 2, 4, ... share one."""
    devices = q.nodes * load_cluster(q.cluster).node.devices
    while devices * q.seq_len > q.batch_tokens and devices % 2 == 0:
        devices //= 2
    unit = devices * q.seq_len
    return max(1, round(q.batch_tokens / unit)) * unit


@lru_cache(maxsize=256)
def ask(q: Question) -> dict[str, Any]:
    """The planner's ranked layouts, in the words of the page."""
    from windlass.planner.record import plan_json
    from windlass.planner.search import nothing_fits, search
    from windlass.planner.task import make_task

    recipe = recipe_of(q)
    task = make_task(recipe, load_cluster(q.cluster))
    plans = search(task)
    if not plans.plans:
        raise nothing_fits(plans)
    rows = [plan_json(p, task) for p in plans.plans[:SHOWN]]
    words = [p.candidate.describe() for p in plans.plans[:SHOWN]]
    parts = [
        Section("", (_cards(rows[0], words[0], q), *(Note(w, "warning") for w in task.warnings)), id="best"),
        Section("Memory of a device", (_memory(rows, words),), id="memory"),
        Section("Ranked layouts", (_ranking(rows, words),), id="ranking"),
    ]
    return {
        "question": q.__dict__,
        "best": rows[0],
        "layout": words[0],
        "sections": [section_json(p) for p in parts],
        "considered": plans.considered,
    }


def _cards(best: dict[str, Any], words: str, q: Question) -> Cards:
    from windlass.planner.page import carbon, number

    left = ""
    if q.days is not None:
        left = (
            f"within your {q.days:g} days"
            if best["days"] <= q.days
            else f"{best['days'] - q.days:.1f} days more than you have"
        )
    mwh = best["mwh"]
    return Cards((
        Card(f"{best['days']:,.1f} days", "to train", left or f"{best['node_hours']:,.0f} node-hours"),
        Card(words, "fastest layout", f"{print_tokens(best['tokens_per_second'])} tokens/s, batch {print_tokens(best['batch_tokens'])}"),
        Card("unknown" if best["mfu"] is None else f"{100 * best['mfu']:.1f} %", "MFU", str(best["mfu_denominator"])),
        Card(f"{best['memory_gib']:.0f} GiB", "memory", f"of {best['memory_limit_gib']:.0f} GiB"),
        Card("unknown" if mwh is None else f"{mwh * 1000:,.0f} kWh" if mwh < 1 else f"{mwh:,.1f} MWh", "energy", f"PUE {best['pue']:g}"),
        Card(carbon(best["tco2e"]), "CO2e, location-based", f"market-based: {carbon(best['tco2e_market'])}"),
        Card(number(best["allocation"]["amount"], 0) if best["allocation"] else "unknown", best["allocation"]["unit"] if best["allocation"] else "allocation", "charged"),
    ))  # fmt: skip


def _memory(rows: Sequence[dict[str, Any]], words: Sequence[str]) -> Item:
    from windlass.planner.page import stacked

    limit = rows[0]["memory_limit_gib"]
    labels = [f"{i}. {w}" for i, w in enumerate(words, 1)]
    return stacked(
        "What fills it, by layout",
        labels,
        [r["memory_terms_gib"] for r in rows],
        "GiB",
        (Mark(axis="y", at=limit, label=f"{limit:.0f} GiB"),),
    )


def _ranking(rows: Sequence[dict[str, Any]], words: Sequence[str]) -> Table:
    from windlass.planner.page import carbon

    made = [
        (w, f"{r['days']:,.1f}", f"{r['tokens_per_second_per_device']:,.0f}", "unknown" if r["mfu"] is None else f"{100 * r['mfu']:.1f} %",
         f"{r['memory_gib']:.1f}", "unknown" if r["mwh"] is None else f"{r['mwh']:,.2f}", carbon(r["tco2e"]), r["reason"])
        for w, r in zip(words, rows, strict=True)
    ]  # fmt: skip
    return Table(
        ("layout", "days", "tokens/s per device", "MFU", "GiB", "MWh", "CO2e", "why"),
        made,
        right=(1, 2, 3, 4, 5, 6),
        strong=(0,),
    )
