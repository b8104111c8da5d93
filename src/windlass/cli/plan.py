"""`windlass plan`: memory, speed, duration, energy and CO2e of a recipe's layouts, before a node-hour is spent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from windlass.cli.options import AdjustOption, EngineProfileOption, JsonOption
from windlass.cli.output import show, table, text_of, working
from windlass.errors import ConfigError
from windlass.units import (
    GIB,
    print_bytes,
    print_figure,
    print_kwh,
    print_node_hours,
    print_rate,
    print_share,
    print_tokens,
)

if TYPE_CHECKING:
    from windlass.planner.changes import RecipeChange
    from windlass.planner.explain import LayoutExplanation
    from windlass.planner.search import Plans


def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe file (with --calibrate: a run or sweep folder).", metavar="RECIPE")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe keys to change: layout.micro_batch=4.", metavar="KEY=VALUE")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Plan for this cluster instead of the recipe's.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes instead of the recipe's.")] = None,
    top: Annotated[
        int | None, typer.Option(help="Number of layouts to show (default: 8 in the table, all in JSON).", min=1)
    ] = None,
    adjust: AdjustOption = False,
    why: Annotated[str | None, typer.Option(help='Explain one layout: "shard=full,micro_batch=8".')] = None,
    engine_profile: EngineProfileOption = None,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page: memory, ranking, step time, scaling, energy.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Fit the cluster's constants to the measured runs or sweeps given as arguments."
        ),
    ] = False,
) -> None:
    """Rank the layouts of a recipe on a cluster by memory, tokens/s, MFU, duration, energy and CO2e, with reasons."""
    from windlass.clusters import load_cluster
    from windlass.clusters.here import with_gpus
    from windlass.config import load_recipe
    from windlass.figures import save_page
    from windlass.planner import calibrate as calibration
    from windlass.planner import changes, explain, page, record, scaling, search

    if calibrate:
        folders = [Path(path) for path in (recipe, *(overrides or ())) if path]
        if not folders:
            raise ConfigError(
                "cli.argument-missing",
                "--calibrate needs at least one run or sweep folder",
                hint="windlass plan --calibrate runs/my-sweep",
            )
        with working("fitting the constants", quiet=as_json):
            result = calibration.calibrate(folders, cluster=cluster)
        show(as_json, result.json(), result.text())
        return
    if recipe is None:
        raise ConfigError(
            "cli.argument-missing",
            "missing argument: RECIPE",
            hint="windlass plan recipes/gptnl_8b_snellius.toml, or windlass plan --calibrate RUN",
        )
    loaded = load_recipe(Path(recipe), overrides or []).recipe
    used_cluster = with_gpus(load_cluster(cluster or loaded.cluster))[0]
    loaded, adjusted = changes.adjust_batch(loaded, used_cluster, nodes) if adjust else (loaded, None)
    with working(f"searching layouts of {loaded.name} on {used_cluster.name}", quiet=as_json):
        plans = search.plan(
            loaded, used_cluster, nodes=nodes, top=top or (None if as_json else 8), engine_profile=engine_profile
        )
    explanation = None if why is None else explain.explain_layout(plans, why)
    with working("pricing small changes of the recipe", quiet=as_json):
        other = [] if explanation else changes.small_changes(plans) if plans.plans else changes.ways_to_fit(plans)
    if html is not None and plans.plans:
        with working("planning other numbers of nodes for the page", quiet=as_json):
            counts = scaling.node_counts(plans.task.nodes, used_cluster.nodes)
            strong, weak = (scaling.scaling(loaded, used_cluster, counts, weak=is_weak) for is_weak in (False, True))
            save_page(html, page.plan_page(plans, strong, weak, other))
    document = {**record.plans_json(plans, other), "adjusted": adjusted}
    if explanation:
        document["why"] = record.explanation_json(explanation, plans.task)
    parts = _explanation_parts(explanation) if explanation else _plan_parts(plans, other) if plans.plans else []
    if adjusted is not None:
        parts.insert(0, f"adjusted: {adjusted}")
    if plans.plans or explanation or as_json:
        show(as_json, document, *parts, f"page: {html}" if html is not None and plans.plans else None)
    if not plans.plans and explanation is None:
        raise changes.nothing_fits(plans, other)


def _plan_parts(plans: Plans, gains: list[RecipeChange]) -> list[Any]:
    """The recommended change, the ranked layouts, the reason for each rank, what small changes would gain, and the
    footnotes."""
    from windlass.planner.changes import recommended
    from windlass.planner.page import carbon, mfu_text, training_time

    task, best = plans.task, plans.best
    rejected = [
        Text(f"The recipe's own layout ({r.candidate.describe()}) is rejected: {r.reason}", style="yellow")
        for r in plans.rejected
        if r.from_recipe
    ]
    rows = [
        (
            p.rank,
            p.candidate.describe(micro_batch=False) + (" (recipe)" if p.from_recipe else ""),
            f"{p.layout.micro_batch} x {p.layout.accumulation} x {p.layout.data:,}",
            print_bytes(p.memory.needed),
            print_rate(p.step.tokens_per_second_per_device, unit=""),
            mfu_text(p),
            training_time(p),
            print_kwh(p.energy.kwh),
            carbon(p.energy.tco2e),
        )
        for p in plans.plans
    ]
    columns = ("", "layout", "batch", "memory", "tokens/s", "MFU", "time", "energy", "CO2e")
    params = task.model.params
    active = (
        "" if task.recipe.model.experts is None else f" ({print_tokens(params.active)} active, without the embedding)"
    )
    smallest = f"{min(task.size.smaller) * task.seq_len:,} to " if task.size.smaller else ""
    title = (
        f"{task.recipe.name}: {print_tokens(params.total)} parameters{active}, {print_tokens(best.tokens)} tokens, "
        f"batch {smallest}{best.batch_tokens:,} tokens, {task.nodes} x {task.per_node} {task.device.name} ({task.cluster.name})"
    )
    ranking = table(title, columns, rows, right=(0, 2, 3, 4, 5, 6, 7, 8), drop=("CO2e", "energy", "batch"))
    reasons = [f"{p.rank:>2}. {p.reason}" for p in plans.plans]
    first = recommended(gains)
    advice = [] if first is None else [Text(first.advise(best.batch_tokens), style="bold yellow")]
    small = [Text(f"A small change gains: {c.describe()}", style="yellow") for c in gains if c is not first]
    return [*rejected, *advice, ranking, *reasons, "", *small, *_footnotes(plans)]


def _footnotes(plans: Plans) -> list[str]:
    """Conventions, cost of the first, what was searched, and every warning."""
    from windlass.clusters import load_cluster
    from windlass.clusters.here import with_gpus
    from windlass.planner import record, search
    from windlass.planner.page import carbon, outside_measured

    task, best, grid = plans.task, plans.best, plans.task.grid
    achievable = ""
    if best.mfu_of_achievable is not None:
        source = task.device.sources.get("matmul_tflops") or task.device.sources.get("*")
        same_device = source is None or source.status in ("documented", "measured")
        achievable = (
            f"; the first is {print_share(best.mfu_of_achievable, digits=0)} of the best matrix rate measured on "
            f"{'such a device' if same_device else 'a device of its kind'}"
        )
    unit = task.cluster.billing.unit
    units = "" if best.units is None or unit in ("hour", "node-hour") else f", {print_figure(best.units)} {unit}s"
    kwh = best.energy.kwh
    used = "" if kwh is None else f", {print_kwh(kwh)} and {carbon(best.energy.tco2e)} CO2e"
    market = "" if best.energy.market_tco2e is None else f"; market-based {carbon(best.energy.market_tco2e)}"
    near = next((r for r in plans.rejected if not r.from_recipe and r.memory_gib is not None), None)
    nearest = "" if near is None else f"; nearest that does not fit: {near.candidate.describe()}, {near.reason}"
    lines = [
        "batch: micro-batch x accumulation x replicas, in sequences; memory and tokens/s are per device.",
        search.RANKING,
        f"MFU counts {best.step.mfu_convention} FLOPs as a share of {record.mfu_denominator(task)}{achievable}. "
        f"{print_bytes(task.limit_bytes)} are usable per device.",
        f"The first takes {print_node_hours(best.node_hours)}{units}{used}. "
        f"Energy includes facility overhead (PUE {best.energy.pue:g}); "
        f"CO2e is location-based ({text_of(grid.g_per_kwh, 'g')} g/kWh){market}.",
        f"{plans.considered:,} layouts considered, {plans.fitting:,} fit, {plans.search_seconds:.2f} s of CPU{nearest}",
    ]
    rules = dict.fromkeys(r.reason for r in plans.rejected if not r.from_recipe and r.memory_gib is None)
    notes = list(task.warnings)
    if task.cluster.name == "workstation":  # its file is a guess, so say what this machine has
        gpu_note = with_gpus(load_cluster("workstation"))[1]
        if gpu_note:
            notes.append(gpu_note)
        elif os.cpu_count() != task.cluster.node.cores:
            notes.append(
                f"this machine has {os.cpu_count()} cores, the workstation file has {task.cluster.node.cores} "
                "(copy it to ~/.config/windlass/clusters/ to describe yours)"
            )
    lines += [f"* {text}" for text in outside_measured(plans)]
    return [*lines, *(f"ruled out: {rule}" for rule in list(rules)[:4]), *(f"note: {text}" for text in notes)]


def _explanation_parts(explanation: LayoutExplanation) -> list[Any]:
    plan, best = explanation.plan, explanation.best
    verdict = "not valid" if explanation.verdict == "illegal" else explanation.verdict
    parts: list[Any] = [f"{explanation.asked} -> {explanation.candidate.describe()}: {verdict}"]
    parts += [f"  {sentence}" for sentence in explanation.sentences]
    if plan is None:
        return parts
    first_title = f"first: {best.candidate.describe()}" if best else "nothing fits"
    for title, scale, own, others in (
        ("memory per device, GiB", GIB, plan.memory_terms, best.memory_terms if best else {}),
        ("one optimizer step, seconds", 1.0, plan.step.terms, best.step.terms if best else {}),
    ):
        totals = ("total", sum(own.values()), sum(others.values()) if others else None)
        terms = [*((name, own.get(name), others.get(name)) for name in dict.fromkeys([*own, *others])), totals]
        rows = [(name, *("-" if v is None else f"{v / scale:,.3f}" for v in values)) for name, *values in terms]
        parts.append(table(title, ("term", explanation.candidate.describe(), first_title), rows, right=(1, 2)))
    return parts
