"""JSON, table, charts and HTML page of a budget."""

from typing import Any

from windlass.figures import Card, Cards, Chart, DataTable, Heat, Item, Mark, Note, Section, line, page
from windlass.planner.budget import Budget, BudgetResult, SizeResult, size_text
from windlass.planner.laws import CAVEATS, LAWS
from windlass.planner.page import carbon
from windlass.units import DAY, print_figure, print_kwh, print_node_hours, print_share, print_tokens, sentence

BUDGET_COLUMNS = (
    "size",
    "MFU",
    "tokens/s",
    "days",
    "tokens",
    "tokens per parameter",
    "energy",
    "CO2e",
    "expected loss",
)


def budget_json(result: BudgetResult) -> dict[str, Any]:
    b = result.budget
    sizes = []
    for row in result.rows:
        e, loss = row.energy, row.loss
        sizes.append(
            {
                "parameters": row.parameters,
                "mfu": row.mfu,
                "tokens_per_second": row.tokens_per_second,
                "days": row.days,
                "bound_by": row.bound_by,
                "tokens": row.tokens,
                "tokens_per_parameter": None if row.tokens is None else row.tokens / row.parameters,
                "flops": row.flops,
                "node_hours": row.node_hours,
                "mwh": None if e is None or e.kwh is None else e.kwh / 1000,
                "tco2e": None if e is None else e.tco2e,
                "tco2e_market": None if e is None else e.market_tco2e,
                "allocation_units": row.units,
                "layout": row.layout,
                "outside_measured": list(row.outside_measured),
                "loss": None
                if loss is None
                else {
                    **loss.by_law,
                    "low": loss.low,
                    "high": loss.high,
                    "extrapolated": loss.extrapolated,
                    "effective_tokens": loss.effective_tokens,
                },
            }
        )
    return {
        "cluster": b.cluster.name,
        "nodes": b.nodes,
        "devices": b.devices,
        "device": result.device.name,
        "peak_tflops": result.device.bf16_tflops,
        "budget": {"days": b.days, "node_hours": b.node_hours, "kwh": b.kwh, "euros": b.euros},
        "mfu_convention": f"{b.flops_per_parameter:g}N of the dense bf16 peak",
        "unique_tokens": b.unique_tokens,
        "sizes": sizes,
        "pairs": [vars(pair) for pair in result.pairs],
        "lowest_expected_loss": None if result.best is None else result.best.parameters,
        "laws": [{"name": law.name, "source": law.source} for law in LAWS],
        "caveats": list(CAVEATS),
        "warnings": list(result.warnings),
    }


def curves(result: BudgetResult, target: float | None = None) -> Chart:
    """Tokens vs. days for each model size; `target` tokens are marked."""
    b = result.budget
    longest = b.days or max((row.days for row in result.rows if row.days), default=100.0)
    days = [longest * i / 60 for i in range(1, 61)]
    series = [
        line(size_text(row.parameters), days, [row.tokens_per_second * d * DAY for d in days])
        for row in result.rows
        if row.tokens_per_second
    ]
    mfu = f"MFU {b.mfu:g} ({b.flops_per_parameter:g}N)" if b.mfu is not None else "planned MFU"
    return Chart(
        title=f"Tokens vs. training time: {b.devices} x {result.device.name} at "
        f"{result.device.bf16_tflops:g} TFLOP/s, {mfu}",
        x_title="days",
        y_title="tokens",
        series=tuple(series),
        log_y=True,
        marks=(Mark(axis="y", at=target, label=f"{print_tokens(target)} tokens"),) if target else (),
        height=480,
    )


def fit_map(result: BudgetResult) -> Heat:
    """Days for each model size and token count; outside the budget the cell has no colour and its days are in
    brackets."""
    sizes = list(dict.fromkeys(p.parameters for p in result.pairs))
    tokens = list(dict.fromkeys(p.tokens for p in result.pairs))
    by_key = {(p.parameters, p.tokens): p for p in result.pairs}
    rows = [[by_key[size, count] for count in tokens] for size in sizes]
    labels = [
        ["no layout fits" if p.days is None else f"{p.days:,.1f}" if p.fits else f"({p.days:,.0f})" for p in row]
        for row in rows
    ]
    return Heat(
        title="Model sizes and token counts that fit the budget (days; in brackets: over budget)",
        x=tuple(print_tokens(count) for count in tokens),
        y=tuple(size_text(size) for size in sizes),
        x_title="tokens",
        y_title="parameters",
        unit="days",
        values=tuple(tuple(p.days if p.fits else None for p in row) for row in rows),
        labels=tuple(map(tuple, labels)),
    )


def limits_text(b: Budget) -> str:
    limits = (
        f"{b.days:g} days" if b.days else "",
        print_node_hours(b.node_hours) if b.node_hours else "",
        print_kwh(b.kwh) if b.kwh else "",
        f"{b.euros:,.0f} euros" if b.euros else "",
    )
    return " and ".join(filter(None, limits))


def table_rows(result: BudgetResult) -> list[tuple[object, ...]]:
    """One row per model size; the column of days names the limit if the budget has several."""
    b = result.budget
    has_several_limits = sum(limit is not None for limit in (b.days, b.node_hours, b.kwh, b.euros)) > 1

    def cells(row: SizeResult) -> tuple[object, ...]:
        e, loss = row.energy, row.loss
        bound = f" (by {row.bound_by})" if has_several_limits else ""
        return (
            size_text(row.parameters) + (" !" if row.outside_measured else ""),
            print_share(row.mfu, "-"),
            "-" if row.tokens_per_second is None else print_tokens(row.tokens_per_second),
            "-" if row.days is None else f"{row.days:,.1f}{bound}",
            "-" if row.tokens is None else print_tokens(row.tokens),
            "-" if row.tokens is None else print_figure(row.tokens / row.parameters, 2),
            "-" if e is None else print_kwh(e.kwh),
            "-" if e is None else carbon(e.tco2e),
            "-" if loss is None else f"{loss.low:.2f} to {loss.high:.2f}{' *' if loss.extrapolated else ''}",
        )

    return [cells(row) for row in result.rows]


def budget_page(result: BudgetResult, target: float | None = None) -> str:
    b, best = result.budget, result.best
    cards: list[Item] = []
    if best is not None and best.tokens is not None and best.loss is not None:
        e = best.energy
        loss_range = f"{best.loss.low:.2f} to {best.loss.high:.2f} nats per token"
        values = [
            Card(size_text(best.parameters), "lowest expected loss", loss_range),
            Card(
                print_tokens(best.tokens), "tokens", f"{print_figure(best.tokens / best.parameters, 2)} per parameter"
            ),
            Card(f"{best.days:,.1f}", "days", f"limited by {best.bound_by}"),
            Card(print_kwh(e.kwh if e else None), "energy including facility overhead"),
            Card(carbon(e.tco2e if e else None), "CO2e, location-based"),
        ]
        cards = [Cards(values)]
    rows = [
        (*cells, *("-" if row.loss is None else f"{row.loss.by_law[law.name]:.2f}" for law in LAWS), row.layout)
        for cells, row in zip(table_rows(result), result.rows, strict=True)
    ]
    laws = " / ".join(law.name for law in LAWS)
    caveats = " ".join(sentence(text) for text in (f"expected loss by {laws}", *CAVEATS))
    columns = (*BUDGET_COLUMNS, *(law.name for law in LAWS), "layout")
    sections = [
        Section(
            "What the budget buys",
            [*cards, DataTable(columns, rows, right=tuple(range(1, 11))), Note(caveats, "warning")],
        ),
        Section("Tokens vs. training time", [curves(result, target)]),
        Section("What fits", [fit_map(result)]),
        Section(
            "Assumptions and sources",
            [Note(sentence(text)) for text in (*result.warnings, *(law.source for law in LAWS))],
        ),
    ]
    return page(
        f"Budget: {limits_text(b)} on {b.cluster.name}",
        sections,
        subtitle=f"{b.nodes} nodes x {b.cluster.node.devices} {result.device.name}, "
        f"{b.flops_per_parameter:g}N FLOPs per token",
        footer="Written by windlass budget.",
    )
