"""The folder of a sweep: its paths, its points' outcomes, and the sweep that is being run. Points are run folders."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.config.sweep import LoadedSweep, SweepConfig
from windlass.config.toml_text import to_toml
from windlass.errors import RunError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json
from windlass.launch.sweep.expect import Expectation
from windlass.launch.sweep.points import SweepPoint
from windlass.runs.folder import Run


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "sweep.json"

    @property
    def outcomes_file(self) -> Path:
        return self.path / "outcomes.jsonl"

    @property
    def jobs_file(self) -> Path:
        return self.path / "jobs.jsonl"

    @property
    def page(self) -> Path:
        return self.path / "report.html"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    def table(self, kind: str) -> Path:
        return self.path / f"results.{kind}"

    def point(self, name: str) -> Run:
        return Run(self.path / "points" / name)

    def recipe(self, name: str) -> Path:
        return self.path / "recipes" / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.point(name).logs / "point.log"

    def add_outcome(self, line: dict[str, Any]) -> None:
        """One more line of the sweep's own record, and the same in the point's folder."""
        line = {"time": time.time(), **line}
        append_line(self.outcomes_file, line)
        write_json(self.point(line["point"]).path / "outcome.json", line, sync=False)

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Point -> its newest outcome."""
        return {
            line["point"]: line
            for line in read_json_lines(self.outcomes_file)
            if isinstance(line.get("point"), str) and line.get("outcome")
        }

    def tries(self) -> Counter[str]:
        """Point -> how many outcomes it has."""
        return Counter(str(line.get("point")) for line in read_json_lines(self.outcomes_file))

    def begin(self, name: str, job: str | None) -> None:
        """Which job runs the point: the only trace of it if the allocation dies."""
        write_json(self.point(name).logs / "begun.json", {"job": job, "time": time.time()}, sync=False)

    def begun(self, name: str) -> dict[str, Any]:
        return read_json(self.point(name).logs / "begun.json") or {}

    def set_aside(self, name: str) -> None:
        """Keep an earlier try of a point: results never overwrite each other."""
        run = self.point(name)
        if run.path.exists():
            # One level deeper than the points, so that `windlass plan --calibrate` does not take it for one.
            numbered = (self.path / "earlier" / name / str(number) for number in itertools.count(1))
            aside = next(path for path in numbered if not path.exists())
            aside.parent.mkdir(parents=True, exist_ok=True)
            run.path.rename(aside)


def open_sweep_folder(path: Path, loaded: LoadedSweep, points: Sequence[SweepPoint]) -> SweepFolder:
    """A new folder for this sweep, or its own existing one; a folder of another sweep file is refused, untouched."""
    folder, sweep, names = SweepFolder(path), loaded.sweep, [point.name for point in points]
    old = read_json(folder.record)
    # A sweep that was killed while it wrote its first file leaves a temporary file of that name.
    if old is None and path.is_dir() and any(not p.match(".sweep.json.*.tmp") for p in path.iterdir()):
        raise RunError(
            "sweep.folder-not-empty",
            f"{path} holds other files and is not a sweep folder (no sweep.json)",
            hint="choose an empty or new folder with --run",
        )
    if old is not None and old.get("hash") != loaded.hash:
        count, before, now = old.get("points"), set(old.get("names") or ()), set(names)
        groups = ((sorted(before - now), "gone"), (sorted(now - before), "new"))
        changes = "; ".join(f"{len(names)} {kind}, for example {names[0]}" for names, kind in groups if names)
        difference = changes or "the points have the same names, but the base recipe or command differs"
        was = f"its file was {old.get('file')}, {count} point{'s' * (count != 1)}"
        raise RunError(
            "sweep.folder-of-other-sweep",
            f"{path} belongs to another sweep: {was} ({difference})",
            hint="choose another folder with --run, or give the changed sweep a new `name`",
        )
    path.mkdir(parents=True, exist_ok=True)
    shown = sweep.model_dump(mode="json")
    if old is None or old.get("sweep") != shown:  # how it is shown and packed may change between two calls
        record = {
            "hash": loaded.hash,
            "name": sweep.name,
            "file": str(loaded.path.absolute()),
            "points": len(points),
            "names": names,
            "grid": [point.name for point in points if point.in_grid],
            "created_at": old["created_at"] if old else time.time(),
            "sweep": shown,
        }
        write_json(folder.record, record)  # first: it marks the folder as ours if what follows is interrupted
        write_atomic(path / "sweep.toml", loaded.text)
    for point in (point for point in points if point.raw is not None):
        text = to_toml(point.raw or {}, f"Point {point.name} of sweep {sweep.name}.")
        write_atomic(folder.recipe(point.name), text, sync=False)
    return folder


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    loaded: LoadedSweep
    folder: SweepFolder
    points: Sequence[SweepPoint]
    expected: Sequence[Expectation]

    @property
    def sweep(self) -> SweepConfig:
        return self.loaded.sweep

    def point(self, name: str) -> SweepPoint:
        return next(point for point in self.points if point.name == name)

    @cached_property
    def expectations(self) -> dict[str, Expectation]:
        """By the point's name."""
        return {point.name: expected for point, expected in zip(self.points, self.expected, strict=True)}
