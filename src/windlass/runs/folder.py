"""Where does a run keep what it knows? One folder; every path in it is named here and nowhere else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from windlass.config import Loaded, Recipe, recipe_hash, validate
from windlass.errors import RunError
from windlass.files import (
    append_line_buffered,
    read_json,
    read_json_lines,
    read_last_json_line,
    write_atomic,
    write_json,
)
from windlass.runs.lock import holder


@dataclass(frozen=True)
class Run:
    """A run folder. Opening one changes nothing in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def jobs_file(self) -> Path:
        return self.path / "jobs.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def energy_file(self) -> Path:
        return self.path / "energy.jsonl"

    @property
    def eval_file(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def lock_file(self) -> Path:
        return self.path / "run.lock"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def trackers(self) -> Path:
        return self.path / "trackers"

    @property
    def requests(self) -> Path:
        """Small files by which another shell asks a live run for something (a profile, a save, a stop)."""
        return self.path / "requests"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:09d}"

    def heartbeat_file(self, rank: int) -> Path:
        return self.ranks / f"heartbeat-{rank:05d}.json"

    def error_file(self, rank: int) -> Path:
        return self.ranks / f"error-{rank:05d}.json"

    # -- writing ----------------------------------------------------------------------------------------------------

    def event(self, kind: str, /, **fields: Any) -> None:
        """One line of the run's life: `started`, `resumed`, `saved`, `fault`, ... with the time."""
        append_line_buffered(self.events_file, {"time": time.time(), "event": kind, **fields})

    def metric(self, line: dict[str, Any]) -> None:
        append_line_buffered(self.metrics_file, line)

    # -- reading ----------------------------------------------------------------------------------------------------

    def recipe(self) -> Recipe:
        value = read_json(self.config_file)
        if value is None:
            raise RunError(
                "runs.missing-damaged",
                f"{self.config_file} is missing or damaged",
                hint="is this a whole copy of a run folder?",
            )
        return validate(Recipe, value, str(self.config_file))

    def manifest(self) -> dict[str, Any]:
        return read_json(self.manifest_file) or {}

    def plan(self) -> dict[str, Any] | None:
        return read_json(self.plan_file)

    def events(self) -> Iterator[dict[str, Any]]:
        return read_json_lines(self.events_file)

    def metrics(self) -> Iterator[dict[str, Any]]:
        return read_json_lines(self.metrics_file)

    def last_metric(self) -> dict[str, Any] | None:
        return read_last_json_line(self.metrics_file)

    def errors(self) -> list[dict[str, Any]]:
        """Error records of ranks, by rank."""
        found = (read_json(p) for p in sorted(self.ranks.glob("error-*.json")))
        return [value for value in found if value is not None]


def open_run(path: Path | str) -> Run:
    """An existing run folder; a bare name is looked for in runs/."""
    given = Path(path)
    for candidate in (given, Path("runs") / given):
        if (candidate / "config.json").is_file():
            return Run(candidate)
    known = [p.parent.name for p in Path("runs").glob("*/config.json")]
    near = get_close_matches(given.name, known, n=3, cutoff=0.3) or sorted(known)[:5]
    hint = f"runs here: {', '.join(near)}" if near else "`windlass train RECIPE` makes one, by default in runs/<name>"
    what = "is no run folder (it has no config.json)" if given.exists() else "does not exist"
    raise RunError("runs.failed", f"{given} {what}", hint=hint)


def create_run(path: Path | str, loaded: Loaded) -> Run:
    """A new run folder, or the same run's existing one; a folder of another recipe is refused, unless nothing ever came of it."""
    run = Run(Path(path))
    old = read_json(run.config_file)
    if old is not None and _never_began(run):
        run.plan_file.unlink(missing_ok=True)
    elif old is not None:
        _refuse_other(run, validate(Recipe, old, str(run.config_file)), loaded.recipe)
    elif run.path.is_dir() and any(run.path.iterdir()) and not _only_ours(run):
        raise RunError(
            "runs.holds-other-files-run",
            f"{run.path} holds other files and is no run folder",
            hint="choose an empty or new folder with --run",
        )
    try:
        for folder in (run.path, run.ranks, run.checkpoints, run.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            "runs.run-folder-cannot-made",
            f"the run folder {run.path} cannot be made: {error.strerror}",
            hint="choose a folder you may write to with --run",
        ) from None
    write_atomic(run.recipe_file, loaded.text)
    write_json(run.config_file, loaded.recipe.model_dump(mode="json"))
    return run


def _never_began(run: Run) -> bool:
    """Its start was refused, and whoever mends the recipe tries again; not so where a job waits, or a process is about to begin."""
    traces = (run.events_file, run.metrics_file, run.jobs_file, run.manifest_file)
    return (
        not any(file.exists() for file in traces)
        and not (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))
        and holder(run.lock_file) is None
    )


def _only_ours(run: Run) -> bool:
    """Folders that a launcher or an earlier, cut-off start may have left; `data` is the demo's own."""
    ours = {
        "logs",
        "ranks",
        "checkpoints",
        "profile",
        "trackers",
        "requests",
        "data",
        "jobs.jsonl",
        "plan.json",
        "recipe.toml",
        "run.lock",
        "job.sh",
    }
    return all(p.name in ours or p.name.startswith(".") for p in run.path.iterdir())


def _refuse_other(run: Run, old: Recipe, new: Recipe) -> None:
    if recipe_hash(old) == recipe_hash(new):
        return
    a, b = json.loads(old.model_dump_json()), json.loads(new.model_dump_json())
    from windlass.config.load import flatten

    left, right = dict(flatten(a)), dict(flatten(b))
    differ = [
        k
        for k in {**left, **right}
        if left.get(k) != right.get(k) and k.split(".")[0] in ("name", "seed", "model", "data")
    ]
    shown = "; ".join(f"{k}: {left.get(k)!r} there, {right.get(k)!r} here" for k in differ[:4])
    raise RunError(
        "runs.belongs-another-recipe",
        f"{run.path} belongs to another recipe ({shown})",
        hint="choose another folder with --run, or another name in the recipe",
    )
