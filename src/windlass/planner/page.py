"""What does a plan look like? One page: the best layout in numbers, memory anatomy, ranking, where a step's time goes, scaling, energy."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.figures import Card, Cards, Chart, Item, Mark, Note, Section, Table, bars, line, page
from windlass.planner.record import mfu_words
from windlass.planner.scaling import ScalingPoint
from windlass.planner.search import TIE, Plan, Plans, Rejected
from windlass.planner.task import PlanTask
from windlass.units import GIB, print_seconds, print_tokens

SHOWN = 8


def plan_page(plans: Plans, strong: Sequence[ScalingPoint] = (), weak: Sequence[ScalingPoint] = ()) -> str:
    """A self-contained HTML page; the scaling section appears when its points are given."""
    task = plans.task
    sections = [
        Section("The best layout", _best(plans)),
        Section("What fills the memory", _memory(plans)),
        Section("Ranking", _ranking(plans)),
        Section("Where the time of a step goes", _steps(plans)),
    ]
    if strong:
        sections.append(Section("More and fewer nodes", _scaling(task, strong, weak)))
    sections.append(Section("Energy and carbon", _energy(plans)))
    sections.append(Section("What this rests on", [Note(text, "warning") for text in task.warnings] + [_facts(task)]))
    return page(
        f"Plan: {task.recipe.name}",
        sections,
        subtitle=f"{task.model.params.total / 1e9:.3g}B parameters, {print_tokens(plans.plans[0].tokens) if plans.plans else '?'} tokens, {task.nodes} nodes x {task.per_node} {task.device.name} ({task.cluster.title})",
        footer="Written by windlass plan. Estimates, not measurements: see docs/concepts/predictions.md.",
    )


def days_words(p: Plan) -> str:
    return print_seconds(p.days * 86_400)


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}{unit}"


def amount(value: float) -> str:
    """Whole numbers, with digits where they are small: `3,652`, `0.15`."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def carbon(tonnes: float | None) -> str:
    """Tonnes, with enough digits to be more than 0."""
    if tonnes is None:
        return "unknown"
    return f"{tonnes:,.1f} t" if tonnes >= 1 else f"{tonnes * 1000:,.1f} kg"


def _best(plans: Plans) -> list[Item]:
    task, p = plans.task, plans.best
    mfu = "unknown" if p.step.mfu is None else f"{p.step.mfu:.1%}"
    achievable = "" if p.mfu_of_achievable is None else f"; {p.mfu_of_achievable:.0%} of the achievable rate"
    cards = [
        Card(days_words(p), "to train", f"{amount(p.node_hours)} node-hours"),
        Card(
            f"{p.step.tokens_per_second_per_device:,.0f}",
            "tokens/s per device",
            f"{p.step.tokens_per_second_per_device * task.devices:,.0f} in all",
        ),
        Card(mfu, f"MFU ({p.step.mfu_convention})", f"of {mfu_words(task)}{achievable}"),
        Card(
            f"{p.memory.needed / GIB:.1f} GiB",
            f"of {p.limit_bytes / GIB:.1f} GiB per device",
            f"peak at the {p.memory.moment}",
        ),
        Card(_mwh(p.energy.kwh), "energy with the building", f"PUE {p.energy.pue:g}"),
        Card(carbon(p.energy.tco2e), "CO2e, location-based", f"market-based: {carbon(p.energy.market_tco2e)}"),
    ]
    if p.units is not None:
        cards.append(Card(amount(p.units), f"{task.cluster.billing.unit}s charged"))
    text = f"{p.candidate.describe()}: {p.layout.data:,} replicas x micro-batch {p.layout.micro_batch} x {p.layout.accumulation} micro-batches = {p.batch_tokens:,} tokens a step. {p.reason[:1].upper()}{p.reason[1:]}."
    return [Cards(cards), Note(text)]


def _mwh(kwh: float | None) -> str:
    if kwh is None:
        return "unknown"
    return f"{kwh / 1000:,.1f} MWh" if kwh >= 1000 else f"{kwh:,.1f} kWh"


def _labels(plans: Sequence[Plan]) -> list[str]:
    return [f"{i}. {p.candidate.describe()}{' (recipe)' if p.from_recipe else ''}" for i, p in enumerate(plans, 1)]


def stacked(
    title: str,
    labels: Sequence[str],
    terms: Sequence[dict[str, float]],
    unit: str,
    marks: tuple[Mark, ...] = (),
    caption: str = "",
) -> Chart:
    """Lying bars, one per plan, cut into the same terms in the same order; small terms are gathered."""
    totals: dict[str, float] = {}
    for row in terms:
        for name, value in row.items():
            totals[name] = max(totals.get(name, 0.0), value)
    largest = max((sum(row.values()) for row in terms), default=1.0)
    names = [name for name, peak in totals.items() if peak >= 0.01 * largest]
    small = [name for name in totals if name not in names]
    series = [bars(name, labels, [row.get(name) for row in terms]) for name in names]
    if small:
        series.append(bars("the rest", labels, [sum(row.get(n, 0.0) for n in small) for row in terms]))
    return Chart(
        title=title, series=tuple(series), stacked=True, horizontal=True, y_title=unit, from_zero=True, marks=marks, caption=caption,
        height=170 + 42 * len(labels),
    )  # fmt: skip


def _memory(plans: Plans) -> list[Item]:
    shown = plans.plans[:SHOWN]
    limit = plans.task.limit_bytes / GIB
    chart = stacked(
        "Peak memory per device by what holds it",
        _labels(shown),
        [{name: size / GIB for name, size in p.memory_terms.items()} for p in shown],
        "GiB",
        (Mark(axis="y", at=limit, label=f"{limit:.1f} GiB usable"),),
        "At the moment of the peak, on the fullest device.",
    )
    rows = [
        (r.candidate.describe() + (" (recipe)" if r.from_recipe else ""), r.reason) for r in _shown_rejections(plans)
    ]
    table: list[Item] = (
        [Table(("rejected", "why"), rows, caption="What misses by least, and what a rule forbids.")] if rows else []
    )
    return [chart, *table]


def _shown_rejections(plans: Plans) -> list[Rejected]:
    """The recipe's own first, then the closest misses, then what a rule forbids."""
    too_big = [r for r in plans.rejected if r.from_recipe or r.memory_gib is not None]
    return [*too_big[:SHOWN], *(r for r in plans.rejected if not r.from_recipe and r.memory_gib is None)]


def _ranking(plans: Plans) -> list[Item]:
    shown = plans.plans[: 2 * SHOWN]
    rows = [
        (
            i, p.candidate.describe() + (" (recipe)" if p.from_recipe else ""), f"{p.layout.data:,} x {p.layout.accumulation}", f"{p.memory.needed / GIB:.1f}",
            f"{p.step.tokens_per_second_per_device:,.0f}", "unknown" if p.step.mfu is None else f"{p.step.mfu:.1%}", days_words(p),
            _mwh(p.energy.kwh), carbon(p.energy.tco2e), p.reason,
        )
        for i, p in enumerate(shown, 1)
    ]  # fmt: skip
    columns = (
        "",
        "layout",
        "replicas x accum",
        "GiB",
        "tokens/s/device",
        "MFU",
        "time",
        "energy",
        "CO2e",
        "reason",
    )
    given = [i for i, p in enumerate(shown) if p.from_recipe] or [0]
    caption = f"{plans.considered:,} layouts considered, {plans.fitting:,} fit; the best of each family is shown, ranked by time in steps of {TIE:.0%} (the estimate is no finer), then by replicas. MFU counts {plans.best.step.mfu_convention} of {mfu_words(plans.task)}."
    return [Table(columns, rows, right=(0, 2, 3, 4, 5, 6, 7, 8), caption=caption, strong=given)]


def _steps(plans: Plans) -> list[Item]:
    shown = plans.plans[:SHOWN]
    scale = [plans.best.batch_tokens / p.batch_tokens for p in shown]
    terms = [{name: s * factor for name, s in p.step.terms.items()} for p, factor in zip(shown, scale, strict=True)]
    return [
        stacked(
            "Seconds of one optimizer step by cause",
            _labels(shown),
            terms,
            "seconds",
            caption=f"For the same {plans.best.batch_tokens:,} tokens.",
        )
    ]


def _scaling(task: PlanTask, strong: Sequence[ScalingPoint], weak: Sequence[ScalingPoint]) -> list[Item]:
    devices = [p.devices for p in strong]
    first = strong[0].tokens_per_second() or 0.0
    ideal = [first / devices[0] * d for d in devices]
    series = [
        line("perfect", devices, ideal, dashed=True, colour=7),
        line("best layout", devices, [p.tokens_per_second() for p in strong], colour=0),
    ]
    kinds = [k for k in ("none", "zero1", "full", "hybrid") if any(k in p.kinds for p in strong)]
    series += [
        line(f"only shard {k}", devices, [p.tokens_per_second(k) for p in strong], colour=i + 1)
        for i, k in enumerate(kinds)
    ]
    here = (Mark(axis="x", at=float(task.devices), label="this plan"),)
    speed = Chart(
        title="Strong scaling: the same batch on more devices", x_title="devices", y_title="tokens/s", series=tuple(series), log_x=True, log_y=True, marks=here,
        caption="A kind of sharding that does not fit leaves a gap. Sizes that do not divide the batch are left out.",
    )  # fmt: skip
    lines = [line("the same batch", devices, [p.best.step.mfu for p in strong], colour=0)]
    if weak:
        lines.append(
            line("batch grows with devices", [p.devices for p in weak], [p.best.step.mfu for p in weak], colour=2)
        )
    share = Chart(
        title="MFU of the best layout",
        x_title="devices",
        y_title="MFU",
        series=tuple(lines),
        log_x=True,
        from_zero=True,
        marks=here,
        height=340,
    )
    return [speed, share, _scaling_table(strong)]


def _scaling_table(strong: Sequence[ScalingPoint]) -> Table:
    first = strong[0]
    rows = []
    for p in strong:
        rate, base = p.tokens_per_second() or 0.0, first.tokens_per_second() or 1.0
        efficiency = rate / base / (p.devices / first.devices)
        rows.append(
            (
                p.nodes,
                p.devices,
                p.best.candidate.describe(),
                f"{rate:,.0f}",
                f"{efficiency:.0%}",
                days_words(p.best),
                _mwh(p.best.energy.kwh),
            )
        )
    return Table(
        ("nodes", "devices", "best layout", "tokens/s", "efficiency", "time", "energy"), rows, right=(0, 1, 3, 4, 5, 6)
    )


def energy_parts(p: Plan, task: PlanTask) -> dict[str, float]:
    """MWh of devices, the rest of the nodes and the building; empty when the device's power is unknown."""
    if p.energy.it_kwh is None or p.energy.kwh is None or p.power.device_watts is None:
        return {}
    devices = min(p.power.device_watts * task.per_node * p.node_hours / 1000, p.energy.it_kwh)
    return {
        "devices": devices / 1000,
        "rest of the nodes": (p.energy.it_kwh - devices) / 1000,
        "building (PUE)": (p.energy.kwh - p.energy.it_kwh) / 1000,
    }


def _energy(plans: Plans) -> list[Item]:
    task, shown = plans.task, plans.plans[:SHOWN]
    parts = [energy_parts(p, task) for p in shown]
    if not any(parts):
        return [Note("The device's power is unknown, so energy is too.", "warning")]
    e, grid = plans.best.energy, task.grid
    rows = [
        ("at the nodes", _mwh(e.it_kwh)), (f"with the building (PUE {e.pue:g})", _mwh(e.kwh)),
        ("per billion tokens", number(e.kwh_per_billion_tokens, 1, " kWh")), (f"CO2e, location-based ({number(grid.g_per_kwh, 1)} g/kWh)", carbon(e.tco2e)),
        (f"CO2e, market-based ({number(grid.market_g_per_kwh, 1)} g/kWh)", carbon(e.market_tco2e)), ("electricity", number(e.euros, 0, " euros")),
        ("assumed", "; ".join(e.assumed) or "nothing"),
    ]  # fmt: skip
    return [
        stacked("Energy of the whole run", _labels(shown), parts, "MWh"),
        Table(("the best layout", ""), rows, right=(1,)),
    ]


def _facts(task: PlanTask) -> Table:
    d, links = task.device, task.cluster.links
    rows = [
        ("dense bf16 peak", number(d.bf16_tflops, 0, " TFLOP/s") + (f" quoted, {d.silicon_tflops:g} of this part" if d.silicon_tflops else "")), ("best measured matrix rate", number(d.matmul_tflops, 0, " TFLOP/s")),
        ("memory bandwidth", number(d.bandwidth_gbs, 0, " GB/s")), ("usable memory", f"{task.limit_bytes / GIB:.1f} GiB"),
        ("inside a node", number(links.intra_gbs, 0, " GB/s per device")), ("into the network", number(links.inter_gbs_per_node, 0, " GB/s per node")),
        ("efficiency constants", task.cluster.efficiency.fitted_from or "the planner's own, fitted to published runs"),
    ]  # fmt: skip
    return Table(("figure", "value"), rows, right=(1,), caption=f"Sources: windlass clusters {task.cluster.name}")


__all__ = ["amount", "carbon", "days_words", "energy_parts", "number", "plan_page", "stacked"]
