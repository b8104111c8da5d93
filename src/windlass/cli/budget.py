"""`windlass budget`: model sizes and token counts that fit days, node-hours, kWh or euros."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.output import show, table
from windlass.errors import ConfigError
from windlass.units import parse_tokens, print_tokens

if TYPE_CHECKING:
    from windlass.clusters import Cluster
    from windlass.planner.budget import BudgetResult


def budget(
    cluster: Annotated[str, typer.Option(help="Cluster (windlass clusters lists them).")],
    days: Annotated[float | None, typer.Option(help="Budget in days.")] = None,
    node_hours: Annotated[float | None, typer.Option(help="Budget in node-hours.")] = None,
    kwh: Annotated[float | None, typer.Option(help="Budget in kWh at the meter.")] = None,
    euros: Annotated[float | None, typer.Option(help="Budget in euros.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes (default: the most that one job may use).")] = None,
    devices: Annotated[int | None, typer.Option(help="Number of devices instead of nodes.")] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Model FLOP utilisation to assume, such as 0.4 (default: the planner's own).")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Count 8N instead of 6N FLOPs: full recompute at the given MFU.")
    ] = False,
    sizes: Annotated[str, typer.Option(help="Model sizes.")] = "1B,2B,7B,13B,30B,70B",
    tokens: Annotated[str | None, typer.Option(help='Token target to mark and to price, such as "450B".')] = None,
    unique: Annotated[str | None, typer.Option(help='Number of tokens before data repeats, such as "450B".')] = None,
    seq_len: Annotated[int, typer.Option(help="Sequence length of planned models.", min=1)] = 4096,
    euro_per_kwh: Annotated[float | None, typer.Option(help="Price of electricity per kWh.")] = None,
    euro_per_node_hour: Annotated[float | None, typer.Option(help="Price of one node-hour.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write the curves as an image (.png, .svg or .pdf).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves, map and caveats.")] = None,
) -> None:
    """Show tokens vs. training time for each model size, what fits the budget, and a rough loss estimate."""
    from windlass.clusters import load_cluster
    from windlass.figures import save_page, save_picture
    from windlass.planner.budget import TOKENS, Budget
    from windlass.planner.budget import budget as compute_budget
    from windlass.planner.budget_page import BUDGET_COLUMNS, budget_json, budget_page, curves, limits_text, table_rows

    loaded = load_cluster(cluster)
    target = float(parse_tokens(tokens)) if tokens else None
    question = Budget(
        cluster=loaded,
        nodes=_num_nodes(loaded, nodes, devices),
        days=days,
        node_hours=node_hours,
        kwh=kwh,
        euros=euros,
        mfu=mfu,
        flops_per_parameter=8.0 if recompute else 6.0,
        seq_len=seq_len,
        unique_tokens=float(parse_tokens(unique)) if unique else None,
        euro_per_kwh=euro_per_kwh,
        euro_per_node_hour=euro_per_node_hour,
    )
    token_counts = sorted({*TOKENS, target}) if target else list(TOKENS)
    result = compute_budget(question, [float(parse_tokens(s)) for s in sizes.split(",") if s.strip()], token_counts)
    written = [save_picture(curves(result, target), png)] if png is not None else []
    written += [save_page(html, budget_page(result, target))] if html is not None else []
    title = (
        f"{limits_text(question)} on {question.nodes} x {loaded.node.devices} {result.device.name} ({loaded.name}), "
        f"{result.device.bf16_tflops:g} TFLOP/s dense bf16 each"
    )
    ranked = table(title, BUDGET_COLUMNS, table_rows(result), right=tuple(range(1, 9)))
    show(as_json, budget_json(result), *(f"written: {path}" for path in written), ranked, *_lines(result, target))


def _num_nodes(cluster: Cluster, nodes: int | None, devices: int | None) -> int:

    per_node = cluster.node.devices
    if devices is None and nodes is not None:
        return nodes
    if devices is not None:
        if nodes is not None and nodes * per_node != devices:
            raise ConfigError(
                "cli.nodes-and-devices-differ",
                f"{nodes} nodes have {nodes * per_node} devices, not {devices}",
                hint="give --nodes or --devices",
            )
        if devices < 1 or devices % per_node:
            below, above = max(1, devices // per_node) * per_node, (max(0, devices) // per_node + 1) * per_node
            raise ConfigError(
                "cli.partial-node",
                f"{devices} devices are not a multiple of the {per_node} devices of a node",
                hint=f"nearest valid value: {below} or {above}",
            )
        return devices // per_node
    limits = [p.max_nodes for p in (cluster.slurm.partitions if cluster.slurm else []) if p.gpus and p.max_nodes]
    return max(limits, default=cluster.nodes or 1)


def _lines(result: BudgetResult, target: float | None) -> list[str]:
    """What follows the table."""
    from windlass.planner.budget import size_text
    from windlass.planner.laws import CAVEATS, LAWS

    b, lines = result.budget, []
    if target:
        needs = []
        for pair in (p for p in result.pairs if p.tokens == target):
            energy = "" if pair.kwh is None else f", {pair.kwh / 1000:,.1f} MWh"
            over = "" if pair.fits else " (over budget)"
            needed = "does not fit on any layout" if pair.days is None else f"{pair.days:,.1f} days{energy}{over}"
            needs.append(f"{size_text(pair.parameters)} {needed}")
        lines.append(f"{print_tokens(target)} tokens take: " + "; ".join(needs))
    longest_days = max((row.days for row in result.rows if row.days), default=None)
    if longest_days and b.mfu:
        flops = b.devices * (result.device.bf16_tflops or 0) * 1e12 * 86_400 * longest_days * b.mfu
        total = f"{flops:.3g} FLOP ({flops / 1e24:.2f} YFLOP)"
        lines.append(f"Compute in {longest_days:,.1f} days at MFU {b.mfu:g}: {total}")
    if b.mfu is None:
        layouts = [f"{size_text(row.parameters)} {row.layout}" for row in result.rows if row.tokens_per_second]
        lines.append("planned: " + "; ".join(layouts))
    if result.best is not None:
        size, tokens = size_text(result.best.parameters), print_tokens(result.best.tokens)
        lines.append(f"Lowest expected loss: {size} on {tokens} tokens")
    lines.append(
        f"MFU counts {b.flops_per_parameter if b.mfu else 6:g}N of the dense peak. "
        f"Loss: {' / '.join(law.name for law in LAWS)}, nats per token; * is extrapolated."
    )
    return [*lines, *(f"note: {text}" for text in (*CAVEATS, *result.warnings))]
