"""The dashboard's JSON: names and numbers in, sections and curves out; every run by its id, every number in bounds."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from windlass.energy.totals import print_energy
from windlass.errors import WindlassError
from windlass.figures import Cards, Chart, DataTable, Heat, Note, Section
from windlass.figures.html import spec
from windlass.profile.view import run_sections
from windlass.report.columns import X_AXES, first_known, step_of
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
    stability_sections,
    validations,
)
from windlass.report.sweeps import compared, find_sweeps
from windlass.report.tables import counted, figure, progress, state
from windlass.runs.metrics import METRICS

Query = Mapping[str, Sequence[str]]
MAX_RUNS = 30
MAX_KEYS = 12
MAX_CURVE_POINTS = 4000
# A parallel file system takes its time for each small file, and answers many requests at a time.
LIST_THREADS = 4
MAX_MARKED_EVENTS = 60
MARKED = (
    "started", "resumed", "fault", "hang", "stopped", "signal", "restarted", "rollback", "saved", "finished", "gave_up",
)  # fmt: skip


class NotFound(Exception):  # noqa: N818 - becomes 404
    """No such run or page."""


def answer(folder: Folder, path: str, query: Query) -> dict[str, Any]:
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
    with ThreadPoolExecutor(LIST_THREADS) as pool:
        rows = list(pool.map(_row, folder.views()))
    return {"root": str(folder.root), "runs": rows, "axes": X_AXES, "metrics": METRICS}


def _row(view: RunView) -> dict[str, Any]:
    s, losses = view.glance()
    used, basis = print_energy(s.energy)
    return {
        **{key: getattr(s, key) for key in SUMMARY_KEYS},
        "id": view.id,
        "path": view.name,
        "status": state(s),
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
    }


def _view(folder: Folder, query: Query) -> RunView:
    view = folder.get(_one(query, "id"))
    if view is None:
        raise NotFound("run")
    return view


def run_json(folder: Folder, query: Query) -> dict[str, Any]:
    """All texts and tables of one run; its curves come from `series`."""
    view = _view(folder, query)
    with view.making:  # fifty viewers cost as much as one
        s, kept = view.summary(), view.page
        if kept is not None and kept[0] is s and kept[1]["status"] == state(s):
            return kept[1]
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
        marked = [e for e in s.events if e.event in MARKED][-MAX_MARKED_EVENTS:]
        page = {
            "id": view.id,
            "name": s.name,
            "path": view.name,
            "status": state(s),
            "updated_at": s.updated_at,
            "started_at": s.started_at,
            "metrics": columns.names(),
            "events": redact(
                [{"time": e.time, "event": e.event, "step": step_of(e, columns), "text": e.describe()} for e in marked]
            ),
            "sections": redact([section_json(p) for p in parts]),
            "lines": len(columns),
            "first_time": first_known(columns.get("time")),  # NaN becomes null
            "validations": validations(s, columns),
        }
        view.page = (s, page)
        return page


def series_json(folder: Folder, query: Query) -> dict[str, Any]:
    ids = list(dict.fromkeys(query.get("id", ())))[:MAX_RUNS]
    views = [view for i in ids if (view := folder.get(i)) is not None]
    if not views:
        raise NotFound("run")
    keys = _one(query, "keys", "loss").split(",")[:MAX_KEYS]
    x, points = _one(query, "x", "step"), _one(query, "points", "800")
    x = x if x in X_AXES else "step"
    count = max(10, min(MAX_CURVE_POINTS, int(points))) if points.isdigit() and len(points) < 8 else 800
    version = ".".join(view.version() for view in views)
    if _one(query, "have", "") == version:
        return {"version": version, "unchanged": True}
    runs = []
    for view in views:
        series = {key: dict(zip("xy", view.series(key, x, count), strict=True)) for key in keys}
        runs.append({"id": view.id, "name": view.summary().name, "path": view.name, "series": series})
    return {"version": version, "axis": x, "axis_title": X_AXES[x], "runs": runs}


def data_json(folder: Folder, query: Query) -> dict[str, Any]:
    """Each ledger once, with the runs that share it: the points of a sweep read one store."""
    shared: dict[str, list[RunView]] = {}
    for view in folder.views():
        shared.setdefault(json.dumps(section_json(data_section(view.summary()))), []).append(view)
    parts = []
    for section, (view, *others) in shared.items():
        more = f" and {counted(len(others), 'more run')} with the same ledger" if others else ""
        parts.append({**json.loads(section), "title": view.summary().name + more, "run": view.id})
    return {"sections": redact(parts)}


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
        parts = [section_json(s) for s in compared([v.summary() for v in folder.views()], folder.root)]
    else:
        parts = [section_json(s) for s in sweeps[wanted].sections()]
        inside = (sweeps[wanted].path / "points").resolve()
        ids = {v.run.name: v.id for v in folder.views() if v.run.path.resolve().parent == inside}
        for item in (item for part in parts for item in part["items"]):
            if item["kind"] == "table" and item["columns"][:1] == ["point"]:  # names of points link to their runs
                item["links"] = [ids.get(row[0]) for row in item["rows"]]
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
            lists = {key: list(getattr(item, key)) for key in ("columns", "right", "strong")}
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


ROUTES: dict[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "runs": runs_json, "run": run_json, "series": series_json, "data": data_json, "profile": profile_json,
    "sweep": sweep_json, "plan": plan_json,
    "plan-choices": lambda folder, query: choices(),
}  # fmt: skip
