"""What does a sweep's folder say? Its own rows (results.json, written point by point) in the words and charts of its own page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config.load import read_toml, validate
from windlass.config.sweep import SweepConfig
from windlass.errors import WindlassError
from windlass.figures import Note, Section
from windlass.figures.sweep import counts, sweep_sections
from windlass.files import read_json


@dataclass(frozen=True)
class SweepView:
    """A sweep as it stands; `problem` says why its rows cannot be shown."""

    path: Path
    name: str
    title: str
    sweep: SweepConfig | None
    rows: list[dict[str, Any]]
    rank_by: str
    grid: frozenset[str] | None
    problem: str | None = None

    @property
    def id(self) -> str:
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]

    @property
    def progress(self) -> str:
        """`7 of 12 points have an outcome`."""
        done = len(self.rows) - counts(self.rows).get("not run", 0)
        return f"{done} of {len(self.rows)} points have an outcome"

    def sections(self) -> list[Section]:
        if self.sweep is None or not self.rows:
            return [Section("", (Note(self.problem or "No point has an outcome yet.", "warning"),), id="winner")]
        return sweep_sections(self.sweep, self.rows, self.rank_by, self.grid)


def find_sweeps(folder: Path) -> list[SweepView]:
    """Sweep folders at or below a folder (two levels), the newest first. A link that leads out of it is not followed."""
    root = folder.resolve()
    found = {p.parent for depth in ("", "*/", "*/*/") for p in folder.glob(f"{depth}sweep.json")}
    inside = [p for p in found if p.resolve().is_relative_to(root)]
    return [read_sweep(p) for p in sorted(inside, key=_written_at, reverse=True)]


def _written_at(path: Path) -> float:
    files = [f for f in (path / "results.json", path / "outcomes.jsonl", path / "sweep.json") if f.exists()]
    return max((f.stat().st_mtime for f in files), default=0.0)


def read_sweep(path: Path) -> SweepView:
    record, found = read_json(path / "sweep.json") or {}, read_json(path / "results.json") or {}
    sweep, problem = _config(path, record)
    raw = found.get("rows")
    rows = [r for r in raw if isinstance(r, dict) and isinstance(r.get("point"), str)] if isinstance(raw, list) else []
    grid = record.get("grid")
    if not rows and problem is None:
        problem = (
            f"No results.json in {path.name} yet: it is written after each point, or by `windlass sweep FILE --report`."
        )
    return SweepView(
        path=path, name=str(record.get("name") or path.name), title=(sweep.title if sweep else "") or path.name, sweep=sweep, rows=rows,
        rank_by=str(found.get("rank_by") or (sweep.rank_by if sweep else "")), grid=frozenset(map(str, grid)) if isinstance(grid, list) else None, problem=problem,
    )  # fmt: skip


def _config(path: Path, record: dict[str, Any]) -> tuple[SweepConfig | None, str | None]:
    """As the record keeps it; folders of earlier versions only have the file."""
    try:
        raw = record.get("sweep")
        if not isinstance(raw, dict):
            raw, _ = read_toml(path / "sweep.toml")
        return validate(SweepConfig, raw, path.name), None
    except WindlassError as error:
        return None, f"The sweep's settings cannot be read: {error.message}"
