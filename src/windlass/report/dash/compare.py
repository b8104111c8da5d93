"""Comparison of runs that are not part of a sweep: the charts of a sweep, over the recipe keys that vary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.config.load import flatten
from windlass.figures import DataTable, Item, Note, Section
from windlass.figures.sweep import heat_maps, pareto, scaling
from windlass.report.collect import RunSummary
from windlass.report.tables import energy_card, percent, rate, state
from windlass.units import print_bytes

# Tables that do not change how fast a step is.
IGNORED = ("name", "notes", "seed", "launch", "trackers", "profile", "save", "energy")


def compared(runs: Sequence[RunSummary], root: Path) -> list[Section]:
    measured = [r for r in runs if r.tokens_per_second is not None]
    if len(measured) < 2:
        text = f"{len(measured)} run with a measured speed in {root.name}: a comparison needs two."
        return [Section("", (Note(text),))]
    values = {id(run): dict(flatten(run.recipe)) | {"devices": run.world_size} for run in runs}
    different: dict[str, set[str]] = {}
    for run in measured:
        for key, value in values[id(run)].items():
            if key.split(".")[0] not in IGNORED:
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
            (r.name, state(r), *(str(values[id(r)].get(k)) for k in keys[:4]), rate(r.tokens_per_second), percent(r.mfu),
             print_bytes(r.memory_bytes), energy_card(r.energy)[0])
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
