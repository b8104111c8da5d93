"""`windlass budget`: model sizes and token counts that fit days, node-hours, kWh or euros."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.options import JsonOption
from windlass.cli.output import show, table, working
from windlass.errors import ConfigError
from windlass.units import DAY, parse_tokens, print_kwh, print_share, print_tokens

if TYPE_CHECKING:
    from windlass.planner.budget import BudgetResult

DROP = ("CO2e", "tokens per parameter", "energy")


def budget(
    cluster: Annotated[str, typer.Option(help="Cluster name (windlass clusters lists them).")],
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
        bool,
        typer.Option("--recompute", help="Assume full recomputation at the given MFU: count 8N instead of 6N FLOPs."),
    ] = False,
    sizes: Annotated[str, typer.Option(help="Comma-separated model sizes.")] = "1B,2B,7B,13B,30B,70B",
    tokens: Annotated[str | None, typer.Option(help='Number of tokens to mark and to price, such as "450B".')] = None,
    unique: Annotated[
        str | None, typer.Option(help='Number of unique tokens, after which the data repeats, such as "450B".')
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Sequence length of the planned models.", min=1)] = 4096,
    euro_per_kwh: Annotated[float | None, typer.Option(help="Price of electricity per kWh.")] = None,
    euro_per_node_hour: Annotated[float | None, typer.Option(help="Price of one node-hour.")] = None,
    as_json: JsonOption = False,
    png: Annotated[Path | None, typer.Option(help="Write the curves as an image (.png, .svg or .pdf).")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the curves, the map of model sizes and the caveats.")
    ] = None,
) -> None:
    """Show tokens vs. training time for each model size, what fits the budget, and a rough loss estimate."""
    from windlass.clusters import load_cluster
    from windlass.figures import save_page, save_picture
    from windlass.planner import budget as planning
    from windlass.planner import budget_page as page

    loaded = load_cluster(cluster)
    per_node = loaded.node.devices
    if nodes is not None and devices is not None and nodes * per_node != devices:
        raise ConfigError(
            "cli.nodes-and-devices-differ",
            f"{nodes} nodes have {nodes * per_node} devices, not {devices}",
            hint="give either --nodes or --devices",
        )
    if devices is not None and (devices < 1 or devices % per_node):
        below, above = max(1, devices // per_node) * per_node, (max(0, devices) // per_node + 1) * per_node
        raise ConfigError(
            "cli.partial-node",
            f"{devices} devices are not a multiple of the {per_node} devices of a node",
            hint=f"nearest valid value: {below} or {above}",
        )
    limits = [p.max_nodes for p in (loaded.slurm.partitions if loaded.slurm else []) if p.gpus and p.max_nodes]
    most_nodes = max(limits, default=loaded.nodes or 1)
    target = float(parse_tokens(tokens)) if tokens else None
    question = planning.Budget(
        cluster=loaded,
        nodes=devices // per_node if devices is not None else most_nodes if nodes is None else nodes,
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
    token_counts = sorted({*planning.TOKENS, target}) if target else list(planning.TOKENS)
    model_sizes = [float(parse_tokens(size)) for size in sizes.split(",") if size.strip()]
    with working(f"planning {len(model_sizes)} model sizes", quiet=as_json):
        result = planning.budget(question, model_sizes, token_counts)
    written = [save_picture(page.curves(result, target), png)] if png is not None else []
    written += [save_page(html, page.budget_page(result, target))] if html is not None else []
    title = (
        f"{page.limits_text(question)} on {question.nodes} x {per_node} {result.device.name} ({loaded.name}), "
        f"{result.device.bf16_tflops:g} TFLOP/s dense bf16 each"
    )
    show(
        as_json,
        page.budget_json(result),
        *(f"written: {path}" for path in written),
        table(title, page.BUDGET_COLUMNS, page.table_rows(result), right=tuple(range(1, 9)), drop=DROP),
        *_lines(result, target),
    )


def _lines(result: BudgetResult, target: float | None) -> list[str]:
    """What follows the table."""
    from windlass.planner.budget import size_text
    from windlass.planner.laws import CAVEATS, LAWS

    question, lines = result.budget, []
    if target:
        needs = []
        for pair in (p for p in result.pairs if p.tokens == target):
            energy = "" if pair.kwh is None else f", {print_kwh(pair.kwh)}"
            over = "" if pair.fits else " (over budget)"
            needed = "does not fit on any layout" if pair.days is None else f"{pair.days:,.1f} days{energy}{over}"
            needs.append(f"{size_text(pair.parameters)} {needed}")
        lines.append(f"{print_tokens(target)} tokens take: " + "; ".join(needs))
    longest_days = max((row.days for row in result.rows if row.days), default=None)
    if longest_days and question.mfu:
        flops = question.devices * (result.device.bf16_tflops or 0) * 1e12 * DAY * longest_days * question.mfu
        total = f"{flops:.3g} FLOP ({flops / 1e24:.2f} YFLOP)"
        lines.append(f"Compute in {longest_days:,.1f} days at an MFU of {print_share(question.mfu)}: {total}")
    if question.mfu is None:
        layouts = [f"{size_text(row.parameters)} {row.layout}" for row in result.rows if row.tokens_per_second]
        lines.append("planned: " + "; ".join(layouts))
    if result.best is not None:
        size, tokens = size_text(result.best.parameters), print_tokens(result.best.tokens)
        lines.append(f"Lowest expected loss: {size} on {tokens} tokens")
    lines.append(
        f"MFU is a share of the dense peak, at {question.flops_per_parameter if question.mfu else 6:g}N FLOPs per token. "
        f"Loss: {' / '.join(law.name for law in LAWS)}, nats per token; * means extrapolated."
    )
    return [*lines, *(f"note: {text}" for text in (*CAVEATS, *result.warnings))]
