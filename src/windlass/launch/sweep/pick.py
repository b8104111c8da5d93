"""How does the winner go on? As a recipe of its own: the point's settings, the base's name, and in its first lines why it won."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.config import Recipe, validate
from windlass.errors import ConfigError, RunError
from windlass.files import write_atomic
from windlass.launch.sweep.toml import to_toml

if TYPE_CHECKING:
    from windlass.launch.sweep.local import Work


def check_pick(work: Work, path: Path) -> None:
    """What can be refused before hours of points have run."""
    if work.loaded.base is None:
        raise ConfigError(
            "launch.pick-writes-recipe-sweep",
            "--pick writes a recipe, and this sweep runs a command",
            hint="results.csv has the ranking",
        )
    if path.exists():
        raise RunError("launch.exists-already", f"{path} exists already", hint="choose another file name for --pick")


def write_pick(work: Work, ranked: Sequence[dict[str, Any]], rank_by: str, path: Path) -> None:
    """The best point's recipe; refuses to overwrite, and a sweep without a winner."""
    check_pick(work, path)
    if not ranked:
        raise RunError(
            "launch.point-ended-well-number",
            f"no point ended well with a number for {rank_by}",
            hint="look at results.csv, or --only oom,fail",
        )
    best = ranked[0]
    point = next(p for p in work.points if p.name == best["point"])
    assert point.raw is not None
    raw = copy.deepcopy(point.raw)
    raw["name"] = (work.loaded.base or {}).get("name", work.sweep.name)
    validate(Recipe, raw, str(path))
    write_atomic(path, to_toml(raw, _comment(work, ranked, rank_by)))


def _comment(work: Work, ranked: Sequence[dict[str, Any]], rank_by: str) -> str:
    best = ranked[0]
    lines = [
        f"Picked by `windlass sweep {work.loaded.path.name}` on {time.strftime('%Y-%m-%d', time.gmtime())}: point {best['point']},",
        f"the best of {len(ranked)} that ended well by {rank_by} ({best[rank_by]:.6g}).",
    ]
    if len(ranked) > 1:
        lines.append(f"Next: {ranked[1]['point']} ({ranked[1][rank_by]:.6g}).")
    point = next(p for p in work.points if p.name == best["point"])
    if point.devices is not None:
        lines.append(f"It ran with `windlass train FILE --devices {point.devices}`.")
    return "\n".join(lines)
