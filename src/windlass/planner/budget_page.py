"""How is a budget shown? JSON, the curves of tokens against days, the map of what fits, and a page with both."""

from __future__ import annotations

from typing import Any

from windlass.figures import Card, Cards, Chart, DataTable, Heat, Item, Mark, Note, Section, line, page
from windlass.planner.budget import Budget, BudgetResult, Row, curve, size_words
from windlass.planner.laws import CAVEATS, LAWS
from windlass.planner.page import carbon, number
from windlass.units import print_tokens


def budget_json(found: BudgetResult) -> dict[str, Any]:
    b = found.budget
    return {
        "cluster": b.cluster.name, "nodes": b.nodes, "devices": b.devices, "device": found.device.name, "peak_tflops": found.device.bf16_tflops,
        "budget": {"days": b.days, "node_hours": b.node_hours, "kwh": b.kwh, "euros": b.euros},
        "mfu_convention": f"{b.flops_per_parameter:g}N of the dense bf16 peak", "unique_tokens": b.unique_tokens,
        "sizes": [_row_json(row) for row in found.rows],
        "pairs": [vars(pair) for pair in found.pairs],
        "lowest_expected_loss": None if found.best is None else found.best.parameters,
        "laws": [{"name": law.name, "source": law.source} for law in LAWS],
        "caveats": list(CAVEATS), "warnings": list(found.warnings),
    }  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    e, loss = row.energy, row.loss
    return {
        "parameters": row.parameters, "mfu": row.mfu, "tokens_per_second": row.tokens_per_second, "days": row.days, "bound_by": row.bound_by,
        "tokens": row.tokens, "tokens_per_parameter": None if row.tokens is None else row.tokens / row.parameters, "flops": row.flops,
        "node_hours": row.node_hours, "mwh": None if e is None or e.kwh is None else e.kwh / 1000, "tco2e": None if e is None else e.tco2e,
        "tco2e_market": None if e is None else e.market_tco2e, "allocation_units": row.units, "layout": row.layout,
        "loss": None if loss is None else {
            **loss.by_law, "low": loss.low, "high": loss.high, "extrapolated": loss.extrapolated, "effective_tokens": loss.effective_tokens,
        },
    }  # fmt: skip


def curves(found: BudgetResult, target: float | None = None) -> Chart:
    """The GPT-NL picture: tokens against days for each size."""
    b = found.budget
    longest = b.days or max((row.days for row in found.rows if row.days), default=100.0)
    days = [longest * i / 60 for i in range(1, 61)]
    series = [
        line(size_words(row.parameters), days, curve(b, row, days)) for row in found.rows if row.tokens_per_second
    ]
    how = f"MFU {b.mfu:g} ({b.flops_per_parameter:g}N)" if b.mfu is not None else "planned MFU"
    marks = (Mark(axis="y", at=target, label=f"{print_tokens(target)} tokens"),) if target else ()
    return Chart(
        title=f"Tokens against days: {b.devices} x {found.device.name} at {found.device.bf16_tflops:g} TFLOP/s, {how}", x_title="days", y_title="tokens",
        series=tuple(series), log_y=True, marks=marks, height=480,
    )  # fmt: skip


def fit_map(found: BudgetResult) -> Heat:
    """Which (N, D) fit: days in the cells, empty where nothing fits or the budget ends."""
    sizes = list(dict.fromkeys(p.parameters for p in found.pairs))
    tokens = list(dict.fromkeys(p.tokens for p in found.pairs))
    at = {(p.parameters, p.tokens): p for p in found.pairs}
    rows = [[at[s, d] for d in tokens] for s in sizes]
    return Heat(
        title="Which model sizes and token counts fit the budget (days; empty: beyond it)",
        x=tuple(print_tokens(d) for d in tokens), y=tuple(size_words(s) for s in sizes), x_title="tokens", y_title="parameters", unit="days",
        values=tuple(tuple(p.days if p.fits else None for p in row) for row in rows),
        labels=tuple(tuple(_cell(p.days, p.fits) for p in row) for row in rows),
    )  # fmt: skip


def _cell(days: float | None, fits: bool) -> str:
    if days is None:
        return "no layout fits"
    return f"{days:,.1f}" if fits else f"({days:,.0f})"


def budget_words(b: Budget) -> str:
    parts = [
        f"{b.days:g} days" if b.days else "",
        f"{b.node_hours:,.0f} node-hours" if b.node_hours else "",
        f"{b.kwh:,.0f} kWh" if b.kwh else "",
    ]
    parts.append(f"{b.euros:,.0f} euros" if b.euros else "")
    return " and ".join(p for p in parts if p)


COLUMNS = ("size", "MFU", "tokens/s", "days", "tokens", "per parameter", "MWh", "CO2e", "expected loss")


def table_rows(found: BudgetResult) -> list[tuple[object, ...]]:
    several = (
        sum(
            limit is not None
            for limit in (found.budget.days, found.budget.node_hours, found.budget.kwh, found.budget.euros)
        )
        > 1
    )
    return [_cells(row, several) for row in found.rows]


def _cells(row: Row, several: bool) -> tuple[object, ...]:
    e, loss = row.energy, row.loss
    return (
        size_words(row.parameters),
        "-" if row.mfu is None else f"{row.mfu:.2f}",
        "-" if row.tokens_per_second is None else print_tokens(row.tokens_per_second),
        "-" if row.days is None else f"{row.days:,.1f}" + (f" (by {row.bound_by})" if several else ""),
        "-" if row.tokens is None else print_tokens(row.tokens),
        "-" if row.tokens is None else f"{row.tokens / row.parameters:,.0f}",
        "-" if e is None else number(None if e.kwh is None else e.kwh / 1000),
        "-" if e is None else carbon(e.tco2e),
        "-" if loss is None else f"{loss.low:.2f} to {loss.high:.2f}{' *' if loss.extrapolated else ''}",
    )


def _page_rows(found: BudgetResult) -> list[tuple[object, ...]]:
    """The table's cells, each law's own loss, and the layout."""

    def laws(row: Row) -> tuple[str, ...]:
        return tuple("-" if row.loss is None else f"{row.loss.by_law[law.name]:.2f}" for law in LAWS)

    return [(*cells, *laws(row), row.layout) for cells, row in zip(table_rows(found), found.rows, strict=True)]


def budget_page(found: BudgetResult, target: float | None = None) -> str:
    b, best = found.budget, found.best
    cards: list[Item] = []
    if best is not None and best.tokens is not None and best.loss is not None:
        e = best.energy
        cards = [
            Cards(
                [
                    Card(
                        size_words(best.parameters),
                        "lowest expected loss",
                        f"{best.loss.low:.2f} to {best.loss.high:.2f} nats per token",
                    ),
                    Card(print_tokens(best.tokens), "tokens", f"{best.tokens / best.parameters:,.0f} per parameter"),
                    Card(f"{best.days:,.1f}", "days", f"ends by {best.bound_by}"),
                    Card(
                        number(None if e is None or e.kwh is None else e.kwh / 1000, 1, " MWh"),
                        "energy with the building",
                    ),
                    Card(carbon(e.tco2e if e else None), "CO2e, location-based"),
                ]
            )
        ]
    laws = Note(
        f"Expected loss by {' / '.join(law.name for law in LAWS)}; * means beyond what was fitted. "
        + "; ".join(CAVEATS)
        + ".",
        "warning",
    )
    sections = [
        Section(
            "What the budget buys",
            [
                *cards,
                DataTable(
                    (*COLUMNS, *(law.name for law in LAWS), "layout"), _page_rows(found), right=tuple(range(1, 11))
                ),
                laws,
            ],
        ),
        Section("Tokens against days", [curves(found, target)]),
        Section("What fits", [fit_map(found)]),
        Section("What this rests on", [Note(text) for text in found.warnings] + [Note(law.source) for law in LAWS]),
    ]
    return page(
        f"Budget: {budget_words(b)} on {b.cluster.name}", sections,
        subtitle=f"{b.nodes} nodes x {b.cluster.node.devices} {found.device.name}, {b.flops_per_parameter:g}N FLOPs per token", footer="Written by windlass budget.",
    )  # fmt: skip
