"""The dashboard's JSON: names and numbers in, sections and curves out; every run by its id, every number in bounds."""

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from windlass.energy.totals import print_energy
from windlass.errors import WindlassError
from windlass.figures import Cards, Chart, DataTable, Heat, Note, Section
from windlass.figures.html import spec
from windlass.files import parse_json
from windlass.profile.view import run_sections
from windlass.report.columns import X_AXES, axis, first_known, step_of, superseded
from windlass.report.dash.notes import read_notes, write_notes
from windlass.report.dash.planner import ask, choices, question
from windlass.report.dash.store import LOOK_SECONDS, Folder, RunView
from windlass.report.model_card import data_section
from windlass.report.redact import redact
from windlass.report.sections import (
    cards,
    conventions,
    energy,
    environment,
    evaluation,
    life,
    overview,
    plan_sections,
    saves,
    stability_sections,
    validations,
)
from windlass.report.sweeps import compared, find_sweeps
from windlass.report.tables import figure, progress, state
from windlass.runs.metrics import METRICS
from windlass.units import counted, print_seconds

Query = Mapping[str, Sequence[str]]
MAX_RUNS = 30
MAX_KEYS = 12
MAX_CURVE_POINTS = 4000
# A parallel file system takes its time for each small file, and answers many requests at a time. Where the first runs
# show no waiting, threads would only take turns.
LIST_THREADS, FIRST_RUNS = 8, 20
# The first list of a large folder comes in parts, each after about this time.
LIST_PART_SECONDS = 1.0
# Runs whose files are looked at for one update of the list.
MAX_LOOKED = 1000
# Pages that need all of every run show the newest.
MAX_WHOLE_RUNS = 500
MAX_MEAN_LINES = 100_000
# A spreadsheet takes a text that begins with one of these characters for a formula.
FORMULA_STARTS = "=+-@\t\r"
MAX_MARKED_EVENTS = 60
MARKED = (
    "started", "resumed", "fault", "hang", "stopped", "signal", "restarted", "rollback", "saved", "finished", "gave_up",
)  # fmt: skip


class NotFound(Exception):  # noqa: N818 - becomes 404
    """No such run or page."""


def answer(folder: Folder, path: str, query: Query) -> dict[str, Any] | str:
    if path not in ROUTES:
        raise NotFound(path)
    return ROUTES[path](folder, query)


SUMMARY_KEYS = (
    "name", "model", "cluster", "tokens", "target_tokens", "step", "loss", "tokens_per_second", "mfu",
    "memory_bytes", "updated_at", "started_at", "problem",
)  # fmt: skip


LIST_FIGURES = {
    "loss": "training loss", "tokens_per_second": "throughput", "mfu": "MFU", "goodput": "goodput",
    "node_hours": "node-hours",
}  # fmt: skip


def runs_json(folder: Folder, query: Query) -> dict[str, Any]:
    """Rows that changed after version `have` of the list; `complete`: all of them. `reading`: rows still to come."""
    views, have = folder.views(), _number(query, "have", 0)
    with folder.listing:  # with many viewers, only one reads the files
        began = time.monotonic()
        missing = [view for view in views if view.row is None]
        if missing or began - folder.rows_at >= LOOK_SECONDS:
            folder.rows_version += 1

            def update(view: RunView) -> None:
                if not missing or time.monotonic() - began < LIST_PART_SECONDS:
                    _update_row(view, folder.rows_version)

            looked = missing or views
            if not missing and len(views) > MAX_LOOKED:  # the runs that are still training, and the others in turn
                start = folder.rows_version * MAX_LOOKED % len(views)
                running = [view for view in views if view.row is not None and view.row[0].status == "running"]
                looked = list(dict.fromkeys([*running, *views[start : start + MAX_LOOKED]]))
            computing_before = time.thread_time()
            for view in looked[:FIRST_RUNS]:
                update(view)
            is_waiting = time.monotonic() - began > 2 * (time.thread_time() - computing_before)
            if is_waiting:
                with ThreadPoolExecutor(LIST_THREADS) as pool:
                    list(pool.map(update, looked[FIRST_RUNS:]))
            else:
                for view in looked[FIRST_RUNS:]:
                    update(view)
            folder.rows_at = time.monotonic()
        is_complete = have < folder.runs_version
        rows = [view.row[3] for view in views if view.row is not None and (is_complete or view.row[2] > have)]
        reading = sum(view.row is None for view in views)
        version = folder.rows_version
    about = {"root": str(folder.root), "axes": X_AXES, "metrics": METRICS} if is_complete else {}
    return {"version": version, "complete": is_complete, "reading": reading, "runs": rows, **about}


def _update_row(view: RunView, version: int) -> None:
    s, losses, notes = view.glance()
    origin = (state(s), notes, view.name)
    if view.row is not None and view.row[0] is s and view.row[1] == origin:
        return
    used, basis = print_energy(s.energy)
    row = {
        **{key: getattr(s, key) for key in SUMMARY_KEYS},
        "id": view.id,
        "path": view.name,
        "status": origin[0],
        "devices": s.world_size,
        "energy": used,
        "energy_how": basis,
        "joules": s.energy.joules,
        "basis": s.energy.basis,
        "goodput": s.life.goodput if s.life else None,
        "node_hours": s.node_hours,
        # As every other view prints them.
        "texts": {
            "tokens": progress(s),
            **{key: figure(s, name).removesuffix(" tokens/s") for key, name in LIST_FIGURES.items()},
        },
        "spark": losses,
        "notes": redact(notes.text),
        "tags": redact(list(notes.tags)),
    }
    view.row = (s, origin, version, row)


def _view(folder: Folder, query: Query) -> RunView:
    view = folder.get(_one(query, "id"))
    if view is None:
        raise NotFound("run")
    return view


def _number(query: Query, name: str, default: float) -> float:
    try:
        value = float(_one(query, name, ""))
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def run_json(folder: Folder, query: Query) -> dict[str, Any]:
    """All texts and tables of one run; its curves come from `series`."""
    view = _view(folder, query)
    with view.making:  # cached, so that fifty viewers cost as much as one
        s = view.summary()
        if view.page is None or view.page[0] is not s or view.page[1]["status"] != state(s):
            columns = view.columns()
            warnings = [Note(f"This folder is incomplete: {s.problem}", "warning")] if s.problem else []
            parts = [
                Section("", (cards(s), *warnings), id="top"),
                overview(s),
                life(s, columns),
                energy(s),
                *stability_sections(s),
                *plan_sections(s),
                evaluation(s),
                saves(s),
                data_section(s),
                environment(s),
                conventions(),
            ]
            events = [
                {"time": e.time, "event": e.event, "step": step_of(e, columns), "text": e.describe()}
                for e in [e for e in s.events if e.event in MARKED][-MAX_MARKED_EVENTS:]
            ]
            page = {
                "id": view.id,
                "name": s.name,
                "path": view.name,
                "status": state(s),
                "updated_at": s.updated_at,
                "started_at": s.started_at,
                "tokens": s.tokens,
                "target_tokens": s.target_tokens,
                "progress": progress(s),
                "eta_seconds": s.eta_seconds,
                "eta": None if s.eta_seconds is None else print_seconds(s.eta_seconds),
                "metrics": columns.names(),
                "events": redact(events),
                "sections": redact([section_json(part) for part in parts]),
                "lines": len(columns),
                "first_time": first_known(columns.get("time")),  # NaN becomes null
                "validations": validations(s, columns),
            }
            view.page = (s, page)
        page = view.page[1]
    notes = redact(read_notes(view.run).model_dump(mode="json"))
    return {**page, "notes": {**notes, "writable": os.access(view.run.path, os.W_OK)}}


def _views(folder: Folder, query: Query) -> list[RunView]:
    ids = list(dict.fromkeys(query.get("id", ())))[:MAX_RUNS]
    views = [view for i in ids if (view := folder.get(i)) is not None]
    if not views:
        raise NotFound("run")
    return views


def series_json(folder: Folder, query: Query) -> dict[str, Any]:
    views = _views(folder, query)
    keys, x = _one(query, "keys", "loss").split(",")[:MAX_KEYS], _one(query, "x", "step")
    x = x if x in X_AXES else "step"
    count = int(max(10, min(MAX_CURVE_POINTS, _number(query, "points", 800))))
    mean = int(max(1, min(MAX_MEAN_LINES, _number(query, "mean", 1))))
    low, high = (_number(query, name, math.nan) for name in ("low", "high"))
    span = (low, high) if low < high else None
    version = ".".join(view.version() for view in views)
    if _one(query, "have", "") == version:
        return {"version": version, "unchanged": True}
    runs = []
    for view in views:
        series = {key: view.series(key, x, count, mean, span) for key in keys}
        runs.append({"id": view.id, "name": view.summary().name, "path": view.name, "series": series})
    return {"version": version, "axis": x, "axis_title": X_AXES[x], "runs": runs}


def series_csv(folder: Folder, query: Query) -> str:
    """Every line of one metric, not the thinned curve; `repeated` is 1 where a later line does the step again."""
    key, file = _one(query, "key"), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = ("run", "step", "tokens", "hours", "kwh", key)
    writer.writerow([text.lstrip(FORMULA_STARTS) for text in names] + ["repeated"])
    for view in _views(folder, query):
        columns, name = view.columns(), view.name.lstrip(FORMULA_STARTS)
        is_known = columns.get(key) == columns.get(key)
        values = [columns.get(key), *(axis(columns, x) for x in X_AXES), superseded(columns.get("step"))]
        value, steps, tokens, hours, kwh, repeated = (column[is_known].tolist() for column in values)
        for row in zip(steps, tokens, hours, kwh, value, repeated, strict=True):
            writer.writerow([name, *("" if v != v else f"{v:.10g}" for v in row)])
    return file.getvalue()


def save_notes(folder: Folder, query: Query, body: bytes) -> dict[str, Any]:
    view = _view(folder, query)
    try:
        sent = parse_json(body)
        with view.making:
            notes = write_notes(view.run, sent if isinstance(sent, dict) else {"text": sent})
    except WindlassError as error:
        return {"error": error.message, "hint": error.hint}
    except ValueError:
        return {"error": "the request body is not JSON", "hint": None}
    return {"notes": notes.model_dump(mode="json")}


def data_json(folder: Folder, query: Query) -> dict[str, Any]:
    """Each ledger once, with the runs that share it: the points of a sweep read one store."""
    shared: dict[str, list[RunView]] = {}
    for view in folder.newest(MAX_WHOLE_RUNS):
        shared.setdefault(json.dumps(section_json(data_section(view.summary()))), []).append(view)
    parts = []
    for section, (view, *others) in shared.items():
        more = f" and {counted(len(others), 'more run')} with the same data" if others else ""
        parts.append({**json.loads(section), "title": view.summary().name + more, "run": view.name})
    if not parts:
        parts = [section_json(Section("", (Note(f"No run in {folder.root} yet, so there is no ledger."),)))]
    return {"sections": redact([*_left_out(folder), *parts])}


def _left_out(folder: Folder) -> list[dict[str, Any]]:
    count = len(folder.views())
    text = f"This folder has {count:,} runs; this page shows the {MAX_WHOLE_RUNS} that were updated last."
    return [section_json(Section("", (Note(text),)))] if count > MAX_WHOLE_RUNS else []


def profile_json(folder: Folder, query: Query) -> dict[str, Any]:
    view = _view(folder, query)
    text = 'This run has no trace: `[profile] steps = "20:23"` in the recipe captures steps 20, 21 and 22.'
    try:
        parts = run_sections(view.run)
    except WindlassError as error:
        parts, text = [], f"{error.message}. {error.hint or ''}"
    parts = parts or [Section("", (Note(text),))]
    return {"id": view.id, "name": view.summary().name, "sections": [section_json(s) for s in parts]}


def sweep_json(folder: Folder, query: Query) -> dict[str, Any]:
    """One sweep, the newest unless another is named; `runs` compares all runs in the folder."""
    sweeps = {s.id: s for s in find_sweeps(folder.root)}
    wanted = _one(query, "id", next(iter(sweeps), "runs"))
    if wanted not in (*sweeps, "runs"):
        raise NotFound("sweep")
    listed = [{key: getattr(s, key) for key in ("id", "name", "title", "progress")} for s in sweeps.values()]
    if wanted == "runs":
        parts = [section_json(s) for s in compared([v.summary() for v in folder.newest(MAX_WHOLE_RUNS)], folder.root)]
        parts = [*_left_out(folder), *parts]
    else:
        parts = [section_json(s) for s in sweeps[wanted].sections()]
        inside = (sweeps[wanted].path / "points").resolve()
        names = {v.run.name: v.name for v in folder.views() if v.run.path.resolve().parent == inside}
        for item in (item for part in parts for item in part["items"]):
            if item["kind"] == "table" and item["columns"][:1] == ["point"]:  # names of points link to their runs
                item["links"] = [names.get(row[0]) for row in item["rows"]]
    return {"id": wanted, "sweeps": listed, "sections": redact(parts)}


def plan_json(folder: Folder, query: Query) -> dict[str, Any]:
    try:
        answer, parts = ask(question(query))
    except WindlassError as error:
        return {"error": error.message, "hint": error.hint}
    return {**answer, "sections": [section_json(part) for part in parts]}


def section_json(section: Section) -> dict[str, Any]:
    """For the browser, which draws sections with text nodes only, so that no name can become markup (HTML items)."""
    items: list[dict[str, Any]] = []
    for item in section.items:
        if isinstance(item, DataTable):
            lists = {key: list(getattr(item, key)) for key in ("columns", "right", "strong", "unbroken")}
            items.append({"kind": "table", "rows": item.texts(), "caption": item.caption, **lists})
        elif isinstance(item, Cards):
            items.append({"kind": "cards", "cards": [asdict(card) for card in item.cards]})
        elif isinstance(item, Note):
            items.append({"kind": "note", "text": item.text, "warning": item.kind == "warning"})
        elif isinstance(item, (Chart, Heat)):
            texts = {key: getattr(item, key) for key in ("height", "caption", "title")}
            items.append({"kind": "figure", "figure": spec(item), **texts})
    return {"title": section.title, "id": section.id, "items": items}


def _one(query: Query, name: str, default: str | None = None) -> str:
    value = next(iter(query.get(name) or ()), default)
    if value is None:
        raise NotFound(name)
    return value


# A text is sent as a CSV file.
ROUTES: dict[str, Callable[[Folder, Query], dict[str, Any] | str]] = {
    "runs": runs_json, "run": run_json, "series": series_json, "csv": series_csv, "data": data_json, "profile": profile_json,
    "sweep": sweep_json, "plan": plan_json,
    "plan-choices": lambda folder, query: choices(),
}  # fmt: skip
