"""HTML page of a plan: the first layout, memory, ranking, step time, scaling, energy, assumptions."""

from collections.abc import Sequence

from windlass.energy.carbon import print_carbon
from windlass.figures import Card, Cards, Chart, DataTable, Item, Mark, Note, Section, bars, fragment, line, page
from windlass.planner.changes import RecipeChange, recommended
from windlass.planner.record import mfu_denominator
from windlass.planner.scaling import ScalingPoint
from windlass.planner.search import RANKING, Plan, Plans, Rejected
from windlass.planner.task import PlanTask
from windlass.units import (
    DAY,
    GIB,
    print_bytes,
    print_figure,
    print_kwh,
    print_node_hours,
    print_rate,
    print_seconds,
    print_share,
    print_tokens,
    sentence,
)

# Layouts in a chart; the ranking shows twice as many.
SHOWN = 8


def plan_page(
    plans: Plans,
    strong: Sequence[ScalingPoint] = (),
    weak: Sequence[ScalingPoint] = (),
    changes: Sequence[RecipeChange] = (),
) -> str:
    """A self-contained HTML page; it has a scaling section if points are given."""
    task = plans.task
    shown = plans.plans[:SHOWN]
    # Plans may differ in batch size: their seconds are compared for the same number of tokens.
    step_terms = [
        {name: seconds * plans.best.batch_tokens / p.batch_tokens for name, seconds in p.step.terms.items()}
        for p in shown
    ]
    step_caption = f"For the same {plans.best.batch_tokens:,} tokens."
    steps = stacked(
        "Seconds of one optimizer step by cause", _labels(shown), step_terms, "seconds", caption=step_caption
    )
    first = recommended(changes)
    advice = [] if first is None else [Note(first.advise(plans.best.batch_tokens), "warning")]
    sections = [
        Section("The first layout", [*advice, *_first(plans)]),
        Section("What fills the memory", _memory(plans)),
        Section("Ranking", [_ranking(plans)]),
        Section("Where the time of a step goes", [steps]),
        *([Section("More and fewer nodes", _scaling(task, strong, weak))] if strong else []),
        Section("Energy and carbon", _energy(plans)),
        Section(
            "Assumptions and sources",
            [*(Note(sentence(text), "warning") for text in task.warnings), _cluster_facts(task)],
        ),
    ]
    tokens = print_tokens(plans.plans[0].tokens) if plans.plans else "unknown"
    return page(
        f"Plan: {task.recipe.name}",
        sections,
        subtitle=f"{print_tokens(task.model.params.total)} parameters, {tokens} tokens, "
        f"{task.nodes} nodes x {task.per_node} {task.device.name} ({task.cluster.title})",
        footer="Written by windlass plan. Predictions, not measurements: see docs/concepts/predictions.md.",
    )


def training_time(p: Plan) -> str:
    return print_seconds(p.days * DAY)


def mfu_text(p: Plan) -> str:
    """With a * where nobody has measured so much."""
    return "unknown" if p.step.mfu is None else f"{print_share(p.step.mfu)}{'*' if p.outside_measured else ''}"


def outside_measured(plans: Plans) -> list[str]:
    """What the * beside figures means; of several plans only the farthest, which comes with the highest MFU."""
    marked = [p for p in plans.plans if p.outside_measured]
    return list(max(marked, key=lambda p: p.step.mfu or 0.0).outside_measured) if marked else []


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}{unit}"


def carbon(tonnes: float | None) -> str:
    """`14.2 t`, where the label says CO2e."""
    return print_carbon(None if tonnes is None else 1e3 * tonnes, unit="")


def _layout_text(p: Plan | Rejected) -> str:
    return p.candidate.describe() + (" (recipe)" if p.from_recipe else "")


def _labels(plans: Sequence[Plan]) -> list[str]:
    return [f"{p.rank}. {_layout_text(p)}" for p in plans]


def plan_fragment(p: Plan) -> str:
    """One layout in a notebook."""
    cards = Cards((
        Card(training_time(p), "training time", print_node_hours(p.node_hours)),
        Card(print_rate(p.step.tokens_per_second_per_device, unit=""), "tokens/s per device"),
        Card(mfu_text(p), f"MFU ({p.step.mfu_convention})"),
        Card(print_bytes(p.memory.needed), f"of {print_bytes(p.limit_bytes)} per device"),
        Card(print_kwh(p.energy.kwh), "energy including facility overhead"),
        Card(carbon(p.energy.tco2e), "CO2e, location-based"),
    ))  # fmt: skip
    return fragment(_layout_text(p), [cards, Note(sentence(p.reason))])


def _first(plans: Plans) -> list[Item]:
    task, p = plans.task, plans.best
    achievable = (
        "" if p.mfu_of_achievable is None else f"; {print_share(p.mfu_of_achievable, digits=0)} of the achievable rate"
    )
    rate = p.step.tokens_per_second_per_device
    cards = [
        Card(training_time(p), "training time", print_node_hours(p.node_hours)),
        Card(print_rate(rate, unit=""), "tokens/s per device", f"total {print_rate(rate * task.devices, unit='')}"),
        Card(mfu_text(p), f"MFU ({p.step.mfu_convention})", f"of {mfu_denominator(task)}{achievable}"),
        Card(print_bytes(p.memory.needed), f"of {print_bytes(p.limit_bytes)} per device", f"peak: {p.memory.moment}"),
        Card(print_kwh(p.energy.kwh), "energy including facility overhead", f"PUE {p.energy.pue:g}"),
        Card(carbon(p.energy.tco2e), "CO2e, location-based", f"market-based: {carbon(p.energy.market_tco2e)}"),
    ]
    cards += [] if p.units is None else [Card(print_figure(p.units), f"{task.cluster.billing.unit}s charged")]
    batch = (
        f"{p.candidate.describe()}: {p.layout.data:,} replicas x micro-batch {p.layout.micro_batch} x "
        f"{p.layout.accumulation} micro-batches = {p.batch_tokens:,} tokens per step."
    )
    marks = (Note(f"* {text}", "warning") for text in outside_measured(plans))
    return [Cards(cards), Note(f"{batch} {sentence(p.reason)}"), *marks]


def stacked(
    title: str,
    labels: Sequence[str],
    terms: Sequence[dict[str, float]],
    unit: str,
    marks: tuple[Mark, ...] = (),
    caption: str = "",
) -> Chart:
    """Horizontal bars, one per plan, divided into the same terms in the same order; terms below 1 % become "other"."""
    names = dict.fromkeys(name for row in terms for name in row)
    largest_sum = max((sum(row.values()) for row in terms), default=1.0)
    small = [name for name in names if max(row.get(name, 0.0) for row in terms) < 0.01 * largest_sum]
    series = [bars(name, labels, [row.get(name) for row in terms]) for name in names if name not in small]
    if small:
        series.append(bars("other", labels, [sum(row.get(name, 0.0) for name in small) for row in terms]))
    return Chart(
        title=title,
        series=tuple(series),
        stacked=True,
        horizontal=True,
        y_title=unit,
        from_zero=True,
        marks=marks,
        caption=caption,
        height=170 + 42 * len(labels),
    )


def _memory(plans: Plans) -> list[Item]:
    shown, limit_gib = plans.plans[:SHOWN], plans.task.limit_bytes / GIB
    chart = stacked(
        "Peak memory per device",
        _labels(shown),
        [{name: size / GIB for name, size in p.memory_terms.items()} for p in shown],
        "GiB",
        (Mark(axis="y", at=limit_gib, label=f"{print_bytes(plans.task.limit_bytes)} usable"),),
        "At the moment of the peak, on the fullest device.",
    )
    # The recipe's own layout comes first, then the nearest that do not fit, then what a rule forbids.
    too_big = [r for r in plans.rejected if r.from_recipe or r.memory_gib is not None]
    forbidden = [r for r in plans.rejected if not r.from_recipe and r.memory_gib is None]
    rows = [(_layout_text(r), r.reason) for r in (*too_big[:SHOWN], *forbidden)]
    caption = "The nearest layouts that do not fit, and layouts that a rule forbids."
    return [chart, *([DataTable(("rejected", "reason"), rows, caption=caption)] if rows else [])]


def _ranking(plans: Plans) -> DataTable:
    shown = plans.plans[: 2 * SHOWN]
    columns = (
        "",
        "layout",
        "replicas x accum",
        "memory",
        "tokens/s per device",
        "MFU",
        "time",
        "energy",
        "CO2e",
        "reason",
    )
    rows = [
        (
            p.rank,
            _layout_text(p),
            f"{p.layout.data:,} x {p.layout.accumulation}",
            print_bytes(p.memory.needed),
            print_rate(p.step.tokens_per_second_per_device, unit=""),
            mfu_text(p),
            training_time(p),
            print_kwh(p.energy.kwh),
            carbon(p.energy.tco2e),
            p.reason,
        )
        for p in shown
    ]
    caption = (
        f"{plans.considered:,} layouts considered, {plans.fitting:,} fit; the best of each family is shown. {RANKING} "
        f"MFU counts {plans.best.step.mfu_convention} FLOPs as a share of {mfu_denominator(plans.task)}."
    )
    strong = [i for i, p in enumerate(shown) if p.from_recipe] or [0]
    return DataTable(columns, rows, right=(0, 2, 3, 4, 5, 6, 7, 8), caption=caption, strong=strong)


def _scaling(task: PlanTask, strong: Sequence[ScalingPoint], weak: Sequence[ScalingPoint]) -> list[Item]:
    devices = [p.devices for p in strong]
    rates = [p.tokens_per_second() or 0.0 for p in strong]
    series = [
        line("perfect", devices, [rates[0] / devices[0] * d for d in devices], dashed=True, colour=7),
        line("first layout", devices, [p.tokens_per_second() for p in strong], colour=0),
    ]
    kinds = [k for k in ("none", "zero1", "full", "hybrid") if any(k in p.kinds for p in strong)]
    series += [
        line(f"only shard {kind}", devices, [p.tokens_per_second(kind) for p in strong], colour=i)
        for i, kind in enumerate(kinds, 1)
    ]
    mfu = [line("same batch", devices, [p.best.step.mfu for p in strong], colour=0)]
    if weak:
        mfu.append(
            line("batch grows with devices", [p.devices for p in weak], [p.best.step.mfu for p in weak], colour=2)
        )
    marks = (Mark(axis="x", at=float(task.devices), label="this plan"),)
    rows = [
        (
            p.nodes,
            p.devices,
            p.best.candidate.describe(),
            print_rate(rate, unit=""),
            print_share(rate / (rates[0] or 1.0) / (p.devices / devices[0]), digits=0),
            training_time(p.best),
            print_kwh(p.best.energy.kwh),
        )
        for p, rate in zip(strong, rates, strict=True)
    ]
    columns = ("nodes", "devices", "first layout", "tokens/s", "efficiency", "time", "energy")
    return [
        Chart(
            title="Strong scaling: the same batch on more devices",
            x_title="devices",
            y_title="tokens/s",
            series=tuple(series),
            log_x=True,
            log_y=True,
            marks=marks,
            caption="There is a gap where a kind of sharding does not fit. Numbers of nodes that do not divide the "
            "batch are omitted.",
        ),
        Chart(
            title="MFU of the first layout",
            x_title="devices",
            y_title="MFU",
            series=tuple(mfu),
            log_x=True,
            from_zero=True,
            marks=marks,
            height=340,
        ),
        DataTable(columns, rows, right=(0, 1, 3, 4, 5, 6)),
    ]


def energy_parts(p: Plan) -> dict[str, float]:
    """MWh of the devices, the other parts of the nodes and the facility; empty if the device's power is unknown."""
    if p.energy.it_kwh is None or p.energy.kwh is None or p.energy.device_kwh is None:
        return {}
    return {
        "devices": p.energy.device_kwh / 1000,
        "other node parts": (p.energy.it_kwh - p.energy.device_kwh) / 1000,
        "facility overhead (PUE)": (p.energy.kwh - p.energy.it_kwh) / 1000,
    }


def _energy(plans: Plans) -> list[Item]:
    task, shown = plans.task, plans.plans[:SHOWN]
    parts = [energy_parts(p) for p in shown]
    if not any(parts):
        return [Note("The device's power is unknown, so energy is unknown too.", "warning")]
    e, grid = plans.best.energy, task.grid
    location, market = (
        f"{'unknown' if grams is None else f'{grams:g}'} g/kWh" for grams in (grid.g_per_kwh, grid.market_g_per_kwh)
    )
    rows = [
        ("at the nodes", print_kwh(e.it_kwh)),
        (f"including facility overhead (PUE {e.pue:g})", print_kwh(e.kwh)),
        ("per billion tokens", print_kwh(e.kwh_per_billion_tokens)),
        (f"CO2e, location-based ({location})", carbon(e.tco2e)),
        (f"CO2e, market-based ({market})", carbon(e.market_tco2e)),
        ("cost of electricity", number(e.euros, 0, " euros")),
        ("assumptions", "; ".join(e.assumed) or "none"),
    ]
    return [
        stacked("Energy of the run", _labels(shown), parts, "MWh"),
        DataTable(("the first layout", ""), rows, right=(1,)),
    ]


def _cluster_facts(task: PlanTask) -> DataTable:
    d, links = task.device, task.cluster.links
    quoted = f" (quoted; this model reaches {d.silicon_tflops:g})" if d.silicon_tflops else ""
    rows = [
        ("dense bf16 peak", number(d.bf16_tflops, 0, " TFLOP/s") + quoted),
        ("best measured matrix rate", number(d.matmul_tflops, 0, " TFLOP/s")),
        ("memory bandwidth", number(d.bandwidth_gbs, 0, " GB/s")),
        ("usable memory", print_bytes(task.limit_bytes)),
        ("links inside a node", number(links.intra_gbs, 0, " GB/s per device")),
        ("links to the network", number(links.inter_gbs_per_node, 0, " GB/s per node")),
        ("efficiency constants", task.cluster.efficiency.fitted_from or "the planner's own, fitted to published runs"),
    ]
    return DataTable(("figure", "value"), rows, right=(1,), caption=f"Sources: windlass clusters {task.cluster.name}")
