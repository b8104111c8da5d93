"""`windlass plan`: memory, speed, days, kWh and CO2 before a node-hour is spent; why a layout was taken or not; how good the estimates are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.clusters import Cluster
    from windlass.config import Recipe
    from windlass.planner.explain import Why
    from windlass.planner.search import Plans
    from windlass.planner.task import PlanTask


NARROW = 100
"""Columns of a terminal below which the table leaves out energy and CO2e."""


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe file; with --calibrate a run or sweep folder.", metavar="RECIPE")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: layout.micro_batch=4.", metavar="KEY=VALUE"),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Plan for this machine instead of the recipe's.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes instead of the recipe's.")] = None,
    top: Annotated[
        int | None, typer.Option(help="How many layouts to show; 8 in the table, all in JSON when left out.", min=1)
    ] = None,
    why: Annotated[str | None, typer.Option(help='Explain one layout: "shard=full,micro_batch=8".')] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page: memory anatomy, ranking, scaling curve, energy.")
    ] = None,
    score: Annotated[Path | None, typer.Option(help="Compare predictions with a CSV of measured runs.")] = None,
    rows_out: Annotated[Path | None, typer.Option(help="With --score: write one prediction per row.")] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Fit a machine's constants to the measured runs or sweeps named as arguments."
        ),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Second opinion: run the real step under fake tensors (needs torch).")
    ] = False,
) -> None:
    """Rank the layouts of a recipe on a cluster, each with memory, tokens/s, MFU, days, energy, CO2e and a reason."""
    from windlass.errors import ConfigError

    if rows_out is not None and score is None:
        raise ConfigError(
            "cli.rows-out-needs-score",
            "--rows-out needs --score FILE.csv",
            hint="windlass plan --score FILE.csv --rows-out rows.csv",
        )
    if score is not None:
        _score(score, rows_out, as_json)
        return
    if calibrate:
        _calibrate([word for word in (recipe, *(overrides or ())) if word], cluster, as_json)
        return
    if recipe is None:
        raise ConfigError(
            "cli.recipe",
            "which recipe?",
            hint="windlass plan recipes/gptnl_8b_snellius.toml, or --score FILE.csv, or --calibrate RUN",
        )
    loaded, machine = _load(recipe, overrides or [], cluster)
    if trace:
        _trace(loaded, machine, nodes, as_json)
        return
    _plan(loaded, machine, nodes, top, why, html, as_json)


def _load(recipe: str, overrides: list[str], cluster: str | None) -> tuple[Recipe, Cluster]:
    from windlass.clusters import load_cluster
    from windlass.clusters.here import with_gpus
    from windlass.config import load_recipe

    loaded = load_recipe(Path(recipe), overrides).recipe
    return loaded, with_gpus(load_cluster(cluster or loaded.cluster))[0]


def _plan(
    recipe: Recipe,
    cluster: Cluster,
    nodes: int | None,
    top: int | None,
    why: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    from windlass.cli.output import console, print_json
    from windlass.planner import plan as make
    from windlass.planner.explain import why as explain
    from windlass.planner.record import plans_json, why_json
    from windlass.planner.search import nothing_fits

    found = make(recipe, cluster, nodes=nodes, top=top or (None if as_json else 8))
    answer = None if why is None else explain(found, why)
    if html is not None and found.plans:
        _page(found, recipe, cluster, html)
    if as_json:
        print_json({**plans_json(found), **({"why": why_json(answer, found.task)} if answer else {})})
    elif answer:
        _print_why(found, answer)
    elif found.plans:
        _print(found)
    if html is not None and found.plans and not as_json:
        console().print(f"page: {html}")
    if not found.plans and answer is None:
        raise nothing_fits(found)


def _page(found: Plans, recipe: Recipe, cluster: Cluster, path: Path) -> None:
    from windlass.figures import save_page
    from windlass.planner.page import plan_page
    from windlass.planner.scaling import node_counts, scaling

    counts = node_counts(found.task.nodes, cluster.nodes)
    save_page(path, plan_page(found, scaling(recipe, cluster, counts), scaling(recipe, cluster, counts, weak=True)))


def _print(found: Plans) -> None:
    from windlass.cli.output import console, table
    from windlass.planner.page import carbon, days_words
    from windlass.units import GIB, print_joules, print_tokens

    task, best = found.task, found.best
    title = (
        f"{task.recipe.name}: {task.model.params.total / 1e9:.3g}B parameters, {print_tokens(best.tokens)} tokens, "
        f"batch {best.batch_tokens:,} tokens, {task.nodes} x {task.per_node} {task.device.name} ({task.cluster.name})"
    )
    rows = [
        (
            i, p.candidate.describe(micro_batch=False) + (" (recipe)" if p.from_recipe else ""), f"{p.layout.micro_batch} x {p.layout.accumulation} x {p.layout.data:,}",
            f"{p.memory.needed / GIB:.1f}", f"{p.step.tokens_per_second_per_device:,.0f}", "unknown" if p.step.mfu is None else f"{p.step.mfu:.1%}",
            days_words(p), "unknown" if p.energy.kwh is None else print_joules(p.energy.kwh * 3.6e6, 1), carbon(p.energy.tco2e),
        )
        for i, p in enumerate(found.plans, 1)
    ]  # fmt: skip
    columns = ("", "layout", "batch", "GiB", "tokens/s", "MFU", "time", "energy", "CO2e")
    out = console()
    narrow = out.width < NARROW  # then words of a layout would be cut; energy and CO2e of the best stand below
    shown = 7 if narrow else 9
    for r in (r for r in found.rejected if r.from_recipe):
        out.print(
            f"the recipe's own layout ({r.candidate.describe()}) is rejected: {r.reason}",
            style="yellow",
            soft_wrap=True,
        )
    out.print(table(title, columns[:shown], [row[:shown] for row in rows], right=(0, 2, 3, 4, 5, 6, 7, 8)))
    for i, p in enumerate(found.plans, 1):
        out.print(f"{i:>2}. {p.reason}")
    out.print()
    if narrow and best.energy.kwh is not None:
        used = f"{print_joules(best.energy.kwh * 3.6e6, 1)}, {carbon(best.energy.tco2e)} CO2e"
        out.print(f"The best uses {used} (of each layout: in a terminal of {NARROW} columns, or --json).")
    for line in _footnotes(found):
        out.print(line)


def _footnotes(found: Plans) -> list[str]:
    from windlass.planner.page import amount, carbon
    from windlass.planner.record import mfu_words
    from windlass.planner.search import TIE
    from windlass.units import GIB

    task, best = found.task, found.best
    grid = task.grid
    lines = [
        "batch: micro-batch x accumulation x replicas, in sequences. tokens/s and GiB: of one device.",
        f"Ranked by time in steps of {TIE:.0%} (the estimate is no finer), then more replicas, less accumulation, fewer mechanisms.",
    ]
    achievable = (
        ""
        if best.mfu_of_achievable is None
        else f"; the best is {best.mfu_of_achievable:.0%} of the best matrix rate {_rate_words(task)}"
    )
    lines.append(
        f"MFU counts {best.step.mfu_convention} of {mfu_words(task)}{achievable}. GiB: of {task.limit_bytes / GIB:.1f} usable per device."
    )
    units = "" if best.units is None else f", {amount(best.units)} {task.cluster.billing.unit}s"
    market = f"; market-based {carbon(best.energy.market_tco2e)}" if best.energy.market_tco2e is not None else ""
    lines.append(
        f"The best takes {amount(best.node_hours)} node-hours{units}. Energy is at the meter (PUE {best.energy.pue:g}); "
        f"CO2e location-based ({'unknown' if grid.g_per_kwh is None else f'{grid.g_per_kwh:g}'} g/kWh){market}."
    )
    near = next((r for r in found.rejected if not r.from_recipe and r.memory_gib is not None), None)
    closest = f"; the closest miss: {near.candidate.describe()} {near.reason}" if near else ""
    lines.append(
        f"{found.considered:,} layouts considered, {found.fitting:,} fit, {found.search_seconds:.2f} s of CPU{closest}"
    )
    forbidden = list(dict.fromkeys(r.reason for r in found.rejected if not r.from_recipe and r.memory_gib is None))
    lines += [f"ruled out: {reason}" for reason in forbidden[:4]]
    return [*lines, *(f"note: {text}" for text in (*task.warnings, *_here(task)))]


def _rate_words(task: PlanTask) -> str:
    source = task.device.sources.get("matmul_tflops") or task.device.sources.get("*")
    own = source is None or source.status in ("documented", "measured")
    return "measured on such a device" if own else "measured on a device of its kind"


def _here(task: PlanTask) -> list[str]:
    """Planning for "this machine": its file is a guess, so say what is really here."""
    import os

    from windlass.clusters import load_cluster
    from windlass.clusters.here import with_gpus

    if task.cluster.name == "workstation" and (said := with_gpus(load_cluster("workstation"))[1]):
        return [said]
    cores = os.cpu_count()
    if task.cluster.name != "workstation" or cores == task.cluster.node.cores:
        return []
    return [
        f"this machine has {cores} cores; the workstation file says {task.cluster.node.cores} (copy it to ~/.config/windlass/clusters/ to describe yours)"
    ]


def _print_why(found: Plans, answer: Why) -> None:
    from windlass.cli.output import console, table
    from windlass.units import GIB

    out = console()
    out.print(f"{answer.asked} -> {answer.candidate.describe()}: {answer.verdict}")
    for sentence in answer.sentences:
        out.print(f"  {sentence}")
    if answer.plan is None:
        return
    best = answer.best
    for title, mine, theirs in (
        ("memory per device, GiB", answer.plan.memory_terms, best.memory_terms if best else {}),
        ("one optimizer step, seconds", answer.plan.step.terms, best.step.terms if best else {}),
    ):
        scale = GIB if "GiB" in title else 1.0
        names = list(dict.fromkeys([*mine, *theirs]))
        rows = [(n, _cell(mine, n, scale), _cell(theirs, n, scale)) for n in names]
        rows.append(
            ("in all", f"{sum(mine.values()) / scale:,.3f}", f"{sum(theirs.values()) / scale:,.3f}" if theirs else "")
        )
        out.print(
            table(
                title,
                ("term", answer.candidate.describe(), f"best: {best.candidate.describe()}" if best else "nothing fits"),
                rows,
                right=(1, 2),
            )
        )


def _cell(terms: dict[str, float], name: str, scale: float) -> str:
    return f"{terms[name] / scale:,.3f}" if name in terms else "-"


def _score(path: Path, rows_out: Path | None, as_json: bool) -> None:
    from windlass.cli.output import print_json
    from windlass.planner import score

    result = score.score_rows(_counted(score.iterate_rows(path)))
    if rows_out is not None:
        score.write_rows(result, rows_out)
    if as_json:
        print_json(result.as_dict())
    else:
        _print_score(result.as_dict(), path)


def _counted(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The rows, with their number on the terminal while they pass: a million take minutes."""
    import sys

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} rows predicted"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        yield from bar.track(rows, total=None)


def _print_score(found: dict[str, Any], path: Path) -> None:
    from windlass.cli.output import console, table

    def percent(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.1f} %"

    def row(name: str, part: dict[str, Any]) -> tuple[object, ...]:
        return name, part["rows"], part["covered"], percent(part["median_pct"]), percent(part["p90_pct"])

    out = console()
    every = found["all_readings"]
    rows = [
        row("peak memory", found["memory"]),
        row("throughput", found["throughput"]),
        row("every peak memory", every["memory"]),
        row("every throughput", every["throughput"]),
    ]
    out.print(
        table(
            f"Predictions against {path}",
            ("", "rows", "covered", "median error", "p90 error"),
            rows,
            right=(1, 2, 3, 4),
        )
    )
    fit = found["fit"]
    out.print(
        table(
            "Does it fit?",
            ("published outcome", "rows", "predicted so"),
            [
                ("out of memory", fit["oom_rows"], fit["oom_caught"]),
                ("worked", fit["working_rows"], fit["working_kept"]),
            ],
            right=(1, 2),
        )
    )
    sources = [
        (
            name,
            *(
                v
                for kind in ("memory", "throughput")
                for v in ((part.get(kind) or {}).get("rows", 0), percent((part.get(kind) or {}).get("median_pct")))
            ),
        )
        for name, part in found["by_source"].items()
    ]
    out.print(
        table(
            "By source", ("source", "memory rows", "median", "throughput rows", "median"), sources, right=(1, 2, 3, 4)
        )
    )
    for line in _score_notes(found):
        out.print(line, markup=False)


def _score_notes(found: dict[str, Any], most: int = 8) -> list[str]:
    """What the sets are, what was not predicted and why, and what was taken where a cell is blank: the commonest first."""
    refused, assumed = found["refused"], found["assumed"]
    lines = [
        "peak memory: readings of torch's allocator; throughput: 16 bits on A100, H100, H200 and MI250; both with a fully stated layout.",
        "every: all rows with a value, also driver readings, other devices and precisions, and layouts with blanks.",
    ]
    if refused:
        lines.append(f"not predicted, or without a time ({sum(refused.values()):,} rows):")
        lines += [f"  {count:,} x {reason}" for reason, count in list(refused.items())[:most]]
        lines += [f"  and {len(refused) - most} other reasons (--rows-out FILE)"] if len(refused) > most else []
    if assumed:
        filled = Counter[str]()
        for what, count in assumed.items():
            filled[what if " (not " in what else what.partition("=")[0]] += count
        words = [f"{what} {count:,}" for what, count in filled.most_common()]
        lines.append(f"blank cells filled with a usual value (rows; --rows-out FILE tells which): {', '.join(words)}")
    return lines


def _calibrate(folders: list[str], cluster: str | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.errors import ConfigError

    if not folders:
        raise ConfigError(
            "cli.calibrate-needs-least-one",
            "--calibrate needs at least one run or sweep folder",
            hint="windlass plan --calibrate runs/my-sweep",
        )
    from windlass.planner import calibrate

    result: Any = calibrate.calibrate([Path(f) for f in folders], cluster=cluster)
    if as_json:
        print_json(result.json())
    else:
        console().print(result.text())


def _trace(recipe: Recipe, cluster: Cluster, nodes: int | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.errors import PlanError

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise PlanError(
            "cli.trace-runs-real-training",
            "--trace runs the real training step and needs PyTorch, which is not installed",
            hint="pip install 'windlass[train]'; the plan itself needs no torch",
        ) from None
    try:
        run: Any = import_module("windlass.train.trace").trace
    except ModuleNotFoundError:
        raise PlanError(
            "cli.trace-part-installation-windlass",
            "--trace is not part of this installation (windlass.train.trace is missing)",
            hint="install windlass with its training engine",
        ) from None
    from windlass.planner import fill_recipe

    reason = None
    if recipe.layout is None:
        recipe, reason = fill_recipe(recipe, cluster, nodes=nodes)
    result: Any = run(recipe, cluster, nodes=nodes)
    if as_json:
        print_json(result.json())
        return
    if reason:
        console().print(f"layout: {reason}")
    console().print(result.text())
