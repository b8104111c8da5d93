"""What may a page ask? Names and numbers in, JSON out; every run by its id, every number within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from windlass.errors import WindlassError
from windlass.figures import Note, Section
from windlass.report.card import data_section
from windlass.report.collect import RunSummary
from windlass.report.columns import AXES, Columns, first_known, step_of
from windlass.report.content import cards, conventions, energy, environment, life, saves, validations, what
from windlass.report.content import plan_sections as plan_of
from windlass.report.dash.blocks import section_json
from windlass.report.dash.store import MOST_POINTS, Folder, RunView, known_axis
from windlass.report.evaluations import evaluation
from windlass.report.redact import redact
from windlass.report.words import energy_card, event_text, state
from windlass.runs.metrics import METRICS

Query = Mapping[str, Sequence[str]]
MOST_RUNS = 30
SPARK_POINTS = 60


class NotFound(Exception):  # noqa: N818 - becomes 404
    """No such run or page."""


def answer(folder: Folder, path: str, query: Query) -> dict[str, Any]:
    """The JSON of one request below /api/."""
    if path not in ROUTES:
        raise NotFound(path)
    return ROUTES[path](folder, query)


def _runs(folder: Folder, query: Query) -> dict[str, Any]:
    views = folder.views()
    return {"root": str(folder.root), "runs": [_row(v) for v in views], "axes": AXES, "metrics": METRICS}


def _row(view: RunView) -> dict[str, Any]:
    s = view.summary()
    used, how = energy_card(s.energy)
    _, ys = view.series("loss", "step", SPARK_POINTS)
    return {
        "id": view.id, "name": s.name, "path": view.name, "status": state(s), "model": s.model, "cluster": s.cluster, "devices": s.world_size,
        "tokens": s.tokens, "target_tokens": s.target_tokens, "step": s.step, "loss": s.loss, "tokens_per_second": s.tokens_per_second, "mfu": s.mfu,
        "memory_bytes": s.memory_bytes, "energy": used, "energy_how": how, "joules": s.energy.joules, "basis": s.energy.basis,
        "goodput": (s.life or {}).get("goodput"), "updated_at": s.updated_at, "started_at": s.started_at, "problem": s.problem, "spark": ys,
    }  # fmt: skip


def _view(folder: Folder, query: Query) -> RunView:
    view = folder.get(_one(query, "id"))
    if view is None:
        raise NotFound("run")
    return view


def _run(folder: Folder, query: Query) -> dict[str, Any]:
    """All the words and tables of one run; its curves come from `series`."""
    view = _view(folder, query)
    with view.making:  # fifty viewers cost as much as one
        s, kept = view.summary(), view.page
        if kept is None or kept[0] is not s or kept[1]["status"] != state(s):
            kept = view.page = (s, _run_page(view, s, view.columns()))
        return kept[1]


def _run_page(view: RunView, s: RunSummary, columns: Columns) -> dict[str, Any]:
    warnings = [Note(f"This folder is not whole: {s.problem}", "warning")] if s.problem else []
    parts = [Section("", (cards(s), *warnings), id="top"), what(s), life(s, columns), energy(s), *plan_of(s), evaluation(s), saves(s), data_section(s),
             environment(s), conventions()]  # fmt: skip
    marked = [e for e in s.events if e["event"] in MARKED][-60:]
    events = [
        {"time": e["time"], "event": e["event"], "step": step_of(e, columns), "text": event_text(e)} for e in marked
    ]
    return {
        "id": view.id, "name": s.name, "path": view.name, "status": state(s), "updated_at": s.updated_at, "started_at": s.started_at,
        "metrics": columns.names(), "events": redact(events), "sections": redact([section_json(p) for p in parts]), "lines": len(columns),
        "first_time": _first_time(view), "validations": validations(s, columns),
    }  # fmt: skip


MARKED = (
    "started",
    "resumed",
    "fault",
    "hang",
    "stopped",
    "signal",
    "restarted",
    "rollback",
    "saved",
    "finished",
    "gave_up",
)


def _first_time(view: RunView) -> float | None:
    first = first_known(view.columns().get("time"))
    return first if first == first else None


def _series(folder: Folder, query: Query) -> dict[str, Any]:
    ids = list(dict.fromkeys(query.get("id", ())))[:MOST_RUNS]
    views = [v for i in ids if (v := folder.get(i)) is not None]
    if not views:
        raise NotFound("run")
    keys = _one(query, "keys", "loss").split(",")[:12]
    x, points = known_axis(_one(query, "x", "step")), _whole(query, "points", 800, 10, MOST_POINTS)
    version = ".".join(v.version() for v in views)
    if _one(query, "have", "") == version:
        return {"version": version, "unchanged": True}
    made = []
    for view in views:
        values = {key: view.series(key, x, points) for key in keys}
        made.append(
            {
                "id": view.id,
                "name": view.summary().name,
                "path": view.name,
                "series": {k: {"x": v[0], "y": v[1]} for k, v in values.items()},
            }
        )
    return {"version": version, "axis": x, "axis_title": AXES[x], "runs": made}


def _data(folder: Folder, query: Query) -> dict[str, Any]:
    """Each ledger once, with the runs that share it: the points of a sweep read one store."""
    shared: dict[str, tuple[dict[str, Any], list[RunView]]] = {}
    for view in folder.views():
        section = section_json(data_section(view.summary()))
        shared.setdefault(json.dumps(section), (section, []))[1].append(view)
    parts = [{**section, "title": _names(views), "run": views[0].id} for section, views in shared.values()]
    return {"sections": redact(parts)}


def _names(views: Sequence[RunView]) -> str:
    more = len(views) - 1
    return views[0].summary().name + (f" and {more} more run{'s' * (more > 1)} with the same ledger" if more else "")


def _profile(folder: Folder, query: Query) -> dict[str, Any]:
    from windlass.profile.view import run_sections

    view = _view(folder, query)
    return {
        "id": view.id,
        "name": view.summary().name,
        "sections": [section_json(s) for s in _profiled(view, run_sections)],
    }


def _profiled(view: RunView, read: Callable[..., list[Section]]) -> list[Section]:
    none = Note('This run has no trace: `[profile] steps = "20:23"` in the recipe captures steps 20, 21 and 22.')
    try:
        return read(view.run) or [Section("", (none,))]
    except WindlassError as error:
        return [Section("", (Note(f"{error.message}. {error.hint or ''}"),))]


def _sweep(folder: Folder, query: Query) -> dict[str, Any]:
    """One sweep with its own numbers, the newest unless another is asked for; `runs` compares whatever lies in the folder."""
    from windlass.report.dash.sweep import compared
    from windlass.report.sweeps import find_sweeps

    found = find_sweeps(folder.root)
    wanted = _one(query, "id", found[0].id if found else "runs")
    chosen = next((s for s in found if s.id == wanted), None)
    if chosen is None and wanted != "runs":
        raise NotFound("sweep")
    parts = compared([v.summary() for v in folder.views()], folder.root) if chosen is None else chosen.sections()
    return {
        "id": wanted, "sweeps": [{"id": s.id, "name": s.name, "title": s.title, "progress": s.progress} for s in found],
        "sections": redact([_linked(section_json(s), _points(folder, chosen.path)) if chosen else section_json(s) for s in parts]),
    }  # fmt: skip


def _points(folder: Folder, sweep: Path) -> dict[str, str]:
    """Point -> id of its run, where it has one: a command's points have none."""
    inside = (sweep / "points").resolve()
    return {v.run.name: v.id for v in folder.views() if v.run.path.resolve().parent == inside}


def _linked(section: dict[str, Any], runs: Mapping[str, str]) -> dict[str, Any]:
    """The names of points lead to their runs."""
    for item in section["items"]:
        if item["kind"] == "table" and item["columns"][:1] == ["point"]:
            item["links"] = [runs.get(row[0]) for row in item["rows"]]
    return section


def _plan(folder: Folder, query: Query) -> dict[str, Any]:
    from windlass.report.dash.planner import ask, question

    try:
        return ask(question(query))
    except WindlassError as error:
        return {"error": error.message, "hint": error.hint}


@lru_cache(maxsize=1)
def _choices() -> dict[str, Any]:
    from windlass.report.dash.planner import choices

    return choices()


def _one(query: Query, name: str, default: str | None = None) -> str:
    found = query.get(name)
    if not found:
        if default is None:
            raise NotFound(name)
        return default
    return found[0]


def _whole(query: Query, name: str, default: int, low: int, high: int) -> int:
    text = _one(query, name, str(default))
    return max(low, min(high, int(text))) if text.isdigit() and len(text) < 8 else default


ROUTES: dict[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "runs": _runs, "run": _run, "series": _series, "data": _data, "profile": _profile, "sweep": _sweep, "plan": _plan,
    "plan-choices": lambda folder, query: _choices(),
}  # fmt: skip
