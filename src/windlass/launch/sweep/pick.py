"""The winner of a sweep as a recipe file: its settings under the base's name, and in its first lines why it won."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.config import Recipe, validate
from windlass.errors import ConfigError, RunError
from windlass.files import write_atomic
from windlass.launch.sweep.folder import SweepRun
from windlass.launch.sweep.toml import to_toml


def check_pick(sweep_run: SweepRun, path: Path) -> None:
    """What can be refused before hours of points have run."""
    if sweep_run.loaded.base is None:
        raise ConfigError(
            "sweep.pick-needs-recipe",
            "--pick writes a recipe, and this sweep runs a command",
            hint="results.csv has the ranking",
        )
    if path.exists():
        raise RunError("sweep.file-exists", f"{path} already exists", hint="choose another file name for --pick")


def write_pick(sweep_run: SweepRun, ranked: Sequence[dict[str, Any]], rank_by: str, path: Path) -> None:
    """The best point's recipe; refuses to overwrite a file, and a sweep without a winner."""
    check_pick(sweep_run, path)
    if not ranked:
        raise RunError(
            "sweep.no-winner",
            f"no point succeeded with a number for {rank_by}",
            hint="look at results.csv, or repeat points with --only oom,fail",
        )
    point, source = sweep_run.point(ranked[0]["point"]), sweep_run.loaded
    comment = [
        f"Picked by `windlass sweep {source.path.name}` on {time.strftime('%Y-%m-%d', time.gmtime())}: point {point.name},",
        f"the best of {len(ranked)} that succeeded, by {rank_by} ({ranked[0][rank_by]:.6g}).",
        *(f"Next: {row['point']} ({row[rank_by]:.6g})." for row in ranked[1:2]),
        *([f"It ran with `windlass train FILE --devices {point.devices}`."] if point.devices is not None else []),
    ]
    raw = copy.deepcopy(point.raw or {}) | {"name": (source.base or {}).get("name", sweep_run.sweep.name)}
    validate(Recipe, raw, str(path))
    write_atomic(path, to_toml(raw, "\n".join(comment)))
