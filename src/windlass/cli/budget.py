"""`windlass budget`: which model sizes and token counts fit days, node-hours, kWh or euros."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from windlass.clusters import Cluster
    from windlass.planner.budget import BudgetResult


def register(app: typer.Typer) -> None:
    app.command("budget")(budget)


def budget(
    cluster: Annotated[str, typer.Option(help="Machine (windlass clusters lists them).")],
    days: Annotated[float | None, typer.Option(help="Budget in days.")] = None,
    node_hours: Annotated[float | None, typer.Option(help="Budget in node-hours.")] = None,
    kwh: Annotated[float | None, typer.Option(help="Budget in kWh at the meter.")] = None,
    euros: Annotated[float | None, typer.Option(help="Budget in euros.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; the most that one job may take when left out.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices instead of nodes.")] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Model FLOP utilisation to assume (0.4); the planner's own when left out.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Count 8N instead of 6N: full recompute at the given utilisation.")
    ] = False,
    sizes: Annotated[str, typer.Option(help="Model sizes.")] = "1B,2B,7B,13B,30B,70B",
    tokens: Annotated[str | None, typer.Option(help='Token target to mark and to ask for, for example "450B".')] = None,
    unique: Annotated[str | None, typer.Option(help='Tokens before data repeats, for example "450B".')] = None,
    seq_len: Annotated[int, typer.Option(help="Sequence length of planned models.", min=1)] = 4096,
    euro_per_kwh: Annotated[float | None, typer.Option(help="Price of electricity.")] = None,
    euro_per_node_hour: Annotated[float | None, typer.Option(help="Price of a node for an hour.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write the curves as a picture (.png, .svg or .pdf).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves, map and caveats.")] = None,
) -> None:
    """Tokens against days for each model size, what fits the budget, and an honest guess of the loss."""
    from windlass.cli.output import console, print_json
    from windlass.clusters import load_cluster
    from windlass.planner.budget import TOKENS, Budget
    from windlass.planner.budget import budget as answer
    from windlass.planner.budget_page import budget_json
    from windlass.units import parse_tokens

    machine = load_cluster(cluster)
    target = float(parse_tokens(tokens)) if tokens else None
    question = Budget(
        cluster=machine, nodes=_nodes(machine, nodes, devices), days=days, node_hours=node_hours, kwh=kwh, euros=euros, mfu=mfu,
        flops_per_parameter=8.0 if recompute else 6.0, seq_len=seq_len, unique_tokens=float(parse_tokens(unique)) if unique else None,
        euro_per_kwh=euro_per_kwh, euro_per_node_hour=euro_per_node_hour,
    )  # fmt: skip
    wanted = sorted({*TOKENS, target}) if target else list(TOKENS)
    found = answer(question, [float(parse_tokens(s)) for s in sizes.split(",") if s.strip()], wanted)
    for path in _write(found, target, png, html):
        if not as_json:
            console().print(f"written: {path}")
    if as_json:
        print_json(budget_json(found))
    else:
        _print(found, target)


def _nodes(cluster: Cluster, nodes: int | None, devices: int | None) -> int:
    from windlass.errors import ConfigError

    per_node = cluster.node.devices
    if devices is not None:
        if nodes is not None and nodes * per_node != devices:
            raise ConfigError(
                "cli.nodes-devices",
                f"{nodes} nodes have {nodes * per_node} devices, not {devices}",
                hint="give --nodes or --devices",
            )
        if devices < 1 or devices % per_node:
            raise ConfigError(
                "cli.devices-whole-nodes",
                f"{devices} devices are not whole nodes of {per_node}",
                hint=f"nearest: {max(1, devices // per_node) * per_node} or {(max(0, devices) // per_node + 1) * per_node}",
            )
        return devices // per_node
    if nodes is not None:
        return nodes
    limits = [p.max_nodes for p in (cluster.slurm.partitions if cluster.slurm else []) if p.gpus and p.max_nodes]
    return max(limits, default=cluster.nodes or 1)


def _write(found: BudgetResult, target: float | None, png: Path | None, html: Path | None) -> list[Path]:
    from windlass.figures import save_page, save_picture
    from windlass.planner.budget_page import budget_page, curves

    written = []
    if png is not None:
        written.append(save_picture(curves(found, target), png))
    if html is not None:
        written.append(save_page(html, budget_page(found, target)))
    return written


def _print(found: BudgetResult, target: float | None) -> None:
    from windlass.cli.output import console, table
    from windlass.planner.budget import size_words
    from windlass.planner.budget_page import COLUMNS, budget_words, table_rows
    from windlass.planner.laws import CAVEATS, LAWS
    from windlass.units import print_tokens

    out, b = console(), found.budget
    title = f"{budget_words(b)} on {b.nodes} x {b.cluster.node.devices} {found.device.name} ({b.cluster.name}), {found.device.bf16_tflops:g} TFLOP/s dense bf16 each"
    out.print(table(title, COLUMNS, table_rows(found), right=tuple(range(1, 9))))
    if target:
        out.print(
            f"{print_tokens(target)} tokens take: "
            + "; ".join(_need(p.parameters, p.days, p.kwh, p.fits) for p in found.pairs if p.tokens == target)
        )
    peak = b.devices * (found.device.bf16_tflops or 0) * 1e12 * 86_400
    longest = max((row.days for row in found.rows if row.days), default=None)
    if longest and b.mfu:
        out.print(
            f"Compute in {longest:,.1f} days at MFU {b.mfu:g}: {peak * longest * b.mfu:.3g} FLOP ({peak * longest * b.mfu / 1e24:.2f} YFLOP)"
        )
    if b.mfu is None:
        out.print(
            "planned: "
            + "; ".join(f"{size_words(row.parameters)} {row.layout}" for row in found.rows if row.tokens_per_second)
        )
    if found.best is not None:
        out.print(
            f"Lowest expected loss: {size_words(found.best.parameters)} on {print_tokens(found.best.tokens)} tokens"
        )
    out.print(
        f"MFU counts {b.flops_per_parameter if b.mfu else 6:g}N of the dense peak. Loss: {' / '.join(law.name for law in LAWS)}, nats per token; * is extrapolated."
    )
    for text in (*CAVEATS, *found.warnings):
        out.print(f"note: {text}")


def _need(parameters: float, days: float | None, kwh: float | None, fits: bool) -> str:
    from windlass.planner.budget import size_words

    if days is None:
        return f"{size_words(parameters)} fits nowhere"
    energy = "" if kwh is None else f", {kwh / 1000:,.1f} MWh"
    return f"{size_words(parameters)} {days:,.1f} days{energy}{'' if fits else ' (beyond the budget)'}"
