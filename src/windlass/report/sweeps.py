"""Sweep folders, read for the report and the dashboard; their rows (results.json) are written point by point."""

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


@dataclass(frozen=True, kw_only=True)
class SweepView:
    """A sweep as it stands; `problem` says why its rows cannot be shown."""

    path: Path
    name: str
    title: str
    sweep: SweepConfig | None
    rows: list[dict[str, Any]]
    rank_by: str
    grid: frozenset[str] | None
    problem: str | None

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
    """Sweep folders at or below a folder (two levels), the newest first. A link out of it is not followed."""
    folders = {p.parent for depth in ("", "*/", "*/*/") for p in folder.glob(f"{depth}sweep.json")}
    written_at = {
        path: max(
            file.stat().st_mtime
            for name in ("results.json", "outcomes.jsonl", "sweep.json")
            if (file := path / name).exists()
        )
        for path in folders
        if path.resolve().is_relative_to(folder.resolve())
    }
    return [read_sweep(path) for path in sorted(written_at, key=lambda p: written_at[p], reverse=True)]


def read_sweep(path: Path) -> SweepView:
    record, results = read_json(path / "sweep.json") or {}, read_json(path / "results.json") or {}
    raw, grid = results.get("rows"), record.get("grid")
    rows = [r for r in raw if isinstance(r, dict) and isinstance(r.get("point"), str)] if isinstance(raw, list) else []
    sweep, problem = None, None
    try:
        config = record.get("sweep")
        if not isinstance(config, dict):  # folders of earlier versions only have the file
            config, _ = read_toml(path / "sweep.toml")
        sweep = validate(SweepConfig, config, path.name)
    except WindlassError as error:
        problem = f"The sweep's settings cannot be read: {error.message}"
    if not rows and problem is None:
        problem = (
            f"No results.json in {path.name} yet: it is written after each point, or by `windlass sweep FILE --report`."
        )
    return SweepView(
        path=path,
        name=str(record.get("name") or path.name),
        title=(sweep.title if sweep else "") or path.name,
        sweep=sweep,
        rows=rows,
        rank_by=str(results.get("rank_by") or (sweep.rank_by if sweep else "")),
        grid=frozenset(map(str, grid)) if isinstance(grid, list) else None,
        problem=problem,
    )
