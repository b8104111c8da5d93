"""The sections of a report, in reading order; HTML, Markdown and the dashboard render the same list."""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from windlass.config.secret import redact_text
from windlass.energy.carbon import print_carbon
from windlass.energy.measure import SCOPES, sum_or_unknown
from windlass.energy.totals import print_energy
from windlass.errors import WindlassError
from windlass.figures import Card, Cards, Chart, DataTable, Heat, Html, Item, Mark, Note, Section, bars, line, points
from windlass.profile.view import run_sections
from windlass.report.collect import HIDDEN_EVENTS, RunSummary
from windlass.report.columns import Columns, step_of, superseded, thin
from windlass.report.funder import funder_items, joint_items
from windlass.report.model_card import content_summary, data_section, model_card, store_name
from windlass.report.redact import redact
from windlass.report.tables import (
    checkpoint_table,
    energy_rows,
    figure,
    life_rows,
    number,
    period,
    plan_table,
    segment_table,
    source_table,
    state,
    when,
)
from windlass.runs.events import Evaluated, ExpertLoads, LayersMeasured, Resumed, known_float
from windlass.runs.folder import Run
from windlass.units import (
    WATT_HOURS_FROM,
    counted,
    print_bytes,
    print_kwh,
    print_seconds,
    print_tokens,
)

# (key, title, unit, whether the axis begins at 0, divisor)
CURVES = (
    ("loss", "Loss", "nats per token", False, 1),
    ("tokens_per_second", "Throughput", "tokens/s", True, 1),
    ("mfu", "Model FLOP utilisation", "share of peak", True, 1),
    ("watts", "Power", "W", True, 1),
    ("memory_bytes", "Memory, highest device", "GiB", True, 2**30),
    ("grad_norm", "Gradient norm", "", False, 1),
    ("expert_imbalance", "Most used expert", "load / mean of its layer", True, 1),
    ("router_entropy", "Entropy of the routers", "nats", True, 1),
)
MAX_EVENTS = 200
MARKS = {"fault": "fault", "hang": "hang", "stopped": "stopped", "resumed": "resumed", "rollback": "rolled back"}
MAX_MARKS = 12
INSTRUMENTS = (
    ("gradient_norm", "Gradient norm"), ("weight_norm", "Weight norm"), ("update_norm", "Update norm"),
    ("activation_rms", "Scale of the output"), ("max_logit", "Largest attention logit"),
)  # fmt: skip
MAX_LOOKS = 500
STRONG_EVENTS = ("fault", "hang", "signal", "stopped", "resumed", "restarted", "rollback", "gave_up")


def sections(s: RunSummary, columns: Columns) -> list[Section]:
    key_numbers, coverage = cards(s).cards, s.energy.ledger.coverage
    half = (len(key_numbers) + 1) // 2
    energy_warning = f"Energy: {coverage}." if "not measured on" in coverage else ""
    if s.energy.basis == "modelled":
        energy_warning = "Energy is modelled, not measured: no sensor could be read on any node."
    warnings = (f"This folder is incomplete: {redact_text(s.problem)}" if s.problem else "", energy_warning)
    try:
        profiled = run_sections(Run(Path(s.path)))
    except WindlassError as error:  # a trace that cannot be read costs its section, not the report
        profiled = [Section("Profile", (Note(f"The trace cannot be read: {error.message}", "warning"),), id="profile")]
    notes = (Note(text, "warning") for text in warnings if text)
    return [
        Section(
            "",
            (Cards(key_numbers[:half]), Cards(key_numbers[half:]), *notes, *funder_items(s)),
            id="top",
            is_page=True,
        ),
        overview(s),
        Section("Training", tuple(curves(s, columns)), id="training"),
        life(s, columns),
        energy(s),
        *stability_sections(s),
        *plan_sections(s),
        evaluation(s),
        saves(s),
        *profiled,
        data_section(s),
        environment(s),
        model_card(s),
        content_summary(s),
        conventions(),
    ]


def cards(s: RunSummary) -> Cards:
    used, basis = print_energy(s.energy)
    carbon_note, c = "energy was not measured", s.energy.carbon
    if c is not None:
        grid = c.grid.value
        carbon_note = "grid intensity unknown" if grid is None else f"{s.energy.basis}; {grid:g} g/kWh"
    resumes = sum(isinstance(e, Resumed) for e in s.events)
    mfu_note = f"of {s.manifest.get('mfu_denominator') or 'the dense bf16 peak'}"
    if s.mfu is None:
        mfu_note = "no step is logged" if s.tokens_per_second is None else "the device's peak is unknown"
    return Cards((
        Card(state(s), "state", when(s.updated_at)),
        Card(figure(s, "tokens"), "tokens", f"of {figure(s, 'planned tokens')}" if s.target_tokens else ""),
        Card(figure(s, "training loss"), "training loss", "median of the last 10 logged steps"),
        Card(figure(s, "throughput"), "throughput", "median of the last 200 logged steps"),
        Card(figure(s, "MFU"), "MFU", mfu_note),
        Card(used, "energy", basis),
        Card(figure(s, "CO2e, location-based"), "CO2e, location-based", carbon_note),
        Card(figure(s, "goodput"), "goodput", counted(resumes, "resume") if s.life else "no start is recorded"),
    ))  # fmt: skip


def layout_text(layout: dict[str, Any] | None) -> str:
    """What differs from one device holding everything; keys of a pipeline only where there is one."""
    if not layout:
        return "unknown"
    hidden = {"schedule", "pipeline_chunks"} if layout.get("pipeline") in (None, 1) else set()
    return ", ".join(f"{k} {v}" for k, v in layout.items() if k not in hidden and v not in (None, 1, "none", "auto"))


def overview(s: RunSummary) -> Section:
    data = s.recipe.get("data", {})
    source = f"token store {store_name(str(data['store']))}" if data.get("store") else "synthetic tokens"
    behind = f"{s.slowest_rank}, {print_seconds(s.spread_seconds)} behind the fastest"
    rows = [
        ("run", s.name),
        ("model", s.model),
        ("parameters", figure(s, "parameters")),
        ("data", f"{source}, sequences of {data.get('seq_len', '?')}, "
         f"batch {print_tokens(data.get('batch_tokens'))} tokens" if data else "unknown"),
        ("cluster", f"{s.cluster}, {counted(s.nodes, 'node')}, {counted(s.world_size, 'device')} "
         f"({s.device or 'unknown device'})" if s.nodes or s.world_size or s.device else s.cluster),
        ("layout", layout_text(s.layout) or "one device holds everything"),
        ("training period", period(s)),
        ("step", "none yet" if s.step is None else figure(s, "step")),
        *((name, figure(s, name)) for name in ("step time", "throughput per device", "memory, highest device")),
        ("slowest rank", "unknown" if s.slowest_rank is None else behind),
    ]  # fmt: skip
    return Section("Overview", (DataTable(("", ""), [(k, redact_text(v)) for k, v in rows]),), id="what")


def curves(s: RunSummary, columns: Columns) -> list[Item]:
    if not len(columns):
        return [Note("No step is logged yet (metrics.jsonl is empty).")]
    steps, names, passes = columns.get("step"), columns.names(), validations(s, columns)
    validation = [points("validation", [x for x, _ in passes], [y for _, y in passes])] if passes else []
    places = [(step_of(e, columns), MARKS[e.event]) for e in s.events if e.event in MARKS]
    marks = _spaced_marks([(at, label) for at, label in places if at is not None], float(np.ptp(steps)))
    is_last = ~superseded(steps)  # the last repetition of repeated steps
    charts = [
        Chart(
            title=title,
            series=[
                line("train" if key == "loss" else title, *thin(steps[is_last], (columns.get(key) / divisor)[is_last])),
                *(validation if key == "loss" else ()),
            ],
            x_title="step",
            y_title=unit,
            from_zero=from_zero,
            marks=marks if key == "loss" else (),
            height=360,
        )
        for key, title, unit, from_zero, divisor in CURVES
        if key in names
    ]
    loads = [e for e in s.events if isinstance(e, ExpertLoads) and e.rows()][-1:]
    return [
        *charts,
        *map(expert_heat, loads),
        Note("Where a resume repeated steps, the curves show the last repetition."),
    ]


def expert_heat(event: ExpertLoads) -> Heat:
    rows = event.rows()
    return Heat(
        title=f"Load of each expert at step {event.step}",
        x=[str(expert) for expert in range(len(next(iter(rows.values()))))],
        y=list(rows),
        values=list(rows.values()),
        x_title="expert",
        y_title="layer",
        unit="% of the layer's mean",
        caption="100 is the mean of a layer. No token is dropped: the fullest expert only takes longer.",
    )


def validations(s: RunSummary, columns: Columns) -> tuple[tuple[float, float], ...]:
    """(step, loss) of the validation passes, from their events, else from the metrics lines that follow them."""
    pairs: list[tuple[float | None, float | None]] = [
        (e.step, e.val_loss) for e in s.events if isinstance(e, Evaluated)
    ]
    if not pairs:
        pairs = list(zip(*thin(columns.get("step"), columns.get("val_loss")), strict=True))
    return tuple((float(x), float(y)) for x, y in pairs if x is not None and y is not None)


def _spaced_marks(places: Sequence[tuple[float, str]], span: float) -> list[Mark]:
    """Marks whose labels do not overlap: the second of two close ones has none."""
    marks: list[Mark] = []
    last_label = -1e30
    for at, label in sorted(places)[:MAX_MARKS]:
        has_room = at - last_label > 0.08 * span
        marks.append(Mark(axis="x", at=at, label=label if has_room else ""))
        last_label = at if has_room else last_label
    return marks


def progress(s: RunSummary, columns: Columns) -> list[Item]:
    """Chart of steps over time: an interruption is a gap, and at a resume the step goes back."""
    times, began = columns.get("time"), s.started_at
    if len(times) < 2 or began is None:
        return []
    span = float(np.nanmax(times)) - min(began, float(np.nanmin(times)))  # a clock may have jumped back
    unit, name = (60.0, "minutes") if span < 7200 else (3600.0, "hours")
    xs, ys = thin((times - began) / unit, columns.get("step"))
    steps = np.array(ys, dtype=np.float64)
    backwards = np.nonzero(np.diff(steps) < 0)[0] + 1  # interrupt the line where the step goes back
    pen_x, pen_y = np.insert(xs, backwards, np.array(xs)[backwards]), np.insert(steps, backwards, np.nan)
    marks = [((e.time - began) / unit, MARKS[e.event]) for e in s.events if e.event in MARKS and e.time is not None]
    return [
        Chart(
            title="Steps over time",
            series=(line("step", pen_x.tolist(), [None if y != y else y for y in pen_y.tolist()]),),
            x_title=f"{name} since the start",
            y_title="step",
            marks=_spaced_marks(marks, span / unit),
            height=320,
            caption="A gap is time without a step. Where the curve goes back, work was lost to a fault and repeated.",
        )
    ]


def life(s: RunSummary, columns: Columns) -> Section:
    items = progress(s, columns)
    if rows := life_rows(s):
        items += [DataTable(("", ""), rows), segment_table(s)]
    shown = [e for e in s.events if e.event not in HIDDEN_EVENTS][-MAX_EVENTS:]
    if shown:
        ages = ["?" if e.time is None else print_seconds(e.time - (s.started_at or 0.0)) for e in shown]
        events = [(age, when(e.time), redact_text(e.describe())) for age, e in zip(ages, shown, strict=True)]
        strong = [i for i, e in enumerate(shown) if e.event in STRONG_EVENTS]
        items.append(DataTable(("after", "time", "event"), events, strong=strong, unbroken=(0, 1)))
    return Section("Run timeline", tuple(items) or (Note("No event is recorded (events.jsonl is empty)."),), id="life")


# (least joules, joules of one unit, unit), as the table beside the chart prints them
ENERGY_UNITS = ((3.6e9, 3.6e9, "MWh"), (3.6e6, 3.6e6, "kWh"), (WATT_HOURS_FROM, 3.6e3, "Wh"), (0.0, 1.0, "J"))
# Kind of an energy source -> colour
ENERGY_KINDS = {"in the total": 0, "inside another": 7, "modelled, not in the total": 1}


def energy(s: RunSummary) -> Section:
    items: list[Item] = []
    if s.energy.ledger.sources:
        sources = sorted(s.energy.ledger.sources, key=lambda x: SCOPES.index(x.scope) if x.scope in SCOPES else 9)
        largest = max(x.joules for x in sources)
        _, scale, unit = next(u for u in ENERGY_UNITS if largest >= u[0])
        rows = [
            (
                "modelled, not in the total"
                if x.method == "modelled"
                else "in the total"
                if x.counted
                else "inside another",
                f"{x.source} {x.scope}" + (f", {counted(x.nodes, 'node')}" if x.nodes > 1 else ""),
                x.joules / scale,
            )
            for x in sources
        ]
        chart = Chart(
            title="Energy by source",
            horizontal=True,
            stacked=True,
            y_title=unit,
            height=130 + 44 * len(sources),
            series=[
                bars(
                    kind,
                    [name for k, name, _ in rows if k == kind],
                    [v for k, _, v in rows if k == kind],
                    colour=colour,
                )
                for kind, colour in ENERGY_KINDS.items()
                if any(k == kind for k, _, _ in rows)
            ],
            caption="A source that is part of another is shown, but not added to the total.",
        )
        items += [source_table(s.energy), chart]
    items.append(DataTable(("quantity", "value", "source or method"), energy_rows(s), unbroken=(1,)))
    if missing := sorted((name, redact_text(reason)) for name, reason in s.energy.ledger.missing.items()):
        items.append(DataTable(("sensor", "why it was not read"), missing, caption="On at least one node."))
    return Section("Energy and carbon", tuple(items), id="energy")


def plan_sections(s: RunSummary) -> list[Section]:
    return [Section("Predicted vs. measured", (plan_table(s.plan_rows),), id="plan")] if s.plan_rows else []


def evaluation(s: RunSummary) -> Section:
    items: list[Item] = []
    if s.val_loss is not None:
        items.append(Note(f"Validation loss {figure(s, 'validation loss')} nats per token."))
    passes = [e for e in s.events if isinstance(e, Evaluated) and e.sources and e.step is not None]
    if passes and len(passes[-1].sources) > 1:  # curves by source, and the last pass as a table
        series = []
        for name in dict.fromkeys(name for e in passes for name in e.sources):
            steps = [e.step or 0 for e in passes if name in e.sources]
            series.append(line(name, steps, [e.sources[name]["loss"] for e in passes if name in e.sources]))
        chart = Chart(title="Validation loss by source", series=series, x_title="step", y_title="nats per token")
        items += [chart] if len(passes) > 1 else []
        last = passes[-1]
        losses = [("all", last.val_loss, last.bits_per_byte)]
        for kind, parts in (("source", last.sources), ("language", last.languages)):
            losses += [
                (f"{kind} {k}", known_float(v["loss"]), known_float(v.get("bits_per_byte"))) for k, v in parts.items()
            ]
        last_rows = [(redact_text(name), number(loss), number(bits)) for name, loss, bits in losses]
        caption = f"Last validation pass, after step {last.step}."
        items.append(DataTable(("text", "loss", "bits per byte"), last_rows, right=(1, 2), caption=caption))
    # One row per task, group and metric: the newest, because a run is evaluated again as it goes on.
    names = ("task", "group", "metric")
    newest = {tuple(str(e.get(key)) for key in names): e for e in s.evaluations}
    rows = []
    for e in newest.values():
        value, low, high, count, step = (known_float(e.get(k)) for k in ("value", "low", "high", "count", "step"))
        interval = "unknown" if low is None else f"{number(low)} to {number(high)}"
        texts = (redact_text(str(e.get(key, "")).replace("_", " ")) for key in names)
        rows.append((*texts, number(value), interval, number(count, 12, ""), number(step, 12, "")))
    if rows:
        columns = (*names, "value", "95 % interval", "items", "step")
        caption = "Written by `windlass eval`; the newest of each."
        items.append(DataTable(columns, rows, right=(3, 4, 5, 6), caption=caption))
    items = items or [Note("No scores are recorded; `windlass eval RUN` adds them.")]
    return Section("Evaluation", tuple(items), id="evaluation")


def stability_sections(s: RunSummary) -> list[Section]:
    """What train.instruments measured: the highest layer and the median of each quantity over the steps, and the last
    measurement."""
    looks = [e for e in s.events if isinstance(e, LayersMeasured) and e.step is not None]
    if not looks:
        return []
    shown = looks[:: -(-len(looks) // MAX_LOOKS)]
    items: list[Item] = []
    for name, title in INSTRUMENTS:
        layers = [(e.step or 0, [v for v in getattr(e, name)[:-1] if v is not None]) for e in shown]
        layers = [(step, values) for step, values in layers if values]
        if layers:
            steps = [step for step, _ in layers]
            series = [
                line("highest layer", steps, [max(values) for _, values in layers]),
                line("median of the layers", steps, [float(np.median(values)) for _, values in layers]),
            ]
            items.append(Chart(title=title, series=series, x_title="step", log_y=name != "max_logit", height=260))
    last = looks[-1]
    names = [name for name, _ in INSTRUMENTS]
    count = max(len(getattr(last, name)) for name in names)
    rows = []
    for row in range(count):
        values = (getattr(last, name)[row] if row < len(getattr(last, name)) else None for name in names)
        label = f"layer {row}" if row < count - 1 else "embedding, last norm, head"
        rows.append((label, *("" if value is None else f"{value:.3g}" for value in values)))
    caption = f"At step {last.step}: {last.describe()}."
    table = DataTable(("", *(title.lower() for _, title in INSTRUMENTS)), rows, right=(1, 2, 3, 4, 5), caption=caption)
    return [Section("Layers", (*items, table), id="layers")]


def saves(s: RunSummary) -> Section:
    items = (checkpoint_table(s) if s.checkpoints else Note("No checkpoint was saved."),)
    return Section("Checkpoints", items, id="checkpoints")


def environment(s: RunSummary) -> Section:
    texts: dict[str, Callable[[Any], str]] = {"started_at": when, "memory_bytes": print_bytes}
    values = {k: v for k, v in s.manifest.items() if k != "data" and not isinstance(v, (dict, list))}
    rows = [
        (
            k.removesuffix("_bytes").replace("_", " "),
            redact_text(str(v) if known_float(v) is None else texts.get(k, str)(v)),
        )
        for k, v in redact(values).items()
    ]
    packages, earlier = s.manifest.get("packages"), s.manifest.get("earlier")
    if isinstance(packages, dict):
        rows.append(("packages", ", ".join(f"{k} {v}" for k, v in packages.items())))
    if isinstance(earlier, list) and earlier:
        rows.append(("earlier starts", str(len(earlier))))
    recipe = escape(json.dumps(redact(s.recipe), indent=2))
    items = (
        DataTable(("", ""), rows)
        if rows
        else Note("Nothing is recorded about hardware and software (no manifest.json)."),
        Html(f"<details><summary>Recipe</summary><pre>{recipe}</pre></details>"),
    )
    return Section("Environment", items, id="environment")


def conventions() -> Section:
    rows = (
        ("MFU", "model FLOPs per second / dense bf16 peak; 6 x parameters without the input embedding + 12 x layers x "
         "width x sequence per token; recomputation not counted (HFU counts it)"),
        ("throughput", "tokens of the whole job per second of training steps; goodput also counts start-up, saving and lost time"),
        ("goodput", "time of the steps that are part of the final weights / wall time of the run"),
        ("IT energy", "energy measured by the sensors of the nodes, without switches, storage and cooling; a sensor that is "
         "part of another is not added"),
        ("PUE", "energy of the data centre / energy of its computers, a yearly mean of the site"),
        ("location-based", "energy with PUE x the country's mean grid intensity"),
        ("market-based", "energy with PUE x the intensity of the site's contract"),
        ("modelled", "from data-sheet power; never part of a measured figure"),
    )  # fmt: skip
    return Section("Conventions", (DataTable(("term", "meaning"), rows, unbroken=(0,)),), id="conventions")


def together(summaries: Sequence[RunSummary]) -> dict[str, float | int | None]:
    """The sums of several runs; a sum is unknown if one part of it is unknown.

    A folder and its copy are one run, known by name and start: of two, the one with more steps counts.
    """
    unique: dict[object, RunSummary] = {}
    for index, s in enumerate(summaries):
        key: object = index if s.started_at is None else (s.name, s.started_at)
        if key not in unique or (s.step or 0) > (unique[key].step or 0):
            unique[key] = s
    runs = list(unique.values())
    measured = [c for s in runs if s.energy.basis == "measured" and (c := s.energy.carbon) is not None]

    def total(key: str) -> float | None:
        values = [getattr(c, key) for c in measured]
        return sum(values) if values and None not in values else None

    return {
        "runs": len(runs),
        "copies": len(summaries) - len(runs),
        "tokens": sum(s.tokens for s in runs if s.tokens is not None),
        "node_hours": sum_or_unknown(s.node_hours for s in runs),
        "runs_measured": len(measured),
        **{key: total(key) for key in ("it_kwh", "kwh", "location_kg")},
    }


def joined(summaries: Sequence[RunSummary], labels: Sequence[str]) -> list[Section]:
    """Several runs (a chain, a sweep) side by side, before their own reports; `labels` tell them apart."""
    rows = [
        (
            label,
            state(s),
            *(figure(s, name) for name in ("tokens", "training loss", "throughput", "MFU", "memory, highest device")),
            print_energy(s.energy)[0] + (" (modelled)" if s.energy.basis == "modelled" else ""),
            figure(s, "CO2e, location-based"),
            figure(s, "mean power"),
        )
        for s, label in zip(summaries, labels, strict=True)
    ]
    sums = together(summaries)
    text = "No run has measured energy."
    if sums["runs_measured"]:
        facility = f", {print_kwh(sums['kwh'])} with PUE" if sums["kwh"] is not None else ""
        emitted = f", {print_carbon(sums['location_kg'])} location-based" if sums["location_kg"] is not None else ""
        measured = f"Measured IT energy of {sums['runs_measured']} of {sums['runs']} runs together"
        text = f"{measured}: {print_kwh(sums['it_kwh'])}{facility}{emitted}."
    if sums["copies"]:
        text += f" Copies of a run are not added again: {counted(int(sums['copies']), 'folder')}."
    columns = ("run", "state", "tokens", "loss", "tokens/s", "MFU", "memory", "energy", "CO2e", "power")
    table = DataTable(columns, rows, right=tuple(range(2, 10)))
    items = (*joint_items(summaries, sums), table, Note(text))
    return [Section(counted(len(summaries), "run"), items, id="all", is_page=True)]
