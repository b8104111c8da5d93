"""Sweep folders, read for the report and the dashboard, and the comparison of runs that are not part of a sweep."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config.load import flatten, read_toml, validate
from windlass.config.sweep import SweepConfig
from windlass.energy.totals import print_energy
from windlass.errors import WindlassError
from windlass.figures import DataTable, Item, Note, Section
from windlass.figures.sweep import counts, heat_maps, pareto, scaling, sweep_sections
from windlass.files import read_json
from windlass.report.collect import RunSummary, folders_with
from windlass.report.tables import figure, state

# Tables that do not change how fast a step is.
UNCOMPARED_TABLES = ("name", "notes", "project", "seed", "launch", "trackers", "profile", "save", "energy")


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
    """Sweep folders at or below a folder (two levels), the newest first."""
    files = ("results.json", "outcomes.jsonl", "sweep.json")
    written_at = {
        path: max(file.stat().st_mtime for name in files if (file := path / name).exists())
        for path in folders_with(folder, "sweep.json", 2)
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


def compared(runs: Sequence[RunSummary], root: Path) -> list[Section]:
    measured = [r for r in runs if r.tokens_per_second is not None]
    if len(measured) < 2:
        note = Note(f"{len(measured)} run with a measured speed in {root.name}: a comparison needs two.")
        return [Section("", (note,))]
    values = {id(run): dict(flatten(run.recipe)) | {"devices": run.world_size} for run in runs}
    different: dict[str, set[str]] = {}
    for run in measured:
        for key, value in values[id(run)].items():
            if key.split(".")[0] not in UNCOMPARED_TABLES:
                different.setdefault(key, set()).add(str(value))
    # Keys with more than one value, those with most values first.
    keys = sorted((k for k, v in different.items() if len(v) > 1), key=lambda k: (-len(different[k]), k))
    rows: list[dict[str, Any]] = [
        {
            **values[id(run)],
            "runs": "all",
            "point": run.name,
            "outcome": "ok",
            "engine": run.model,
            "batch_tokens": values[id(run)].get("data.batch_tokens"),
            "tokens_per_second": run.tokens_per_second,
            "joules_per_token": run.energy.joules_per_token if run.energy.basis == "measured" else None,
        }
        for run in measured
    ]
    heat: Sequence[Item] = [Note("These runs have the same recipe.")]
    if keys:
        heat = heat_maps(rows, [], "tokens_per_second", [keys[1] if len(keys) > 1 else "runs", keys[0]])
    table = DataTable(
        ("run", "state", *keys[:4], "speed", "MFU", "memory", "energy"),
        [
            (r.name, state(r), *(str(values[id(r)].get(k)) for k in keys[:4]),
             *(figure(r, name) for name in ("throughput", "MFU", "memory, highest device")), print_energy(r.energy)[0])
            for r in sorted(runs, key=lambda r: -(r.tokens_per_second or 0.0))
        ],
        right=tuple(range(2 + len(keys[:4]), 6 + len(keys[:4]))),
    )  # fmt: skip
    return [
        Section("Heat map", tuple(heat), id="heat"),
        Section(
            "Scaling",
            tuple(scaling(rows, "strong")) or (Note("All runs of a model used the same number of devices."),),
            id="scaling",
        ),
        Section("Speed vs. energy", (pareto(rows),), id="pareto"),
        Section("All runs", (table,), id="table"),
    ]
