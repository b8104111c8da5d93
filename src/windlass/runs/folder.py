"""The run folder: every path in it, and what may change between two starts of one run."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, overload

from windlass.config import Loaded, Recipe, recipe_hash, validate
from windlass.config.load import flatten, model_problems, read_toml, refuse
from windlass.errors import ConfigError, RunError
from windlass.files import (
    append_line_buffered,
    read_json,
    read_json_lines,
    read_last_json_line,
    write_atomic,
    write_json,
)
from windlass.runs.events import Event, LayoutChanged, ProcessStart, RecipeChanged, parse_event
from windlass.runs.faults import FaultRecord, parse_fault
from windlass.runs.lock import holder
from windlass.runs.metrics import MetricsLine

E = TypeVar("E", bound=Event)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFolder:
    """A path below the run folder, as an attribute of `Run`."""

    name: str

    def __get__(self, run: Run, owner: type[Run]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class Run:
    """A run folder. Opening one changes nothing in it."""

    path: Path

    recipe_file = _InFolder("recipe.toml")
    config_file = _InFolder("config.json")
    plan_file = _InFolder("plan.json")
    manifest_file = _InFolder("manifest.json")
    # Identity of the token store: sizes and checksums of its files, see data/identity.py.
    store_file = _InFolder("store.json")
    # Scores of preference pairs by the starting model, see train/preference.py.
    reference_file = _InFolder("reference.npy")
    held_out_reference_file = _InFolder("reference-validation.npy")
    jobs_file = _InFolder("jobs.jsonl")
    metrics_file = _InFolder("metrics.jsonl")
    events_file = _InFolder("events.jsonl")
    energy_file = _InFolder("energy.jsonl")
    eval_file = _InFolder("eval.jsonl")
    lock_file = _InFolder("run.lock")
    report_file = _InFolder("report.html")
    # Text and tags that people give the run in the browser, see report/dash/notes.py.
    notes_file = _InFolder("notes.json")
    ranks = _InFolder("ranks")
    checkpoints = _InFolder("checkpoints")
    profile = _InFolder("profile")
    logs = _InFolder("logs")
    trackers = _InFolder("trackers")
    starts = _InFolder("starts")
    # Small files by which another shell asks a live run for something (a profile, a save, a stop).
    requests = _InFolder("requests")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def argument(self) -> str:
        """The folder as it is written in a shell command."""
        return shlex.quote(str(self.path))

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:09d}"

    def heartbeat_file(self, rank: int) -> Path:
        return self.ranks / f"heartbeat-{rank:05d}.json"

    def hang_file(self, started_at: float | None) -> Path:
        """Of the first rank of a start that sees a hang: it exists, so that the others write their heartbeats at once,
        and then says which rank is the cause."""
        return self.ranks / f"hang-{started_at}.json"

    def error_file(self, rank: int) -> Path:
        return self.ranks / f"error-{rank:05d}.json"

    def record(self, event: Event) -> None:
        """Append an event, with the time where it has none."""
        stamp = time.time() if event.time is None else event.time
        append_line_buffered(self.events_file, {**event.as_dict(), "time": stamp})

    def record_metrics(self, line: MetricsLine) -> None:
        """Append a metrics line; on a full disk it waits in memory, because logging must not stop training."""
        append_line_buffered(self.metrics_file, line.as_dict())

    @overload
    def events(self) -> Iterator[Event]: ...

    @overload
    def events(self, kind: type[E]) -> Iterator[E]: ...

    def events(self, kind: type[Event] = Event) -> Iterator[Event]:
        """The events of one class (all by default), oldest first."""
        parsed = (parse_event(line) for line in read_json_lines(self.events_file))
        return (event for event in parsed if isinstance(event, kind))

    def metrics_lines(self) -> Iterator[MetricsLine]:
        """Every line of metrics.jsonl, oldest first, also those of steps that were repeated later."""
        return (MetricsLine.from_dict(line) for line in read_json_lines(self.metrics_file))

    def last_metrics(self) -> MetricsLine:
        """The newest line; all values are None when there is no line yet."""
        return MetricsLine.from_dict(read_last_json_line(self.metrics_file) or {})

    def faults(self) -> list[FaultRecord]:
        values = (read_json(path) for path in sorted(self.ranks.glob("error-*.json")))
        return [parse_fault(value) for value in values if value is not None]

    def recipe(self) -> Recipe:
        value = read_json(self.config_file)
        if value is None and self.config_file.is_file():
            raise RunError(
                "runs.config-damaged",
                f"{self.config_file} is damaged: {self.config_file.stat().st_size:,} bytes that are not a JSON object",
                hint="copy it again, or recreate it: `windlass train "
                f"{shlex.quote(str(self.recipe_file))} --run {self.argument}`, with the overrides of the first start; "
                "checkpoints, metrics and events are kept",
            )
        if value is None:
            raise RunError("runs.config-missing", f"{self.config_file} is missing", hint="copy the complete run folder")
        value.pop("resolved", None)
        recipe = validate(Recipe, value, str(self.config_file), recorded=True)
        refuse("config.invalid", str(self.config_file), list(model_problems(recipe.model)), "copy the file again")
        return recipe

    def layout_from(self) -> str | None:
        """Who chose the layout in config.json: "recipe" or "planner"; None before there is a config.

        Run folders of version 0.1 do not say it: there, the planner chose it when recipe.toml has no `[layout]`.
        """
        config = read_json(self.config_file)
        if config is None or isinstance(config.get("resolved"), dict):
            return config["resolved"].get("layout_from") if config else None
        try:
            written, _ = read_toml(self.recipe_file)
        except ConfigError:
            return "recipe"
        return "recipe" if not written or "layout" in written else "planner"

    def manifest(self) -> dict[str, Any]:
        return read_json(self.manifest_file) or {}

    def plan(self) -> dict[str, Any] | None:
        return read_json(self.plan_file)


def open_run(path: Path | str) -> Run:
    """An existing run folder; a bare name is looked for in runs/."""
    wanted = Path(path)
    for candidate in (wanted, Path("runs") / wanted):
        if (candidate / "config.json").is_file():
            logger.info("run: %s", candidate.absolute())
            return Run(candidate)
    names = sorted(p.parent.name for p in Path("runs").glob("*/config.json"))
    near = get_close_matches(wanted.name.removesuffix(".toml"), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    hint += (
        f"`ls runs` lists {'the only run' if len(names) == 1 else f'all {len(names)} runs'}, `windlass dash` shows them"
    )
    raise RunError(
        "runs.not-a-run-folder",
        f"{wanted} " + ("is not a run folder (no config.json)" if wanted.exists() else "does not exist"),
        hint=hint
        if names
        else f"there is no run in {Path('runs').resolve()}; `windlass train RECIPE` creates one, by default in runs/<name>",
    )


# What a launcher or a start that was cut off may have left before config.json is written; `data` is the demo's own.
_LEFTOVERS = {
    "logs",
    "ranks",
    "checkpoints",
    "profile",
    "trackers",
    "requests",
    "starts",
    "data",
    "jobs.jsonl",
    "plan.json",
    "recipe.toml",
    "run.lock",
    "job.sh",
}


def create_run(path: Path | str, loaded: Loaded, *, layout_from: str = "recipe") -> Run:
    """A new run folder, or the existing one of the same run.

    A run that never began takes any recipe, unless a job waits for it. Later starts may change the keys in CHANGEABLE
    and PLANNED_KEYS, and the change is recorded as an event; any other change is refused. `layout_from` says who chose
    the layout: the recipe or the planner.
    """
    run = Run(Path(path))
    changes = check_run_folder(run, loaded.recipe)
    try:
        for folder in (run.path, run.ranks, run.checkpoints, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            "runs.folder-not-writable",
            f"the run folder {run.path} cannot be created: {error.strerror}",
            hint="choose a folder you may write to with --run",
        ) from None
    if not has_begun(run):
        run.plan_file.unlink(missing_ok=True)
    write_atomic(run.recipe_file, loaded.text)
    phase = {"name": "main", "steps": loaded.recipe.train.steps, "tokens": loaded.recipe.data.tokens}
    resolved = {"layout_from": layout_from, "phases": [phase]}
    write_json(run.config_file, {**loaded.recipe.model_dump(mode="json"), "resolved": resolved})
    for event in changes:
        run.record(event)
    return run


def has_begun(run: Run) -> bool:
    """Whether a start or a job of this run has left anything; a folder without is that of a start that was refused."""
    files = (run.events_file, run.metrics_file, run.jobs_file, run.manifest_file, *run.checkpoints.glob("*"))
    return any(file.exists() for file in files) or holder(run.lock_file) is not None


def discard_unstarted(run: Run) -> None:
    """Remove what a start has written that failed before its first event, so that no list shows a run that never was.
    Other files of the folder stay."""
    if not run.path.is_dir() or any(run.events(ProcessStart)) or run.metrics_file.exists() or run.jobs_file.exists():
        return
    if any(run.checkpoints.glob("*")) or holder(run.lock_file) is not None:
        return
    names = (run.config_file, run.events_file, run.store_file, run.manifest_file, run.energy_file)
    for name in (_LEFTOVERS - {"data"}) | {path.name for path in names}:
        path = run.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds other files, or was never made
        run.path.rmdir()


def check_run_folder(run: Run, recipe: Recipe) -> list[Event]:
    """The changes that a start with this recipe would record; RunError where it may not use the folder. Writes
    nothing."""
    if read_json(run.config_file) is not None:
        return accepted_changes(run, run.recipe(), recipe) if has_begun(run) else []
    if run.config_file.is_file():
        return [_replaced_config(run, recipe)]
    other = [p.name for p in run.path.iterdir()] if run.path.is_dir() else []
    other = sorted(name for name in other if name not in _LEFTOVERS and not name.startswith("."))
    if other or (run.path.exists() and not run.path.is_dir()):
        raise RunError(
            "runs.folder-not-empty",
            f"{run.path} is not a run folder and holds other files ({', '.join(other[:3])})"
            if other
            else f"{run.path} is a file, not a folder",
            hint="choose an empty or new folder with --run",
        )
    return []


def _replaced_config(run: Run, recipe: Recipe) -> Event:
    """The event for a damaged config.json that is written anew; refused unless the manifest says it is the same run."""
    manifest = run.manifest()
    if manifest.get("recipe_hash") != (written := recipe_hash(recipe)):
        raise RunError(
            "runs.config-damaged",
            f"{run.config_file} is damaged, and this recipe (hash {written}) is not the one in the run's manifest "
            f"(hash {manifest.get('recipe_hash')}): name, seed, model or data differ",
            hint=f"start from {run.recipe_file} with the overrides of the first start",
        )
    return RecipeChanged(changes={"config.json": ("damaged", f"written again from a recipe with hash {written}")})


# Keys and tables that may change between two starts. The second line changes no result. The last three say where the
# run and its data are: a run may be moved, and the token store is compared with store.json.
CHANGEABLE = (
    "train.steps", "data.tokens", "save", "trackers", "launch", "profile", "energy", "notes", "project",
    "train.log_every", "train.eval_every", "train.watchdog_seconds",
    "cluster", "nodes", "data.store",
)  # fmt: skip
# What the planner chooses for a number of devices; it changes no result.
PLANNED_KEYS = ("layout", "train.recompute", "train.recompute_budget")


def _is_below(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def accepted_changes(run: Run, old: Recipe, new: Recipe) -> list[Event]:
    """Events for the keys that differ; RunError with a diff when one of them may not change."""
    before, after = (dict(flatten(recipe.model_dump(mode="json"))) for recipe in (old, new))
    changes = {k: (before.get(k), after.get(k)) for k in {**before, **after} if before.get(k) != after.get(k)}
    refused = {k: v for k, v in changes.items() if not _is_below(k, CHANGEABLE + PLANNED_KEYS)}
    if refused:
        diff = "".join(f"\n  {key}: {a!r} -> {b!r}" for key, (a, b) in refused.items())
        raise RunError(
            "runs.recipe-changed",
            f"{run.path} was started with another recipe; {len(refused)} key{'s' * (len(refused) > 1)} changed:{diff}",
            hint=f"change them back, or start a new run from these weights: `windlass train RECIPE "
            f"--run NEW_FOLDER save.load={run.path}`; train.steps, data.tokens, train.log_every, train.eval_every, "
            "train.watchdog_seconds, [layout], [save], [trackers], [launch], [profile], [energy], [project] and notes may change",
        )
    events: list[Event] = []
    if recorded := {key: value for key, value in changes.items() if _is_below(key, CHANGEABLE)}:
        events.append(RecipeChanged(changes=recorded))
    if any(_is_below(k, PLANNED_KEYS) for k in changes):
        layouts = [
            {k.removeprefix("layout."): v for k, v in side.items() if _is_below(k, PLANNED_KEYS)}
            for side in (before, after)
        ]
        events.append(LayoutChanged(old=layouts[0], new=layouts[1], reason="changed in the recipe or planned again"))
    return events
