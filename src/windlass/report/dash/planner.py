"""The planner page: its question (cluster, nodes, model, tokens, days) and the planner's answer as sections."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from windlass.clusters.load import cluster_names, load_cluster
from windlass.config import Recipe
from windlass.config.base import Table, Tokens
from windlass.config.load import check, validate
from windlass.errors import WindlassError
from windlass.figures import Card, Cards, DataTable, Mark, Note, Section
from windlass.planner.changes import nothing_fits
from windlass.planner.page import carbon, number, stacked
from windlass.planner.record import plan_json
from windlass.planner.search import RANKING, search
from windlass.planner.task import make_task
from windlass.units import print_share, print_tokens

# Shapes in the proportions of published models: name -> (layers, width, ffn, heads, kv_heads, vocabulary).
MODEL_SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "0.2B": (12, 1024, 2816, 16, 16, 32_000),
    "0.5B": (24, 1024, 4096, 16, 8, 64_000),
    "1.1B": (22, 2048, 5632, 32, 4, 32_000),
    "3B": (28, 3072, 8192, 24, 8, 128_256),
    "8B": (32, 4096, 14_336, 32, 8, 128_256),
    "14B": (40, 5120, 17_920, 40, 8, 128_256),
    "30B": (60, 6656, 17_920, 52, 13, 128_256),
    "70B": (80, 8192, 28_672, 64, 8, 128_256),
    "180B": (96, 12_288, 33_792, 96, 8, 128_256),
}
MAX_LAYOUTS = 8


class PlannerQuestion(Table):
    cluster: str = "snellius-h100"
    nodes: Tokens = Field(default=20, ge=1, le=20_000)
    size: str = "8B"
    tokens: Tokens = Field(default=450 * 10**9, ge=10**6, le=10**15)
    seq_len: Tokens = Field(default=8192, ge=128, le=2**20)
    batch_tokens: Tokens = Field(default=4 * 2**20, ge=1024, le=10**9)
    precision: str = "bf16"
    days: float | None = None  # what is available; the answer says whether it suffices

    @field_validator("cluster", "size")
    @classmethod
    def _is_offered(cls, value: str, info: ValidationInfo) -> str:
        offered = cluster_names() if info.field_name == "cluster" else list(MODEL_SHAPES)
        if value not in offered:
            raise ValueError(f"unknown; one of {', '.join(offered)}")
        return value


@lru_cache(maxsize=1)
def choices() -> dict[str, Any]:
    clusters = []
    for name in cluster_names():
        try:
            c = load_cluster(name)
        except WindlassError:
            continue
        clusters.append(
            {"name": name, "title": c.title, "nodes": c.nodes, "devices": c.node.devices, "device": c.device}
        )
    return {
        "clusters": clusters,
        "sizes": list(MODEL_SHAPES),
        "seq_lens": [1024 * 2**i for i in range(6)],
        "precisions": ["bf16", "fp8", "fp32"],
    }


def question(query: Mapping[str, Sequence[str]]) -> PlannerQuestion:
    """What the page sent; an empty value is the default."""
    sent = {name: query[name][0][:64] for name in PlannerQuestion.model_fields if query.get(name) and query[name][0]}
    return validate(PlannerQuestion, sent, "planner page")


def recipe_of(q: PlannerQuestion) -> Recipe:
    # The batch nearest to the wanted one that the devices divide; more devices than sequences share one in groups.
    devices = q.nodes * load_cluster(q.cluster).node.devices
    while devices * q.seq_len > q.batch_tokens and devices % 2 == 0:
        devices //= 2
    unit = devices * q.seq_len
    batch_tokens = max(1, round(q.batch_tokens / unit)) * unit
    keys = ("layers", "width", "ffn", "heads", "kv_heads", "vocab")
    raw = {
        "name": f"what-if-{q.size}",
        "cluster": q.cluster,
        "nodes": q.nodes,
        "model": {"family": "llama", **dict(zip(keys, MODEL_SHAPES[q.size], strict=True))},
        "data": {"tokens": q.tokens, "seq_len": q.seq_len, "batch_tokens": batch_tokens},
        "train": {"precision": q.precision},
    }
    recipe = validate(Recipe, raw, "planner page")
    check(recipe)
    return recipe


@lru_cache(maxsize=256)
def ask(q: PlannerQuestion) -> tuple[dict[str, Any], list[Section]]:
    """The planner's answer: its best layout, and the ranked layouts as sections of the page."""
    task = make_task(recipe_of(q), load_cluster(q.cluster))
    plans = search(task)
    if not plans.plans:
        raise nothing_fits(plans)
    rows = [plan_json(p, task) for p in plans.plans[:MAX_LAYOUTS]]
    layouts = [p.candidate.describe() for p in plans.plans[:MAX_LAYOUTS]]
    limit = rows[0]["memory_limit_gib"]
    memory = stacked(
        "Memory by layout",
        [f"{i}. {layout}" for i, layout in enumerate(layouts, 1)],
        [r["memory_terms_gib"] for r in rows],
        "GiB",
        (Mark(axis="y", at=limit, label=f"{limit:.0f} GiB"),),
    )
    ranking = DataTable(
        ("layout", "days", "tokens/s per device", "MFU", "GiB", "MWh", "CO2e", "reason"),
        [
            (layout, f"{r['days']:,.1f}", f"{r['tokens_per_second_per_device']:,.0f}", print_share(r["mfu"]),
             f"{r['memory_gib']:.1f}", "unknown" if r["mwh"] is None else f"{r['mwh']:,.2f}", carbon(r["tco2e"]),
             r["reason"])
            for layout, r in zip(layouts, rows, strict=True)
        ],
        right=(1, 2, 3, 4, 5, 6),
        strong=(0,),
        caption=RANKING,
    )  # fmt: skip
    return {"question": q.model_dump(), "best": rows[0], "layout": layouts[0], "considered": plans.considered}, [
        Section("", (_cards(rows[0], layouts[0], q), *(Note(w, "warning") for w in task.warnings)), id="best"),
        Section("Memory of a device", (memory,), id="memory"),
        Section("Ranked layouts", (ranking,), id="ranking"),
    ]


def _cards(best: dict[str, Any], layout: str, q: PlannerQuestion) -> Cards:
    note = f"{best['node_hours']:,.0f} node-hours"
    if q.days is not None:
        short = best["days"] - q.days
        note = f"{short:.1f} days more than available" if short > 0 else f"within the available {q.days:g} days"
    mwh, allocation = best["mwh"], best["allocation"]
    energy = "unknown" if mwh is None else f"{mwh * 1000:,.0f} kWh" if mwh < 1 else f"{mwh:,.1f} MWh"
    speed = f"{print_tokens(best['tokens_per_second'])} tokens/s, batch {print_tokens(best['batch_tokens'])}"
    amount, unit = (number(allocation["amount"], 0), allocation["unit"]) if allocation else ("unknown", "allocation")
    return Cards((
        Card(f"{best['days']:,.1f} days", "to train", note),
        Card(layout, "preferred layout", speed),
        Card(print_share(best["mfu"]), "MFU", str(best["mfu_denominator"])),
        Card(f"{best['memory_gib']:.0f} GiB", "memory", f"of {best['memory_limit_gib']:.0f} GiB"),
        Card(energy, "energy", f"PUE {best['pue']:g}"),
        Card(carbon(best["tco2e"]), "CO2e, location-based", f"market-based: {carbon(best['tco2e_market'])}"),
        Card(amount, unit, "charged"),
    ))  # fmt: skip
