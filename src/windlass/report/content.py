"""What stands in a report? One list of sections; HTML and Markdown are two ways to write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windlass.energy.carbon import print_carbon
from windlass.energy.ledger import SourceTotal
from windlass.energy.measure import SCOPES
from windlass.errors import WindlassError
from windlass.figures import Card, Cards, Chart, DataTable, Html, Item, Mark, Note, Section, Series, bars, line, points
from windlass.profile.view import run_sections
from windlass.report.card import content_summary, data_section, model_card, store_name
from windlass.report.collect import RunSummary, figure
from windlass.report.columns import Columns, axis, step_of, thin
from windlass.report.evaluations import evaluation
from windlass.report.redact import redact, redact_text
from windlass.report.words import (
    CHECKPOINT_COLUMNS,
    PLAN_COLUMNS,
    SEGMENT_COLUMNS,
    SOURCE_COLUMNS,
    checkpoint_rows,
    energy_card,
    energy_rows,
    event_text,
    goodput,
    kwh,
    life_rows,
    missing_rows,
    number,
    percent,
    plan_rows,
    rate,
    segment_rows,
    source_rows,
    state,
    watts,
    when,
)  # fmt: skip
from windlass.runs.folder import Run
from windlass.units import WATT_HOURS_FROM, print_bytes, print_seconds, print_tokens

CURVES: tuple[tuple[str, str, str, bool], ...] = (
    ("loss", "Loss", "nats per token", False),
    ("tokens_per_second", "Throughput", "tokens/s", True),
    ("mfu", "Model FLOP utilisation", "share of peak", True),
    ("watts", "Power", "W", True),
    ("memory_bytes", "Memory, highest device", "GiB", True),
    ("grad_norm", "Gradient norm", "", False),
)
MOST_EVENTS = 200


def sections(summary: RunSummary, columns: Columns) -> list[Section]:
    """The report of one run, in the order a reader asks."""
    return [
        Section("", (*_two_rows(cards(summary)), *_warnings(summary)), id="top"),
        what(summary),
        Section("Training", tuple(curves(summary, columns)), id="training"),
        life(summary, columns),
        energy(summary),
        *plan_sections(summary),
        evaluation(summary),
        saves(summary),
        *profile_sections(summary),
        data_section(summary),
        environment(summary),
        model_card(summary),
        content_summary(summary),
        conventions(),
    ]


def profile_sections(summary: RunSummary) -> list[Section]:
    """Where a step's time went, when the run was profiled; a trace that cannot be read costs the section, not the report."""
    try:
        return run_sections(Run(Path(summary.path)))
    except WindlassError as error:
        return [Section("Profile", (Note(f"The trace cannot be read: {error.message}", "warning"),), id="profile")]


def cards(s: RunSummary) -> Cards:
    used, how = energy_card(s.energy)
    kg = None if s.energy.carbon is None else s.energy.carbon.location_kg
    interruptions = sum(e["event"] == "resumed" for e in s.events)
    done = f"of {print_tokens(s.target_tokens)}" if s.target_tokens else ""
    return Cards((
        Card(state(s), "state", when(s.updated_at)),
        Card(print_tokens(s.tokens), "tokens", done),
        Card(number(s.loss), "training loss", "median of the last 10 lines"),
        Card(rate(s.tokens_per_second), "throughput", "median of the last 200 lines"),
        Card(percent(s.mfu), "MFU", "of the dense bf16 peak" if s.mfu is not None else "no peak is known for this device"),
        Card(used, "energy", how),
        Card(print_carbon(kg), "CO2e, location-based", _carbon_note(s)),
        Card(percent(goodput(s), "not known"), "goodput", f"{interruptions} resume" + ("" if interruptions == 1 else "s")),
    ))  # fmt: skip


def _carbon_note(s: RunSummary) -> str:
    c = s.energy.carbon
    if c is None:
        return "energy was not measured"
    if c.grid.value is None:
        return "the grid's intensity is not known"
    return f"{s.energy.basis}; {c.grid.value:g} g/kWh"


def _two_rows(item: Cards) -> tuple[Cards, Cards]:
    half = (len(item.cards) + 1) // 2
    return Cards(item.cards[:half]), Cards(item.cards[half:])


def _warnings(s: RunSummary) -> list[Item]:
    found: list[Item] = []
    if s.problem:
        found.append(Note(f"This folder is not whole: {redact_text(s.problem)}", "warning"))
    if s.energy.basis == "modelled":
        found.append(Note("Energy is modelled, not measured: no sensor could be read on any node.", "warning"))
    elif "not measured on" in s.energy.ledger.coverage:
        found.append(Note(f"Energy: {s.energy.ledger.coverage}.", "warning"))
    return found


def layout_text(layout: dict[str, Any] | None) -> str:
    """What differs from one device holding everything; keys of a pipeline only where there is one."""
    if not layout:
        return "unknown"
    quiet = {"schedule", "pipeline_chunks"} if layout.get("pipeline") in (None, 1) else set()
    return ", ".join(f"{k} {v}" for k, v in layout.items() if k not in quiet and v not in (None, 1, "none", "auto"))


def counted(number: int | None, word: str) -> str:
    """`1 node`, `2 nodes`, `? nodes`."""
    return f"{'?' if number is None else number} {word}" + ("" if number == 1 else "s")


def what(s: RunSummary) -> Section:
    data = s.recipe.get("data", {})
    rows = [
        ("run", s.name),
        ("model", s.model),
        ("parameters", "unknown" if s.parameters is None else f"{s.parameters:,}"),
        (
            "data",
            f"{'token store ' + store_name(str(data['store'])) if data.get('store') else 'synthetic tokens'}, sequences of {data.get('seq_len', '?')}, batch {print_tokens(data.get('batch_tokens'))} tokens",
        ),
        (
            "cluster",
            f"{s.cluster}, {counted(s.nodes, 'node')}, {counted(s.world_size, 'device')} ({s.device or 'unknown device'})",
        ),
        ("layout", layout_text(s.layout) or "one device holds everything"),
        ("from, to", f"{when(s.started_at)}, {when(s.updated_at)}"),
        ("step", "none yet" if s.step is None else f"{s.step:,}"),
        ("step time", print_seconds(s.step_seconds)),
        ("memory, highest device", print_bytes(s.memory_bytes)),
        (
            "slowest rank",
            "unknown"
            if s.slowest_rank is None
            else f"{s.slowest_rank}, {print_seconds(s.spread_seconds)} behind the fastest",
        ),
    ]
    return Section("What was trained", (DataTable(("", ""), [(k, redact_text(str(v))) for k, v in rows]),), id="what")


def curves(s: RunSummary, columns: Columns) -> list[Item]:
    if not len(columns):
        return [Note("metrics.jsonl holds no line yet.")]
    marks = tuple(marks_by_step(s.events, columns))
    known = set(columns.names())
    made: list[Item] = []
    for key, title, unit, from_zero in CURVES:
        if key in known:
            loss = key == "loss"
            seen = validations(s, columns) if loss else ()
            made.append(
                curve(columns, key, title, unit, from_zero=from_zero, marks=marks if loss else (), validation=seen)
            )
    made.append(
        Note(
            "A line that starts again further left is a repeated part: after a resume the steps since the checkpoint are done once more."
        )
    )
    return made


def validations(s: RunSummary, columns: Columns) -> tuple[tuple[float, float], ...]:
    """(step, loss) of the validation passes, from their events, else from the metrics lines that follow them."""
    found = [(e.get("step"), e.get("val_loss")) for e in s.events if e["event"] == "evaluated"]
    if not found:
        found = list(zip(*thin(axis(columns, "step"), columns.get("val_loss")), strict=True))
    return tuple((float(x), float(y)) for x, y in found if isinstance(x, (int, float)) and isinstance(y, (int, float)))


def curve(
    columns: Columns,
    key: str,
    title: str,
    unit: str,
    *,
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
    validation: Sequence[tuple[float, float]] = (),
) -> Chart:
    scale = 2**30 if key == "memory_bytes" else 1
    xs, ys = thin(axis(columns, "step"), columns.get(key) / scale)
    series: list[Series] = [line("train" if key == "loss" else title, _xs(xs), ys)]
    if validation:
        series.append(points("validation", [x for x, _ in validation], [y for _, y in validation]))
    return Chart(
        title=title,
        series=tuple(series),
        x_title="step",
        y_title=unit,
        from_zero=from_zero,
        marks=tuple(marks),
        height=360,
    )


def _xs(values: Sequence[float | None]) -> list[float]:
    return [0.0 if v is None else v for v in values]


MARKS = {"fault": "fault", "hang": "hang", "stopped": "stopped", "resumed": "resumed", "rollback": "rolled back"}
MOST_MARKS = 12


def marks_by_step(events: Sequence[dict[str, Any]], columns: Columns) -> list[Mark]:
    """Interruptions and resumes on the step axis."""
    found = [(step_of(e, columns), MARKS[e["event"]]) for e in events if e["event"] in MARKS]
    steps = columns.get("step")
    span = float(np.nanmax(steps) - np.nanmin(steps)) if len(steps) else 0.0
    return _apart([(at, label) for at, label in found if at is not None], span)


def _apart(found: Sequence[tuple[float, str]], span: float) -> list[Mark]:
    """Marks whose labels do not run into each other: the second of two close ones goes without."""
    made: list[Mark] = []
    labelled = -1e30
    for at, label in sorted(found)[:MOST_MARKS]:
        clear = at - labelled > 0.08 * span
        made.append(Mark(axis="x", at=at, label=label if clear else ""))
        labelled = at if clear else labelled
    return made


def progress(s: RunSummary, columns: Columns) -> Chart | None:
    """Steps over time: an interruption is a gap, a resume a step back."""
    times = columns.get("time")
    if len(times) < 2 or s.started_at is None:
        return None
    unit, name = (60.0, "minutes") if np.nanmax(times) - s.started_at < 7200 else (3600.0, "hours")
    xs, ys = thin((times - s.started_at) / unit, columns.get("step"))
    broken_x, broken_y = _gaps(_xs(xs), ys)
    places = [
        ((e["time"] - s.started_at) / unit, MARKS[e["event"]])
        for e in s.events
        if e["event"] in MARKS and e["time"] is not None
    ]
    marks = _apart(places, float(np.nanmax(times) - s.started_at) / unit)
    return Chart(
        title="Steps over time", series=(line("step", broken_x, broken_y),), x_title=f"{name} since the start", y_title="step", marks=tuple(marks), height=320,
        caption="A gap is time without a step; a step back is work that a fault took and that was done again.",
    )  # fmt: skip


def _gaps(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """Lift the pen where the step goes back."""
    out_x: list[float] = []
    out_y: list[float | None] = []
    before: float | None = None
    for x, y in zip(xs, ys, strict=True):
        if y is not None and before is not None and y < before:
            out_x.append(x)
            out_y.append(None)
        out_x.append(x)
        out_y.append(y)
        before = y if y is not None else before
    return out_x, out_y


def life(s: RunSummary, columns: Columns | None = None) -> Section:
    items: list[Item] = []
    rows = life_rows(s)
    if rows:
        items.append(DataTable(("", ""), rows))
        items.append(
            DataTable(
                SEGMENT_COLUMNS,
                segment_rows(s),
                right=(2, 4, 5, 6, 7),
                caption="Each part is one group of processes; an interruption ends one, a resume begins the next.",
            )
        )
    shown = [e for e in s.events if e["event"] not in ("removed", "interval")][-MOST_EVENTS:]
    begin = s.started_at or 0.0
    strong = [
        i
        for i, e in enumerate(shown)
        if e["event"] in ("fault", "hang", "signal", "stopped", "resumed", "restarted", "rollback", "gave_up")
    ]
    table = [
        (
            print_seconds(e["time"] - begin) if e["time"] is not None else "?",
            when(e["time"]),
            redact_text(event_text(e)),
        )
        for e in shown
    ]
    if table:
        items.append(DataTable(("after", "at", "what happened"), table, strong=strong))
    chart = progress(s, columns) if columns is not None else None
    if chart is not None:
        items.insert(0, chart)
    if not items:
        items.append(Note("events.jsonl holds nothing."))
    return Section("Life of the run: interruptions, resumes, saves", tuple(items), id="life")


def energy(s: RunSummary) -> Section:
    items: list[Item] = []
    rows = source_rows(s.energy)
    if rows:
        items.append(
            DataTable(SOURCE_COLUMNS, rows, right=(3, 4), strong=[i for i, r in enumerate(rows) if r[5] == "yes"])
        )
        items.append(_energy_chart(s))
    items.append(DataTable(("", "", "how we know"), energy_rows(s)))
    missing = missing_rows(s.energy)
    if missing:
        items.append(
            DataTable(("not read", "why"), [(a, redact_text(b)) for a, b in missing], caption="On at least one node.")
        )
    return Section("Energy and carbon", tuple(items), id="energy")


ENERGY_UNITS = ((3.6e9, 3.6e9, "MWh"), (3.6e6, 3.6e6, "kWh"), (WATT_HOURS_FROM, 3.6e3, "Wh"), (0.0, 1.0, "J"))
"""(least joules, joules of one, unit), as the table beside the chart writes them."""
ENERGY_KINDS = (("in the total", 0), ("inside another", 7), ("modelled, not in the total", 1))


def _energy_chart(s: RunSummary) -> Chart:
    """A colour for what is added up, what lies inside it, and what is only a model."""
    found = sorted(s.energy.ledger.sources, key=lambda x: SCOPES.index(x.scope) if x.scope in SCOPES else 9)
    largest = max(x.joules for x in found)
    _, scale, unit = next(u for u in ENERGY_UNITS if largest >= u[0])
    kind = [
        "modelled, not in the total" if x.method == "modelled" else "in the total" if x.counted else "inside another"
        for x in found
    ]
    series = [
        bars(name, [_bar_label(x) for x, k in zip(found, kind, strict=True) if k == name],
             [x.joules / scale for x, k in zip(found, kind, strict=True) if k == name], colour=colour)
        for name, colour in ENERGY_KINDS if name in kind
    ]  # fmt: skip
    return Chart(
        title="Energy by source", horizontal=True, stacked=True, y_title=unit, height=130 + 44 * len(found), series=tuple(series),
        caption="Sources that lie inside another one are shown, not added.",
    )  # fmt: skip


def _bar_label(source: SourceTotal) -> str:
    nodes = f", {counted(source.nodes, 'node')}" if source.nodes > 1 else ""
    return f"{source.source} {source.scope}{nodes}"


def plan_sections(s: RunSummary) -> list[Section]:
    rows = plan_rows(s.plan_rows)
    return (
        [Section("Plan against measured", (DataTable(PLAN_COLUMNS, rows, right=(1, 2, 3)),), id="plan")] if rows else []
    )


def saves(s: RunSummary) -> Section:
    rows = checkpoint_rows(s)
    item: Item = (
        DataTable(CHECKPOINT_COLUMNS, rows, right=(0, 1, 2, 3, 4)) if rows else Note("No checkpoint was saved.")
    )
    return Section("Checkpoints", (item,), id="checkpoints")


def environment(s: RunSummary) -> Section:
    plain = {
        k: v
        for k, v in s.manifest.items()
        if k not in ("earlier", "data", "packages") and not isinstance(v, (dict, list))
    }
    written: dict[str, Callable[[Any], str]] = {"started_at": when, "memory_bytes": print_bytes}
    rows = [(k, redact_text(str(v) if figure(v) is None else written.get(k, str)(v))) for k, v in redact(plain).items()]
    packages = s.manifest.get("packages")
    if isinstance(packages, dict):
        rows.append(("packages", ", ".join(f"{k} {v}" for k, v in packages.items())))
    starts = s.manifest.get("earlier")
    if isinstance(starts, list) and starts:
        rows.append(("earlier starts", str(len(starts))))
    from html import escape

    recipe = f"<details><summary>Recipe</summary><pre>{escape(json.dumps(redact(s.recipe), indent=2))}</pre></details>"
    return Section("Environment", (DataTable(("", ""), rows), Html(recipe)), id="environment")


def conventions() -> Section:
    return Section("Conventions", (DataTable(("term", "meaning"), (
        ("MFU", "model FLOPs per second / dense bf16 peak; 6 x parameters without the input embedding + 12 x layers x width x sequence per token; recomputation not counted (HFU counts it)"),
        ("throughput", "tokens of the whole job per second of the step; start-up, saving and lost time are in goodput, not here"),
        ("goodput", "time of steps that count / wall time of the run"),
        ("IT energy", "what the sensors of the nodes counted; nested sources are never added; switches, storage and cooling are not in it"),
        ("PUE", "energy of the building / energy of its computers, a yearly mean of the site"),
        ("location-based", "energy with PUE x the country's mean grid intensity"),
        ("market-based", "energy with PUE x the intensity of the site's contract"),
        ("modelled", "from data-sheet power; never part of a measured figure"),
    ), unbroken=(0,)),), id="conventions")  # fmt: skip


def _without_copies(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """A folder and its copy are one run, known by name and the moment it began: of two, the one that went on longer."""
    found: dict[object, RunSummary] = {}
    for index, s in enumerate(summaries):
        key: object = index if s.started_at is None else (s.name, s.started_at)
        other = found.get(key)
        if other is None or (s.step or 0) > (other.step or 0):
            found[key] = s
    return list(found.values())


def together(summaries: Sequence[RunSummary]) -> dict[str, float | int | None]:
    """The sums of several runs, copies left out; a sum of which one part is unknown is unknown."""
    once = _without_copies(summaries)
    measured = [c for s in once if s.energy.basis == "measured" and (c := s.energy.carbon) is not None]

    def total(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return sum(known) if known and len(known) == len(values) else None

    return {
        "runs": len(once), "copies": len(summaries) - len(once), "tokens": sum(s.tokens for s in once if s.tokens is not None), "runs_measured": len(measured),
        "it_kwh": total([c.it_kwh for c in measured]), "kwh": total([c.kwh for c in measured]), "location_kg": total([c.location_kg for c in measured]),
    }  # fmt: skip


def _together_text(sums: dict[str, float | int | None]) -> str:
    said = [f"Tokens together: {print_tokens(sums['tokens'])}."]
    if sums["runs_measured"]:
        more = [f"{kwh(sums['kwh'])} with PUE"] if sums["kwh"] is not None else []
        more += [f"{print_carbon(sums['location_kg'])} location-based"] if sums["location_kg"] is not None else []
        energy_text = ", ".join([kwh(sums["it_kwh"]), *more])
        said.insert(0, f"Measured IT energy of {sums['runs_measured']} of {sums['runs']} runs together: {energy_text}.")
    else:
        said.insert(0, "No run has measured energy.")
    if sums["copies"]:
        said.append(f"Copies of a run are not added again: {counted(int(sums['copies']), 'folder')}.")
    return " ".join(said)


def joined(summaries: Sequence[RunSummary], labels: Sequence[str]) -> list[Section]:
    """Several runs (a chain, a sweep) beside each other, before their own reports; `labels` tell them apart."""
    columns = ("run", "state", "tokens", "loss", "tokens/s", "MFU", "memory", "energy", "CO2", "power")
    rows = [
        (label, state(s), print_tokens(s.tokens), number(s.loss), rate(s.tokens_per_second), percent(s.mfu), print_bytes(s.memory_bytes),
         energy_card(s.energy)[0] + (" (modelled)" if s.energy.basis == "modelled" else ""),
         print_carbon(s.energy.carbon.location_kg if s.energy.carbon else None), watts(s.energy.mean_watts))
        for s, label in zip(summaries, labels, strict=True)
    ]  # fmt: skip
    return [
        Section(
            counted(len(summaries), "run"),
            (
                DataTable(columns, rows, right=tuple(range(2, 10))),
                Note(_together_text(together(summaries))),
            ),
            id="all",
        )
    ]
