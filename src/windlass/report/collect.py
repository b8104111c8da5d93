"""All figures of a run folder as one value, which terminal, browser and report show. Only reads files."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from windlass.config import Recipe
from windlass.config.ramp import planned_tokens
from windlass.energy.ledger import Ledger, read_ledger
from windlass.energy.ledger import build as build_ledger
from windlass.energy.totals import RunEnergy, run_energy
from windlass.errors import RunError, WindlassError
from windlass.files import FileStamps, file_stamps, read_json, read_json_lines
from windlass.models.presets import model_spec
from windlass.report.columns import SAMPLE_LINES, Columns
from windlass.runs.events import (
    CheckpointRemoved,
    Evaluated,
    Event,
    FaultEvent,
    Finished,
    GaveUp,
    Hang,
    ProcessStart,
    Restarted,
    RolledBack,
    Saved,
    SignalReceived,
    Started,
    Stopped,
    WeightsImported,
    known_float,
    parse_event,
)
from windlass.runs.folder import Run, open_run
from windlass.runs.history import RunHistory, read_history
from windlass.runs.measured import Measured, known, last_known, measure, recent_median
from windlass.units import print_text

FAULTS = ("fault", "hang", "save_failed", "damaged", "rollback", "skipped", "gave_up")
BREAKS = ("signal", "stopped", "fault", "hang", "restarted", "resumed", "rollback")
# Events that lists leave out: there are too many of them, or they are too long.
HIDDEN_EVENTS = ("removed", "interval", "expert_loads", "layers")
SILENT_SECONDS = 120.0
# What a row of a list is made from: these columns; of a long file lines spread evenly and its tail, with more than the
# 200 lines of the medians.
BRIEF_FILE_BYTES, BRIEF_LINES, BRIEF_TAIL_BYTES = 256 << 10, 100, 160 << 10
BRIEF_KEYS = ("step", "tokens", "loss", "tokens_per_second", "mfu", "memory_bytes", "step_seconds", "time")

# Fields of a run whose recipe cannot be read.
NO_RECIPE: dict[str, Any] = {
    "recipe": {}, "cluster": "unknown", "model": "unknown", "parameters": None, "active_parameters": None,
    "target_tokens": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run; None: unknown."""

    name: str
    path: str
    status: str  # finished, running, stopped, failed or unknown, from the last events
    problem: str | None  # what is missing or damaged in the folder
    recipe: dict[str, Any]
    cluster: str
    model: str
    parameters: int | None
    active_parameters: int | None
    layout: dict[str, Any] | None
    nodes: int | None
    node_hours: float | None  # used by all attempts
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
    silent_after_seconds: float  # a running run that writes nothing for this long is shown as silent
    energy: RunEnergy
    life: RunHistory | None  # None before the first start
    checkpoints: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    data: dict[str, Any]
    manifest: dict[str, Any]
    plan_rows: list[tuple[str, float | None, float | None]]  # (what, predicted, measured)
    lines: int
    events: list[Event] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; events as in events.jsonl, `breaks` are interruptions and resumes."""
        events = [e.as_dict() for e in self.events]
        breaks, faults = ([e for e in events if e["event"] in kinds] for kinds in (BREAKS, FAULTS))
        return {**asdict(self), "events": events, "breaks": breaks, "faults": faults}


def collect(
    where: Run | Path | str,
    *,
    columns: Columns | None = None,
    factors: Mapping[str, float] | None = None,
    events: list[Event] | None = None,
    brief: bool = False,
) -> RunSummary:
    """One run. `columns`, `events`: those of a caller that has them (the dashboard); else they are read here.

    `factors`: PUE and intensities instead of those that the run knows; see `carbon`. `brief`: for a row of a list,
    without recipe, manifest, plan, data, checkpoints and evaluations.
    """
    run = where if isinstance(where, Run) else open_run(where)
    events = read_events(run) if events is None else events
    if columns is None:
        columns = Columns(run.metrics_file)
        columns.refresh()
    recipe, problem = None, None
    try:
        recipe = run.recipe()
    except WindlassError as error:
        problem = error.message
    manifest: dict[str, Any] = {} if brief else clean(run.manifest())
    has_steps = any(isinstance(e, (Saved, Stopped, Finished)) for e in events)
    problems = [  # (text, whether it holds): what a folder that was copied in part, or torn, does not say
        (problem or "", problem is not None),
        ("manifest.json is damaged: environment and data ledger are unknown",
         not brief and not manifest and run.manifest_file.exists() and read_json(run.manifest_file) is None),
        ("events.jsonl is missing or empty: state, saves and interruptions are unknown", len(columns) and not events),
        ("metrics.jsonl is missing or empty: loss and speed are unknown",
         has_steps and not len(columns) and not any(isinstance(e, WeightsImported) for e in events)),
    ]  # fmt: skip
    start = next((e for e in reversed(events) if isinstance(e, ProcessStart)), Started())
    layout = recipe.layout.model_dump(mode="json") if recipe and recipe.layout else None
    if isinstance(start.layout, (dict, str)):
        layout = {"layout": start.layout} if isinstance(start.layout, str) else start.layout
    times = known(columns.get("time"))
    gaps = np.diff(times[-50:])
    event_times = [e.time for e in events if e.time is not None]
    measured = measure(columns.get, start.world_size)
    tokens = measured.tokens
    stated = _recipe_fields(recipe, brief, measured) if recipe else {**NO_RECIPE, "name": print_text(run.name)}
    target, speed = stated["target_tokens"], measured.tokens_per_second
    statuses = (s for event in reversed(events) for kind, s in STATUS.items() if isinstance(event, kind))
    status = next(statuses, "running" if len(columns) else "unknown")
    is_under_way = status == "running" and target is not None and tokens is not None and bool(speed)
    plan = {} if brief else run.plan() or {}
    chosen = plan["plan"] if isinstance(plan.get("plan"), dict) else {}
    predicted = {key: number for key, value in chosen.items() if (number := known_float(value)) is not None}
    if brief:
        ledger = build_ledger(read_json_lines(run.energy_file), events)
    else:
        ledger = _ledger(run.path.absolute(), file_stamps(run.energy_file, run.events_file))
    energy = run_energy(ledger, recipe, tokens, measured.step, predicted.get("mwh"), factors)
    history = read_history(events, columns.get)
    return RunSummary(
        path=str(run.path),
        status=status,
        problem=print_text("; ".join(text for text, holds in problems if holds)) or None,
        layout=layout,
        nodes=start.nodes or (recipe.nodes if recipe else None),
        node_hours=history.node_hours,
        world_size=start.world_size,
        device=start.device or (m if isinstance(m := manifest.get("device"), str) and m else None),
        # The event, because the last validation of a run is followed by no metrics line.
        val_loss=next(
            (e.val_loss for e in reversed(events) if isinstance(e, Evaluated) and e.val_loss is not None),
            last_known(columns.get("val_loss")),
        ),
        started_at=min(event_times) if event_times else known_float(manifest.get("started_at")),
        updated_at=max([*event_times, *times[-1:].tolist()], default=None),
        eta_seconds=((target or 0.0) - (tokens or 0.0)) / (speed or 1.0) if is_under_way else None,
        # Five times the usual gap between lines: large steps, or a line every hundred steps, are not silence.
        silent_after_seconds=max(SILENT_SECONDS, 5 * (recent_median(gaps[gaps > 0], skip=0) or 0.0)),
        energy=energy,
        life=history if history.segments else None,
        events=events,
        checkpoints=[] if brief else _checkpoints(run, events),
        evaluations=[] if brief else clean(list(read_json_lines(run.eval_file))),
        data={} if brief else clean(_data(run, recipe)),
        manifest=manifest,
        plan_rows=_plan_rows(predicted, measured, history.node_hours, energy, plan.get("device"), status),
        lines=len(columns),
        **stated,
        **vars(measured),
    )


def read_events(run: Run) -> list[Event]:
    """A run's files may come from anybody, so control characters are removed from every text."""
    return [parse_event(clean(line, lines=False)) for line in read_json_lines(run.events_file)]


def brief_columns(run: Run, events: Iterable[Event]) -> Columns:
    """The metrics that a row of a list shows."""
    file = run.metrics_file
    if file.exists() and file.stat().st_size > BRIEF_FILE_BYTES:
        return sample_columns(run, events, BRIEF_LINES, BRIEF_TAIL_BYTES, BRIEF_KEYS)
    columns = Columns(file, keys=BRIEF_KEYS)
    columns.refresh()
    return columns


def sample_columns(
    run: Run,
    events: Iterable[Event],
    lines: int | None = None,
    tail_bytes: int | None = None,
    keys: Sequence[str] | None = None,
) -> Columns:
    """A first look at the metrics of a long run."""
    moments = [e.time for e in events if isinstance(e, (ProcessStart, RolledBack)) and e.time is not None]
    return Columns.sample(run.metrics_file, lines or SAMPLE_LINES, times=moments, tail_bytes=tail_bytes, keys=keys)


def find_runs(folder: Path | str) -> list[Run]:
    """Every run folder at or below a folder (three levels), by path."""
    root = Path(folder)
    if not root.is_dir():
        raise RunError(
            "report.not-a-folder",
            f"{root} is not a folder",
            hint="name a run folder, or the folder that holds several (runs/)",
        )
    signs = ("recipe.toml", "metrics.jsonl", "events.jsonl", "manifest.json")
    return [Run(p) for p in folders_with(root, "config.json", 3) if any((p / name).exists() for name in signs)]


def folders_with(root: Path, name: str, levels: int) -> list[Path]:
    """Folders that contain a given file, at or up to `levels` below a folder. Links that lead out of it are not
    followed, and hidden folders (such as one that `windlass import` is writing) are not searched."""
    folders = {p.parent for level in range(levels + 1) for p in root.glob("[!.]*/" * level + name)}
    return [p for p in sorted(folders) if p.resolve().is_relative_to(root.resolve())]


def clean(value: Any, *, lines: bool = True) -> Any:
    """The same value with control characters taken out of every text; `lines`: line breaks stay."""
    if isinstance(value, str):
        return print_text(value, lines=lines)
    if isinstance(value, dict):
        return {print_text(str(k)): clean(v, lines=lines) for k, v in value.items()}
    return [clean(v, lines=lines) for v in value] if isinstance(value, (list, tuple)) else value


STATUS: dict[type[Event], str] = {
    Finished: "finished", Stopped: "stopped", SignalReceived: "stopped", GaveUp: "failed", FaultEvent: "failed",
    Hang: "failed", ProcessStart: "running", Restarted: "running",
    WeightsImported: "imported",
}  # fmt: skip


def _recipe_fields(recipe: Recipe, brief: bool, measured: Measured) -> dict[str, Any]:
    m = recipe.model
    total = active = None
    # A Hugging Face config may not have been copied.
    with contextlib.suppress(WindlassError, OSError, KeyError, TypeError, ValueError):
        if not brief:
            total, active = model_spec(m).params.total, model_spec(m).params.active
    target = planned_tokens(recipe, measured.step, measured.tokens)
    sizes = f", {m.layers} layers, width {m.width}, {m.heads} heads, vocabulary {m.vocab:,}" if m.vocab else ""
    return {
        "name": print_text(recipe.name),
        "recipe": {} if brief else clean(recipe.model_dump(mode="json")),
        "cluster": print_text(recipe.cluster),
        "model": print_text(f"Hugging Face {m.config}" if m.family == "hf" else m.family + sizes),
        "parameters": total,
        "active_parameters": active,
        "target_tokens": None if target is None else float(target),
    }


@lru_cache(maxsize=256)
def _ledger(path: Path, stamps: FileStamps) -> Ledger:
    """Read again only when the files have changed: live views ask every second, and a long run has many lines."""
    return read_ledger(Run(path))


def _plan_rows(
    predicted: Mapping[str, float],
    measured: Measured,
    node_hours: float | None,
    energy: RunEnergy,
    device: object,
    status: str,
) -> list[tuple[str, float | None, float | None]]:
    # A run logs the allocator's peak on a GPU and the whole process on a CPU: only the same kind is compared.
    memory = ("peak memory allocated on a device, bytes", "memory_allocated_gib")
    if device == "cpu":
        memory = ("memory of a process, bytes", "memory_gib")
    # Energy of a part of the run, or of some of its nodes, cannot be compared with that of the whole run.
    ledger = energy.ledger
    all_nodes = ledger.nodes_measured >= (ledger.nodes_expected or 1)
    is_complete = energy.basis == "measured" and status == "finished" and all_nodes
    rows = (
        ("tokens/s", "tokens_per_second", 1.0, measured.tokens_per_second),
        ("MFU", "mfu", 1.0, measured.mfu),
        ("step, s", "step_seconds", 1.0, measured.step_seconds),
        (*memory, 2.0**30, measured.memory_bytes),
        ("compute of the whole run, node-hours", "node_hours", 1.0, node_hours if status == "finished" else None),
        ("energy of the whole run, kWh", "mwh", 1e3, energy.carbon.kwh if energy.carbon and is_complete else None),
    )
    return [(title, predicted[key] * scale, value) for title, key, scale, value in rows if key in predicted]


def _checkpoints(run: Run, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Saves of the run with what became of them; a folder that nobody recorded is listed too."""
    saves: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Saved) and event.step is not None:
            sizes = {key: getattr(event, key) for key in ("time", "tokens", "bytes", "stall_seconds", "write_seconds")}
            state = "kept" if run.checkpoint(event.step).is_dir() else "not in this copy of the folder"
            saves[event.step] = {"step": event.step, **sizes, "state": state}
        elif isinstance(event, CheckpointRemoved) and event.step in saves:
            saves[event.step]["state"] = f"removed ({event.reason or 'superseded'})"
    digits = [folder.name.removeprefix("step-") for folder in run.checkpoints.glob("step-*")]
    for step in (int(d) for d in digits if d.isdigit()):
        saves.setdefault(step, {"step": step, "state": "on disk, but not in events.jsonl"})
    return [saves[step] for step in sorted(saves)]


def _data(run: Run, recipe: Recipe | None) -> dict[str, Any]:
    """The data ledger in the run's manifest; else that of the token store, where it can still be reached."""
    recorded = run.manifest().get("data")
    if isinstance(recorded, dict) and recorded:
        return recorded
    store = recipe.data.store if recipe else None
    bases = (Path(), run.path, run.path.parent, run.path.parent.parent)
    for folder in [base / store for base in bases] if store else []:
        ledger, about = read_json(folder / "ledger.json"), read_json(folder / "manifest.json")
        if ledger is not None:
            settings = {key: about.get(key) for key in ("ledger_hash", "settings")} if about else {}
            return {"store": store, **settings, **ledger}
    return {"store": store} if store else {}
