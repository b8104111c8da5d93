"""What does a run folder say? Folder -> one value that terminal, browser and report all show, so that they agree. Reads files only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from windlass.clusters.load import load_cluster
from windlass.clusters.model import Cluster
from windlass.config import Recipe
from windlass.energy.carbon import Carbon, carbon
from windlass.energy.ledger import Ledger, read_ledger
from windlass.errors import RunError, WindlassError
from windlass.files import read_json, read_json_lines
from windlass.report.columns import Columns, Numbers, highest, last_known, middle
from windlass.runs.events import parse_event
from windlass.runs.folder import Run, open_run
from windlass.runs.history import read_history
from windlass.runs.metrics import MetricsLine
from windlass.units import print_text

FAULTS = ("fault", "hang", "save_failed", "damaged", "rollback", "skipped", "gave_up")
BREAKS = ("signal", "stopped", "fault", "hang", "restarted", "resumed", "rollback")


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The run's energy in the words of the table; `basis` says whether the figures are measured or modelled."""

    basis: str
    joules: float | None
    ledger: Ledger
    carbon: Carbon | None
    joules_per_token: float | None
    joules_per_step: float | None
    kwh_per_billion_tokens: float | None
    mean_watts: float | None
    """Of the measured nodes together."""
    forecast_kwh: float | None
    """What the plan expected for the whole run, PUE included."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    name: str
    path: str
    status: str
    """finished, running, stopped, failed or unknown, from the last events."""
    problem: str | None
    """What is missing or damaged in the folder, in words."""
    recipe: dict[str, Any]
    cluster: str
    model: str
    parameters: int | None
    active_parameters: int | None
    layout: dict[str, Any] | None
    nodes: int | None
    world_size: int | None
    device: str | None
    step: int | None
    tokens: float | None
    target_tokens: float | None
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    mfu: float | None
    hfu: float | None
    step_seconds: float | None
    memory_bytes: float | None
    utilization: float | None
    watts: float | None
    spread_seconds: float | None
    slowest_rank: int | None
    started_at: float | None
    updated_at: float | None
    eta_seconds: float | None
    silent_after_seconds: float
    """A running run that writes nothing for this long is silent: five times what it takes from line to line, two minutes at least."""
    energy: Energy
    life: dict[str, Any] | None
    """Goodput and the parts of the run's time, from runs.life."""
    events: list[dict[str, Any]] = field(default_factory=list)
    breaks: list[dict[str, Any]] = field(default_factory=list)
    """Interruptions and resumes, in order."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    plan_rows: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    """(what, planned, measured)."""
    lines: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the raw plan, which lies in plan.json."""
        value = asdict(self)
        value.pop("plan")
        return value


def collect(
    where: Run | Path | str, *, columns: Columns | None = None, factors: Mapping[str, float] | None = None
) -> RunSummary:
    """One run. `columns` may be handed in by a caller that keeps them (the dashboard); else the metrics are read here.

    `factors`: PUE and intensities instead of those that the run knows; see `carbon`.
    """
    run = where if isinstance(where, Run) else open_run(where)
    if columns is None:
        columns = Columns(run.metrics_file)
        columns.refresh()
    recipe, problem = _recipe(run)
    manifest: dict[str, Any] = plain(run.manifest())
    cluster = _cluster(recipe)
    events = [_event(e.as_dict()) for e in run.events()]
    begin = _last(events, ("started", "resumed")) or {}
    tokens, step = last_known(columns.get("tokens")), last_known(columns.get("step"))
    parameters, active = _parameters(recipe)
    target = _target(recipe)
    rate = middle(columns.get("tokens_per_second"))
    status = _status(events, len(columns))
    plan = run.plan()
    energy = _energy(_ledger(run), cluster, recipe, tokens, step, plan, factors)
    eta = (target - tokens) / rate if status == "running" and target and tokens is not None and rate else None
    rank = last_known(columns.get("slowest_rank"))
    times = columns.get("time")
    summary = RunSummary(
        name=print_text(recipe.name if recipe else run.name), path=str(run.path), status=status, problem=_problem(run, problem, events, len(columns)),
        recipe=plain(recipe.model_dump(mode="json")) if recipe else {}, cluster=print_text(recipe.cluster) if recipe else "unknown",
        model=print_text(_model_text(recipe)), parameters=parameters, active_parameters=active, layout=_layout(begin, recipe),
        nodes=_int(begin.get("nodes")) or (recipe.nodes if recipe else None), world_size=_int(begin.get("world_size")),
        device=_text(begin.get("device")) or _text(manifest.get("device")),
        step=None if step is None else int(step), tokens=tokens, target_tokens=target,
        loss=middle(columns.get("loss"), last=10, skip=0), val_loss=_val_loss(events, columns), tokens_per_second=rate,
        tokens_per_second_per_device=middle(columns.get("tokens_per_second_per_device")),
        mfu=middle(columns.get("mfu")), hfu=middle(columns.get("hfu")), step_seconds=middle(columns.get("step_seconds")),
        memory_bytes=highest(columns.get("memory_bytes")), utilization=middle(columns.get("utilization")),
        watts=last_known(columns.get("watts")), spread_seconds=middle(columns.get("spread_seconds")),
        slowest_rank=None if rank is None else int(rank),
        started_at=_first_time(events, run), updated_at=_latest(events, last_known(times)), eta_seconds=eta,
        silent_after_seconds=_silent_after(times),
        energy=energy, life=_life(events, columns), events=events, breaks=[e for e in events if e["event"] in BREAKS],
        faults=[*(e for e in events if e["event"] in FAULTS)], checkpoints=checkpoints(run, events),
        evaluations=plain(list(read_json_lines(run.eval_file))), data=plain(_data(run, recipe)), manifest=manifest, plan=plan, lines=len(columns),
    )  # fmt: skip
    return _with_plan(summary)


SILENT_SECONDS = 120.0


def _silent_after(times: Numbers) -> float:
    """Large steps, or a line every hundred steps, are no silence."""
    gaps = np.diff(times[~np.isnan(times)][-50:])
    gaps = gaps[gaps > 0]
    return max(SILENT_SECONDS, 5 * float(np.median(gaps))) if len(gaps) else SILENT_SECONDS


def find_runs(folder: Path | str) -> list[Run]:
    """Every run folder at or below a folder (three levels), by path. A link that leads out of the folder is not followed."""
    root = Path(folder)
    if not root.is_dir():
        raise RunError(
            "report.folder", f"{root} is no folder", hint="name a run folder, or the folder that holds several (runs/)"
        )
    found = {p.parent for depth in ("", "*/", "*/*/", "*/*/*/") for p in root.glob(f"{depth}config.json")}
    return [Run(p) for p in sorted(found) if _is_run(p) and p.resolve().is_relative_to(root.resolve())]


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("recipe.toml", "metrics.jsonl", "events.jsonl", "manifest.json"))


# -- parts ------------------------------------------------------------------------------------------------------------


def _recipe(run: Run) -> tuple[Recipe | None, str | None]:
    try:
        return run.recipe(), None
    except WindlassError as error:
        return None, error.message


def _problem(run: Run, recipe: str | None, events: Sequence[Mapping[str, Any]], lines: int) -> str | None:
    """What a folder that was copied in part, or torn, does not say: the views would else look like those of another run."""
    found = [] if recipe is None else [recipe]
    if run.manifest_file.exists() and read_json(run.manifest_file) is None:
        found.append("manifest.json is damaged: environment and data ledger are unknown")
    if lines and not events:
        found.append("events.jsonl is missing or empty: state, saves and interruptions are unknown")
    if not lines and any(e["event"] in ("saved", "stopped", "finished") for e in events):
        found.append("metrics.jsonl is missing or empty: loss and speed are unknown")
    return print_text("; ".join(found)) if found else None


def _cluster(recipe: Recipe | None) -> Cluster | None:
    try:
        return load_cluster(recipe.cluster) if recipe else None
    except WindlassError:
        return None


def plain(value: Any, *, lines: bool = True) -> Any:
    """The same value with every text fit to be shown: a run's files may have been written by anybody."""
    if isinstance(value, str):
        return print_text(value, lines=lines)
    if isinstance(value, dict):
        return {print_text(str(k)): plain(v, lines=lines) for k, v in value.items()}
    return [plain(v, lines=lines) for v in value] if isinstance(value, list) else value


COUNTS = ("step", "to_step", "lost_steps", "tokens", "skipped_tokens", "bytes", "world_size", "nodes")
MEASURES = ("time", "seconds", "stall_seconds", "write_seconds", "val_loss", "bits_per_byte", "loss")
MOST = 1e18
"""Beyond every count, byte and second of a run; a larger figure comes from a damaged line."""


def _event(raw: dict[str, Any]) -> dict[str, Any]:
    """An event as the views may use it: what should be a figure and is none is unknown."""
    shown: dict[str, Any] = plain(raw, lines=False)
    counts = {key: _int(shown[key]) for key in COUNTS if key in shown}
    measures = {key: figure(shown[key]) for key in MEASURES if key in shown}
    parts: dict[str, Any] = {key: _losses(shown[key]) for key in ("sources", "languages") if key in shown}
    event = str(shown.get("event", "unknown"))
    return {**shown, **counts, **measures, **parts, "event": event, "time": figure(raw.get("time"))}


def _losses(value: object) -> dict[str, Any]:
    """Name -> figures of a validation pass; names without a loss are left out."""
    found = value.items() if isinstance(value, dict) else ()
    return {k: v for k, v in found if isinstance(v, dict) and figure(v.get("loss")) is not None}


def _status(events: Sequence[Mapping[str, Any]], lines: int) -> str:
    for event in reversed(events):
        kind = event["event"]
        if kind == "finished":
            return "finished"
        if kind in ("stopped", "signal"):
            return "stopped"
        if kind in ("gave_up", "fault", "hang"):
            return "failed"
        if kind in ("started", "resumed", "restarted"):
            return "running"
    return "running" if lines else "unknown"


def _last(events: Sequence[dict[str, Any]], kinds: Iterable[str]) -> dict[str, Any] | None:
    wanted = set(kinds)
    return next((e for e in reversed(events) if e["event"] in wanted), None)


def _parameters(recipe: Recipe | None) -> tuple[int | None, int | None]:
    if recipe is None:
        return None, None
    try:
        from windlass.models.presets import model_spec

        found = model_spec(recipe.model).params
    except (
        WindlassError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
    ):  # an hf config that was not copied with the folder
        return None, None
    return found.total, found.active


def _target(recipe: Recipe | None) -> float | None:
    if recipe is None:
        return None
    if recipe.data.tokens is not None:
        return float(recipe.data.tokens)
    if recipe.train.steps is not None and recipe.data.batch_tokens is not None:
        return float(recipe.train.steps * recipe.data.batch_tokens)
    return None


def _model_text(recipe: Recipe | None) -> str:
    if recipe is None:
        return "unknown"
    m = recipe.model
    if m.family == "hf":
        return f"Hugging Face {m.config}"
    return (
        f"{m.family}, {m.layers} layers, width {m.width}, {m.heads} heads, vocabulary {m.vocab:,}"
        if m.vocab
        else m.family
    )


def _layout(begin: Mapping[str, Any], recipe: Recipe | None) -> dict[str, Any] | None:
    found = begin.get("layout")
    if isinstance(found, dict):
        return found
    if isinstance(found, str):
        return {"layout": found}
    return recipe.layout.model_dump(mode="json") if recipe and recipe.layout else None


def _energy(
    ledger: Ledger,
    cluster: Cluster | None,
    recipe: Recipe | None,
    tokens: float | None,
    step: float | None,
    plan: dict[str, Any] | None,
    factors: Mapping[str, float] | None = None,
) -> Energy:
    joules = ledger.joules if ledger.joules is not None else ledger.modelled_joules
    with_carbon = None if joules is None else carbon(joules, cluster, recipe.energy if recipe else None, factors)
    kwh = None if with_carbon is None else with_carbon.kwh if with_carbon.kwh is not None else with_carbon.it_kwh
    watts = None
    if ledger.joules is not None and ledger.wall_seconds > 0:
        watts = ledger.joules / ledger.wall_seconds
    return Energy(
        basis=ledger.basis, joules=joules, ledger=ledger, carbon=with_carbon,
        joules_per_token=joules / tokens if joules is not None and tokens else None,
        joules_per_step=joules / step if joules is not None and step else None,
        kwh_per_billion_tokens=kwh / (tokens / 1e9) if kwh is not None and tokens else None,
        mean_watts=watts, forecast_kwh=_planned(plan, "mwh", 1e3),
    )  # fmt: skip


_KEPT: dict[str, tuple[tuple[float, ...], Ledger]] = {}


def _ledger(run: Run) -> Ledger:
    """Read again only when its files have changed: the live views ask every second, and a long run's record has many lines."""
    files = [f for f in (run.energy_file, run.events_file) if f.exists()]
    stamp = tuple(v for f in files for v in (f.stat().st_mtime, float(f.stat().st_size)))
    key = str(run.path.resolve())
    if key not in _KEPT or _KEPT[key][0] != stamp:
        _KEPT[key] = (stamp, read_ledger(run))
    return _KEPT[key][1]


def _planned(plan: dict[str, Any] | None, name: str, scale: float = 1.0) -> float | None:
    """A figure of the plan that the run was started with."""
    chosen = plan.get("plan") if plan is not None else None
    value = figure(chosen.get(name)) if isinstance(chosen, dict) else None
    return None if value is None else value * scale


def _with_plan(summary: RunSummary) -> RunSummary:
    if summary.plan is None:
        return summary
    from dataclasses import replace

    rows = [
        ("tokens/s", _planned(summary.plan, "tokens_per_second"), summary.tokens_per_second),
        ("MFU", _planned(summary.plan, "mfu"), summary.mfu),
        ("step, s", _planned(summary.plan, "step_seconds"), summary.step_seconds),
        (_memory_word(summary.plan), _planned(summary.plan, _memory_key(summary.plan), 2**30), summary.memory_bytes),
        ("energy of the whole run, kWh", summary.energy.forecast_kwh, _full_kwh(summary)),
    ]
    return replace(summary, plan_rows=[row for row in rows if row[1] is not None])


def _memory_key(plan: Mapping[str, Any]) -> str:
    """A run shows the allocator's peak on a GPU and the whole process on a CPU: like is compared with like."""
    return "memory_gib" if plan.get("device") == "cpu" else "memory_allocated_gib"


def _memory_word(plan: Mapping[str, Any]) -> str:
    return "memory of a process, bytes" if plan.get("device") == "cpu" else "peak memory allocated on a device, bytes"


def _full_kwh(summary: RunSummary) -> float | None:
    """Measured so far, or, while tokens are outstanding, nothing: a part is not comparable with the whole."""
    if summary.energy.basis != "measured" or summary.energy.carbon is None or summary.status != "finished":
        return None
    return summary.energy.carbon.kwh


MOST_LINES = 20_000
"""Goodput is summed over at most so many metric lines, evenly spread: its error is then far below a thousandth."""


def _life(events: Sequence[dict[str, Any]], columns: Columns) -> dict[str, Any] | None:
    """What runs.life makes of the events and the metrics; None before the first start."""
    known = [e for e in events if e["time"] is not None]
    found = read_history([parse_event(e) for e in known], _light(columns))
    if not found.segments:
        return None
    value = asdict(found)
    value.pop("clock_jumped_at")
    return value


def _light(columns: Columns) -> list[MetricsLine]:
    steps = columns.get("step")
    if not len(steps):
        return []
    even = np.linspace(0, len(steps) - 1, min(len(steps), MOST_LINES)).astype(np.int64)
    back = np.nonzero(np.diff(steps) <= 0)[0][
        :MOST_LINES
    ]  # the last line before a resume says how many steps were lost
    keep = np.unique(np.concatenate([even, back, back + 1]))
    taken = {key: columns.get(key)[keep].tolist() for key in ("step", "tokens", "step_seconds", "time")}
    rows = zip(*taken.values(), strict=True)
    return [
        MetricsLine(step=int(s), tokens=None if t != t else int(t), step_seconds=None if x != x else x, time=at)
        for s, t, x, at in rows
        if at == at
    ]


def checkpoints(run: Run, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saves of the run with what became of them; a folder that nobody recorded is listed too."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        step = _int(event.get("step"))
        if event["event"] == "saved" and step is not None:
            keys = ("time", "tokens", "bytes", "stall_seconds", "write_seconds")
            found[step] = {"step": step, **{k: event.get(k) for k in keys}, "state": "kept"}
        elif event["event"] == "removed" and step in found:
            found[step]["state"] = f"removed ({event.get('reason', 'superseded')})"
    for folder in sorted(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else ():
        digits = folder.name.removeprefix("step-")
        if digits.isdigit():
            found.setdefault(int(digits), {"step": int(digits), "state": "on disk, not in events.jsonl"})
    for step, entry in found.items():
        if entry["state"] == "kept" and not run.checkpoint(step).is_dir():
            entry["state"] = "not in this copy of the folder"
    return [found[step] for step in sorted(found)]


def _data(run: Run, recipe: Recipe | None) -> dict[str, Any]:
    """The ledger that the run's manifest keeps; else, where the token store can still be reached, the store's own."""
    found = run.manifest().get("data")
    if isinstance(found, dict) and found:
        return found
    store = recipe.data.store if recipe else None
    if not store:
        return {}
    for base in (Path(), run.path, run.path.parent, run.path.parent.parent):
        ledger, about = read_json(base / store / "ledger.json"), read_json(base / store / "manifest.json")
        if ledger is not None:
            extra = {"ledger_hash": about.get("ledger_hash"), "settings": about.get("settings")} if about else {}
            return {"store": store, **extra, **ledger}
    return {"store": store}


def _val_loss(events: Sequence[Mapping[str, Any]], columns: Columns) -> float | None:
    """The newest validation: its event, because the last one of a run is followed by no metrics line."""
    found = [v for e in events if e["event"] == "evaluated" and (v := figure(e.get("val_loss"))) is not None]
    return found[-1] if found else last_known(columns.get("val_loss"))


def _first_time(events: Sequence[Mapping[str, Any]], run: Run) -> float | None:
    times = [t for e in events if (t := figure(e.get("time"))) is not None]
    return min(times) if times else figure(run.manifest().get("started_at"))


def _latest(events: Sequence[Mapping[str, Any]], metric: float | None) -> float | None:
    times = [t for e in events if (t := figure(e.get("time"))) is not None] + ([metric] if metric is not None else [])
    return max(times) if times else None


def figure(value: object) -> float | None:
    """A figure that can be one: JSON lets NaN and infinity through."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST
    return float(value) if known else None  # type: ignore[arg-type]


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def read_manifest(path: Path) -> dict[str, Any]:
    return read_json(path) or {}
