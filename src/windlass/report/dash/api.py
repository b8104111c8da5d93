"""The dashboard's JSON: names and numbers in, sections and curves out; every run by its id, every number in bounds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from windlass.errors import WindlassError
from windlass.figures import Cards, Chart, DataTable, Heat, Html, Item, Note, Section
from windlass.figures.html import spec
from windlass.report.collect import RunSummary
from windlass.report.columns import X_AXES, Columns, first_known, step_of
from windlass.report.dash.planner import ask, choices, question
from windlass.report.dash.store import Folder, RunView
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
    validations,
)
from windlass.report.tables import energy_card, goodput, state
from windlass.runs.metrics import METRICS

Query = Mapping[str, Sequence[str]]
MAX_RUNS = 30
MAX_KEYS = 12
MAX_POINTS = 4000
SPARK_POINTS = 60
MAX_MARKED_EVENTS = 60
MARKED = (
    "started", "resumed", "fault", "hang", "stopped", "signal", "restarted", "rollback", "saved", "finished", "gave_up",
)  # fmt: skip


class NotFound(Exception):  # noqa: N818 - becomes 404
    """No such run or page."""


def answer(folder: Folder, path: str, query: Query) -> dict[str, Any]:
    """The JSON of one request below /api/."""
    if path not in ROUTES:
        raise NotFound(path)
    return ROUTES[path](folder, query)


def _row(view: RunView) -> dict[str, Any]:
    s = view.summary()
    used, basis = energy_card(s.energy)
    keys = (
        "name", "model", "cluster", "tokens", "target_tokens", "step", "loss", "tokens_per_second", "mfu",
        "memory_bytes", "updated_at", "started_at", "problem",
    )  # fmt: skip
    return {
        **{key: getattr(s, key) for key in keys},
        "id": view.id,
        "path": view.name,
        "status": state(s),
        "devices": s.world_size,
        "energy": used,
        "energy_how": basis,
        "joules": s.energy.joules,
        "basis": s.energy.basis,
        "goodput": goodput(s),
        "spark": view.series("loss", "step", SPARK_POINTS)[1],
    }


def _view(folder: Folder, query: Query) -> RunView:
    view = folder.get(_one(query, "id"))
    if view is None:
        raise NotFound("run")
    return view


def _run(folder: Folder, query: Query) -> dict[str, Any]:
    """All texts and tables of one run; its curves come from `series`."""
    view = _view(folder, query)
    with view.making:  # fifty viewers cost as much as one
        s, kept = view.summary(), view.page
        if kept is None or kept[0] is not s or kept[1]["status"] != state(s):
            kept = view.page = (s, _run_page(view, s, view.columns()))
        return kept[1]


def _run_page(view: RunView, s: RunSummary, columns: Columns) -> dict[str, Any]:
    warnings = [Note(f"This folder is incomplete: {s.problem}", "warning")] if s.problem else []
    top = Section("", (cards(s), *warnings), id="top")
    parts = [top, overview(s), life(s, columns), energy(s), *plan_sections(s), evaluation(s), saves(s)]
    parts += [data_section(s), environment(s), conventions()]
    marked = [e for e in s.events if e.event in MARKED][-MAX_MARKED_EVENTS:]
    events = [{"time": e.time, "event": e.event, "step": step_of(e, columns), "text": e.describe()} for e in marked]
    return {
        "id": view.id,
        "name": s.name,
        "path": view.name,
        "status": state(s),
        "updated_at": s.updated_at,
        "started_at": s.started_at,
        "metrics": columns.names(),
        "events": redact(events),
        "sections": redact([section_json(p) for p in parts]),
        "lines": len(columns),
        "first_time": first_known(columns.get("time")),  # NaN becomes null
        "validations": validations(s, columns),
    }


def _series(folder: Folder, query: Query) -> dict[str, Any]:
    ids = list(dict.fromkeys(query.get("id", ())))[:MAX_RUNS]
    views = [view for i in ids if (view := folder.get(i)) is not None]
    if not views:
        raise NotFound("run")
    keys = _one(query, "keys", "loss").split(",")[:MAX_KEYS]
    x, points = _one(query, "x", "step"), _one(query, "points", "800")
    x = x if x in X_AXES else "step"
    count = max(10, min(MAX_POINTS, int(points))) if points.isdigit() and len(points) < 8 else 800
    version = ".".join(view.version() for view in views)
    if _one(query, "have", "") == version:
        return {"version": version, "unchanged": True}
    runs = []
    for view in views:
        curves = {key: view.series(key, x, count) for key in keys}
        series = {key: {"x": xs, "y": ys} for key, (xs, ys) in curves.items()}
        runs.append({"id": view.id, "name": view.summary().name, "path": view.name, "series": series})
    return {"version": version, "axis": x, "axis_title": X_AXES[x], "runs": runs}


def _data(folder: Folder, query: Query) -> dict[str, Any]:
    """Each ledger once, with the runs that share it: the points of a sweep read one store."""
    shared: dict[str, tuple[dict[str, Any], list[RunView]]] = {}
    for view in folder.views():
        section = section_json(data_section(view.summary()))
        shared.setdefault(json.dumps(section), (section, []))[1].append(view)
    parts = []
    for section, views in shared.values():
        more = len(views) - 1
        others = f" and {more} more run{'s' * (more > 1)} with the same ledger" if more else ""
        parts.append({**section, "title": views[0].summary().name + others, "run": views[0].id})
    return {"sections": redact(parts)}


def _profile(folder: Folder, query: Query) -> dict[str, Any]:
    from windlass.profile.view import run_sections

    view = _view(folder, query)
    text = 'This run has no trace: `[profile] steps = "20:23"` in the recipe captures steps 20, 21 and 22.'
    try:
        parts = run_sections(view.run)
    except WindlassError as error:
        parts, text = [], f"{error.message}. {error.hint or ''}"
    parts = parts or [Section("", (Note(text),))]
    return {"id": view.id, "name": view.summary().name, "sections": [section_json(s) for s in parts]}


def _sweep(folder: Folder, query: Query) -> dict[str, Any]:
    """One sweep, the newest unless another is named; `runs` compares all runs in the folder."""
    from windlass.report.sweeps import compared, find_sweeps

    sweeps = find_sweeps(folder.root)
    wanted = _one(query, "id", sweeps[0].id if sweeps else "runs")
    chosen = next((s for s in sweeps if s.id == wanted), None)
    if chosen is None and wanted != "runs":
        raise NotFound("sweep")
    listed = [{"id": s.id, "name": s.name, "title": s.title, "progress": s.progress} for s in sweeps]
    if chosen is None:
        parts = [section_json(s) for s in compared([v.summary() for v in folder.views()], folder.root)]
        return {"id": wanted, "sweeps": listed, "sections": redact(parts)}
    parts = [section_json(s) for s in chosen.sections()]
    inside = (chosen.path / "points").resolve()
    ids = {v.run.name: v.id for v in folder.views() if v.run.path.resolve().parent == inside}
    for item in (item for part in parts for item in part["items"]):
        if item["kind"] == "table" and item["columns"][:1] == ["point"]:  # names of points link to their runs
            item["links"] = [ids.get(row[0]) for row in item["rows"]]
    return {"id": wanted, "sweeps": listed, "sections": redact(parts)}


def _plan(folder: Folder, query: Query) -> dict[str, Any]:
    try:
        answer, parts = ask(question(query))
    except WindlassError as error:
        return {"error": error.message, "hint": error.hint}
    return {**answer, "sections": [section_json(part) for part in parts]}


def section_json(section: Section) -> dict[str, Any]:
    """For the browser, which draws sections with text nodes only, so that no name can become markup."""
    items = [_item_json(item) for item in section.items if not isinstance(item, Html)]
    return {"title": section.title, "id": section.id, "items": items}


def _item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, DataTable):
        lists = {"columns": list(item.columns), "right": list(item.right), "strong": list(item.strong)}
        return {"kind": "table", "rows": item.texts(), "caption": item.caption, **lists}
    if isinstance(item, Cards):
        return {"kind": "cards", "cards": [asdict(card) for card in item.cards]}
    if isinstance(item, Note):
        return {"kind": "note", "text": item.text, "warning": item.kind == "warning"}
    assert isinstance(item, (Chart, Heat))
    texts = {"height": item.height, "caption": item.caption, "title": item.title}
    return {"kind": "figure", "figure": spec(item), **texts}


def _one(query: Query, name: str, default: str | None = None) -> str:
    values = query.get(name) or ([] if default is None else [default])
    if not values:
        raise NotFound(name)
    return values[0]


ROUTES: dict[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "runs": lambda folder, query: {
        "root": str(folder.root), "runs": [_row(view) for view in folder.views()], "axes": X_AXES, "metrics": METRICS,
    },
     "run": _run, "series": _series, "data": _data, "profile": _profile, "sweep": _sweep, "plan": _plan,
    "plan-choices": lambda folder, query: choices(),
}  # fmt: skip
