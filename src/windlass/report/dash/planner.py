"""The planner page: its question (cluster, nodes, model, tokens, days) and the planner's answer as sections."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field, field_validator

from windlass.clusters.load import cluster_names, load_cluster
from windlass.config import ModelConfig, Recipe
from windlass.config.base import Table, Tokens
from windlass.config.load import check, validate
from windlass.config.toml_text import to_toml
from windlass.errors import WindlassError
from windlass.figures import Card, Cards, DataTable, Mark, Note, Section
from windlass.models.presets import model_spec
from windlass.planner.budget import model_near, shape_of_width, size_text
from windlass.planner.changes import nothing_fits
from windlass.planner.page import carbon, mfu_text, outside_measured, stacked, training_time
from windlass.planner.record import mfu_denominator, plan_json
from windlass.planner.search import RANKING, Plan, search
from windlass.planner.task import PlanTask, make_task
from windlass.units import (
    DAY,
    GIB,
    parse_tokens,
    print_bytes,
    print_figure,
    print_kwh,
    print_node_hours,
    print_rate,
    print_seconds,
    print_tokens,
    sentence,
)

MODEL_KEYS = ("layers", "width", "ffn", "heads", "kv_heads", "vocab")
# Offered by name, in the proportions of published models: values of MODEL_KEYS.
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
RECIPE_COMMENT = """From the planner page of `windlass dash`. Before training, name a token store in [data].
windlass plan FILE shows the layouts again."""


class PlannerQuestion(Table):
    """What the page asks. `layers` to `vocab` replace numbers of the usual shape for `size` parameters."""

    cluster: str = "snellius-h100"
    nodes: Tokens = Field(default=20, ge=1, le=20_000)
    size: Tokens = Field(default=8 * 10**9, ge=10**7, le=2 * 10**12)
    layers: int | None = Field(default=None, ge=1, le=1000)
    width: int | None = Field(default=None, ge=64, le=65_536)
    ffn: int | None = Field(default=None, ge=64, le=2**20)
    heads: int | None = Field(default=None, ge=1, le=1024)
    kv_heads: int | None = Field(default=None, ge=1, le=1024)
    vocab: int | None = Field(default=None, ge=256, le=2**21)
    tokens: Tokens = Field(default=450 * 10**9, ge=10**6, le=10**15)
    seq_len: Tokens = Field(default=8192, ge=128, le=2**20)
    batch_tokens: Tokens = Field(default=4 * 2**20, ge=1024, le=10**9)
    precision: str = "bf16"
    days: float | None = None  # what is available; the answer says whether it suffices

    @field_validator("cluster")
    @classmethod
    def _is_offered(cls, value: str) -> str:
        if value not in cluster_names():
            raise ValueError(f"unknown; one of {', '.join(cluster_names())}")
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


def recipe_table(q: PlannerQuestion) -> dict[str, Any]:
    """The question as a recipe."""
    # The batch nearest to the wanted one that the devices divide; more devices than sequences share one in groups.
    devices = q.nodes * load_cluster(q.cluster).node.devices
    while devices * q.seq_len > q.batch_tokens and devices % 2 == 0:
        devices //= 2
    unit = devices * q.seq_len
    batch_tokens = max(1, round(q.batch_tokens / unit)) * unit
    named = {parse_tokens(name): shape for name, shape in MODEL_SHAPES.items()}.get(q.size)
    usual = dict(zip(MODEL_KEYS, named, strict=True)) if named else model_near(float(q.size)).model_dump()
    if q.width is not None:
        usual |= shape_of_width(q.width)
    model = {key: usual[key] if getattr(q, key) is None else getattr(q, key) for key in MODEL_KEYS}
    parameters = model_spec(validate(ModelConfig, model, "model")).params.total
    return {
        "name": f"what-if-{size_text(parameters)}",
        "cluster": q.cluster,
        "nodes": q.nodes,
        "model": {"family": "llama", **model},
        "data": {"tokens": q.tokens, "seq_len": q.seq_len, "batch_tokens": batch_tokens},
        "train": {"precision": q.precision},
    }


@lru_cache(maxsize=256)
def ask(q: PlannerQuestion) -> tuple[dict[str, Any], list[Section]]:
    """The planner's answer: its first layout, and the ranked layouts as sections of the page."""
    table = recipe_table(q)
    recipe = validate(Recipe, table, "planner page")
    check(recipe)
    task = make_task(recipe, load_cluster(q.cluster))
    plans = search(task)
    if not plans.plans:
        raise nothing_fits(plans)
    shown, first = plans.plans[:MAX_LAYOUTS], plans.best
    memory = stacked(
        "Memory by layout",
        [f"{p.rank}. {p.candidate.describe()}" for p in shown],
        [{name: size / GIB for name, size in p.memory_terms.items()} for p in shown],
        "GiB",
        (Mark(axis="y", at=first.limit_bytes / GIB, label=print_bytes(first.limit_bytes)),),
    )
    ranking = DataTable(
        ("layout", "time", "tokens/s per device", "MFU", "memory", "energy", "CO2e", "reason"),
        [
            (p.candidate.describe(), training_time(p), print_rate(p.step.tokens_per_second_per_device, unit=""),
             mfu_text(p), print_bytes(p.memory.needed), print_kwh(p.energy.kwh), carbon(p.energy.tco2e), p.reason)
            for p in shown
        ],
        right=(1, 2, 3, 4, 5, 6),
        strong=(0,),
        caption=RANKING,
    )  # fmt: skip
    answer = {
        "question": q.model_dump(),
        "best": plan_json(first, task),
        "layout": first.candidate.describe(),
        "considered": plans.considered,
        "model": {**table["model"], "parameters": size_text(task.model.params.total)},
        "recipe": to_toml(table, RECIPE_COMMENT),
        "file": f"{table['name']}.toml",
    }
    marks = (f"* {text}" for text in outside_measured(plans))
    notes = (Note(text, "warning") for text in (*marks, *map(sentence, task.warnings)))
    return answer, [
        Section("", (_cards(first, task, q), *notes), id="best"),
        Section("Memory of a device", (memory,), id="memory"),
        Section("Ranked layouts", (ranking,), id="ranking"),
    ]


def _cards(p: Plan, task: PlanTask, q: PlannerQuestion) -> Cards:
    note = print_node_hours(p.node_hours)
    if q.days is not None:
        missing_seconds = (p.days - q.days) * DAY
        note = f"within the available {q.days:g} days"
        if missing_seconds > 0:
            note = f"{print_seconds(missing_seconds)} more than available"
    rate = p.step.tokens_per_second_per_device * task.devices
    charged = "unknown" if p.units is None else print_figure(p.units)
    return Cards((
        Card(training_time(p), "to train", note),
        Card(p.candidate.describe(), "first layout", f"{print_rate(rate)}, batch {print_tokens(p.batch_tokens)}"),
        Card(mfu_text(p), "MFU", mfu_denominator(task)),
        Card(print_bytes(p.memory.needed), "memory", f"of {print_bytes(p.limit_bytes)}"),
        Card(print_kwh(p.energy.kwh), "energy", f"PUE {p.energy.pue:g}"),
        Card(carbon(p.energy.tco2e), "CO2e, location-based", f"market-based: {carbon(p.energy.market_tco2e)}"),
        Card(charged, task.cluster.billing.unit, "charged"),
    ))  # fmt: skip
