"""Where does a sweep keep what it knows? One folder; every path in it is named here. Points are ordinary run folders below it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config.sweep import LoadedSweep
from windlass.errors import RunError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json
from windlass.launch.sweep.points import Point
from windlass.launch.sweep.toml import to_toml
from windlass.runs.folder import Run


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    @property
    def file(self) -> Path:
        """The sweep as it was given."""
        return self.path / "sweep.toml"

    @property
    def record(self) -> Path:
        return self.path / "sweep.json"

    @property
    def outcomes_file(self) -> Path:
        return self.path / "outcomes.jsonl"

    @property
    def lock_file(self) -> Path:
        return self.path / "sweep.lock"

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

    # -- outcomes ---------------------------------------------------------------------------------------------------

    def add_outcome(self, line: dict[str, Any]) -> None:
        """One more line of the sweep's own record, and the same beside what the point left."""
        told = {"time": time.time(), **line}
        append_line(self.outcomes_file, told)
        write_json(self.point(line["point"]).path / "outcome.json", told, sync=False)

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Point -> its newest outcome."""
        found: dict[str, dict[str, Any]] = {}
        for line in read_json_lines(self.outcomes_file):
            if isinstance(line.get("point"), str) and isinstance(line.get("outcome"), str):
                found[line["point"]] = line
        return found

    def tries(self) -> Counter[str]:
        """Point -> how often it has got an outcome."""
        return Counter(str(line.get("point")) for line in read_json_lines(self.outcomes_file))

    def begin(self, name: str, job: str | None) -> None:
        """Who runs the point: if its allocation dies, that is all there is to know it by."""
        write_json(self.point(name).logs / "begun.json", {"job": job, "time": time.time()}, sync=False)

    def begun(self, name: str) -> dict[str, Any]:
        return read_json(self.point(name).logs / "begun.json") or {}

    def set_aside(self, name: str) -> Path | None:
        """An earlier try of a point makes room and is kept: results never overwrite each other."""
        run = self.point(name)
        if not run.path.exists():
            return None
        for number in range(1, 10_000):
            # One level deeper than the points, so that `windlass plan --calibrate` does not take it for one.
            aside = self.path / "earlier" / name / str(number)
            if not aside.exists():
                aside.parent.mkdir(parents=True, exist_ok=True)
                run.path.rename(aside)
                return aside
        raise RunError(
            "launch.been-tried-times", f"{name} has been tried 10,000 times", hint=f"remove {self.path / 'earlier'}"
        )


def open_sweep_folder(path: Path, loaded: LoadedSweep, points: Sequence[Point]) -> SweepFolder:
    """A new folder for this sweep, or its own existing one; a folder of another sweep file is refused, untouched."""
    folder = SweepFolder(path)
    old = read_json(folder.record)
    if old is None and path.is_dir() and any(not _unfinished(entry) for entry in path.iterdir()):
        raise RunError(
            "launch.holds-other-files-sweep",
            f"{path} holds other files and is no sweep folder",
            hint="choose an empty or new folder with --run",
        )
    if old is not None and old.get("hash") != loaded.hash:
        raise RunError(
            "launch.belongs-another-sweep-file",
            f"{path} belongs to another sweep: its file was {old.get('file')}, {old.get('points')} point{'s' * (old.get('points') != 1)} ({_difference(old, points)})",
            hint="choose another folder with --run, or give the changed sweep a new `name`",
        )
    path.mkdir(parents=True, exist_ok=True)
    shown = loaded.sweep.model_dump(mode="json")
    if old is None or old.get("sweep") != shown:  # how it is shown and packed may change between two calls
        write_json(  # first of all: what follows may be stopped at any time, and the folder is known as ours
            folder.record,
            {
                "hash": loaded.hash, "name": loaded.sweep.name, "file": str(loaded.path.absolute()), "points": len(points),
                "names": [p.name for p in points], "grid": [p.name for p in points if p.in_grid],
                "created_at": old["created_at"] if old else time.time(), "sweep": shown,
            },
        )  # fmt: skip
        write_atomic(folder.file, loaded.text)
    for point in points:
        if point.raw is not None:
            write_atomic(
                folder.recipe(point.name),
                to_toml(point.raw, f"Point {point.name} of sweep {loaded.sweep.name}."),
                sync=False,
            )
    return folder


def _unfinished(entry: Path) -> bool:
    """What a sweep that was killed while it wrote its first file leaves."""
    return entry.name.startswith(".sweep.json.") and entry.name.endswith(".tmp")


def _difference(old: dict[str, Any], points: Sequence[Point]) -> str:
    before, now = set(old.get("names") or ()), {p.name for p in points}
    if before == now:
        return "the points have the same names, but the base recipe or command differs"
    gone, new = sorted(before - now), sorted(now - before)
    parts = [f"{len(part)} {word}, for example {part[0]}" for part, word in ((gone, "gone"), (new, "new")) if part]
    return "; ".join(parts)
