"""Which points does a sweep file ask for? A base recipe or any command, times a matrix: product, zip, include, exclude."""

from __future__ import annotations

import copy
import hashlib
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from windlass.config.base import Bytes, Seconds, Table
from windlass.config.load import read_toml, validate
from windlass.errors import ConfigError

POINT_KEYS = ("devices", "memory_limit", "time_limit")
"""Axes that are about how a point is run, not about its recipe."""


RESERVED = (
    "point", "outcome", "evidence", "detail", "name", "folder", "seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "memory_bytes",
    "step_seconds", "step_spread", "joules_per_token", "kwh_per_step", "energy_joules", "loss",
)  # fmt: skip
"""Columns of the results that say what came out: an axis of such a name would hide it."""


class SweepConfig(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)
    """Names the sweep's folder: runs/<name>."""
    title: str = ""
    """Heading of the report."""
    notes: str = ""
    """Printed in the report."""
    recipe: str | dict[str, Any] | None = None
    """Base recipe: a file, relative to this one, or a whole recipe as a table."""
    command: str | None = None
    """Instead of a recipe: any command with {placeholders}; {folder} is the point's own folder, {name} its name."""
    results: str | None = None
    """With `command`: the file, relative to the point's folder, in which the command leaves its numbers (JSON, JSON lines or CSV)."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """With `command`: our column -> key in the results file, for example tokens_per_second = "samples_per_second"."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted recipe keys that hold for every point."""
    unset: list[str] = Field(default_factory=list)
    """Dotted keys of the base recipe that are taken out."""
    matrix: dict[str, list[Any]] = Field(default_factory=dict)
    """Axis -> values; the points are their product. A value that is a table with a `name` sets several keys at once."""
    zip: list[dict[str, list[Any]]] = Field(default_factory=list)
    """Groups of axes that advance together; each group is one more axis of the product."""
    include: list[dict[str, Any]] = Field(default_factory=list)
    """Further points, beside the product."""
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    """Points to leave out: every axis named must match; a list matches any of its values."""
    devices: PositiveInt | None = None
    """Processes of a point on this machine, or devices per node; the cluster's when left out."""
    memory_limit: Bytes | None = None
    """Each process may hold this much private memory: a real out-of-memory error on a CPU."""
    time_limit: Seconds | None = None
    """A point that takes longer is ended and counts as a timeout."""
    restarts: int = Field(default=0, ge=0)
    """How often `windlass train` may start a point's workers again."""
    startup: Seconds = 60.0
    """Assumed time from the start of a point to its first step, for the cost."""
    allocation: Seconds | None = None
    """Wall time of one packed SLURM job; the partition's limit, at most 4 h, when left out."""
    skip_oom: NonNegativeFloat = 0.95
    """A point whose predicted chance to run out of memory is at least this is not run; more than 1: run all."""
    rank_by: str = "tokens_per_second_per_device"
    """Column by which points are ranked."""
    goal: Literal["max", "min"] = "max"
    """Is more better, or less? When left out: less for time, memory, energy and loss, else more."""
    heat: list[str] = Field(default_factory=list, max_length=2)
    """The two axes of the heat map, down and across; the two with most values when left out."""
    scaling: Literal["strong", "weak", "none"] = "none"
    """What the points with different device counts show: the same batch (strong), or a batch that grows with them (weak)."""
    equivalence: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Strategy -> engine -> what it is called there; shown beside the results."""


@dataclass(frozen=True)
class LoadedSweep:
    sweep: SweepConfig
    text: str
    path: Path
    base: dict[str, Any] | None
    """The base recipe's raw tables, with `set` and `unset` applied; None for a command."""

    @property
    def hash(self) -> str:
        """The same for the same sweep: what only changes how it is shown or packed is left out."""
        kept = self.sweep.model_dump(
            mode="json", include={"name", "command", "results", "matrix", "zip", "include", "exclude", "devices"}
        )
        value = json.dumps([kept, self.base], sort_keys=True, default=str)
        return hashlib.sha256(value.encode()).hexdigest()[:16]


def load_sweep(path: Path | str) -> LoadedSweep:
    """Read and check a sweep file; every problem that does not need the points is found here."""
    path = Path(path)
    raw, text = read_toml(path)
    sweep = validate(SweepConfig, raw, str(path))
    if problems := problems_of(sweep):
        lines = "\n".join(f"  {p}" for p in problems)
        raise ConfigError(
            "config.problem", f"{path}: {len(problems)} problem{'s' * (len(problems) > 1)}\n{lines}", hint=HINT
        )
    return LoadedSweep(with_goal(sweep), text, path, _base(sweep, path))


def with_goal(sweep: SweepConfig, rank_by: str | None = None) -> SweepConfig:
    """Ranked by another column, and with that column's own goal unless the file states one for its column."""
    key = rank_by or sweep.rank_by
    stated = "goal" in sweep.model_fields_set and key == sweep.rank_by
    goal = sweep.goal if stated else "min" if key.removeprefix("predicted_") in LESS_IS_BETTER else "max"
    return sweep.model_copy(update={"rank_by": key, "goal": goal})


LESS_IS_BETTER = ("step_seconds", "step_spread", "memory_bytes", "joules_per_token", "kwh_per_step", "energy_joules", "loss", "seconds")  # fmt: skip
HINT = "docs/guides/sweep.md shows a whole sweep file; recipes/sweeps/ has more"


def problems_of(sweep: SweepConfig, *, same_points: bool = True) -> list[str]:
    """What is wrong with the file itself. `same_points`: an axis that the command does not use is a mistake too."""
    return list(_problems(sweep, same_points))


def _problems(sweep: SweepConfig, same_points: bool) -> Iterator[str]:
    if (sweep.recipe is None) == (sweep.command is None):
        yield "give either `recipe` or `command`" + (", not both" if sweep.recipe is not None else "")
    if not (sweep.matrix or sweep.zip or sweep.include):
        yield "the matrix is empty: there is no point to run; add [matrix], [[zip]] or [[include]]"
    for name, values in sweep.matrix.items():
        if not values:
            yield f"matrix.{name}: no values"
        yield from _bundle_problems(name, values)
    for index, group in enumerate(sweep.zip):
        lengths = {key: len(values) for key, values in group.items()}
        if not lengths or 0 in lengths.values():
            yield f"zip.{index}: no values"
        elif len(set(lengths.values())) > 1:
            yield f"zip.{index}: lists of different length: " + ", ".join(f"{k} has {n}" for k, n in lengths.items())
    for axis in axes_of(sweep):
        if axis in RESERVED:
            yield f"{axis}: an axis cannot have the name of a column of the results; call it {axis}_kind, say"
    if sweep.command is not None:
        yield from _command_problems(sweep, same_points)
    known = set(axes_of(sweep))
    for kind, tables in (("exclude", sweep.exclude), ("heat", [dict.fromkeys(sweep.heat)])):
        for table in tables:
            yield from (
                f"{kind}: {key} is not an axis; axes: {', '.join(sorted(known))}" for key in table if key not in known
            )


def _bundle_problems(name: str, values: list[Any]) -> Iterator[str]:
    tables = [v for v in values if isinstance(v, Mapping)]
    if tables and len(tables) != len(values):
        yield f"matrix.{name}: tables and plain values are mixed"
    for index, table in enumerate(tables):
        if not isinstance(table.get("name"), str):
            yield f"matrix.{name}.{index}: a table needs a `name`"


def _command_problems(sweep: SweepConfig, same_points: bool) -> Iterator[str]:
    known = {*axes_of(sweep), *POINT_KEYS, "folder", "name", "nodes"}
    known |= {key for table in sweep.include for key in table} | set(sweep.set)
    known |= {
        k
        for values in sweep.matrix.values()
        for value in values
        if isinstance(value, Mapping)
        for k in value
        if k != "name"
    }
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(sweep.command or "") if name is not None]
    except ValueError as error:
        yield f"command: {error}; write {{{{ and }}}} for plain braces"
        return
    for name in fields:
        if name in known and set(name) & set(".[]"):
            yield f"command: {{{name}}}: an axis of a command is a plain word, without dots"
        elif name not in known:
            yield f"command: {{{name}}} is not an axis; known: {', '.join(sorted(known))}"
    unused = [axis for axis in axes_of(sweep) if axis not in fields and not _is_bundle(sweep, axis)]
    for axis in unused if same_points else ():
        if axis not in (*POINT_KEYS, "nodes"):  # these say where a point runs
            yield f"command: the axis {axis} does not appear in it, so its points would be the same"


def _is_bundle(sweep: SweepConfig, axis: str) -> bool:
    return any(isinstance(v, Mapping) for v in sweep.matrix.get(axis, ()))


def axes_of(sweep: SweepConfig) -> list[str]:
    """Names of all axes, in the order of the file."""
    return [*sweep.matrix, *(key for group in sweep.zip for key in group)]


def _base(sweep: SweepConfig, path: Path) -> dict[str, Any] | None:
    if sweep.command is not None:
        return None
    raw = dict(sweep.recipe) if isinstance(sweep.recipe, dict) else read_toml(path.parent / str(sweep.recipe))[0]
    raw = copy.deepcopy(raw)
    for key in sweep.unset:
        take_out(raw, key)
    for key, value in sweep.set.items():
        if key not in POINT_KEYS:
            put(raw, key, value)
    return raw


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key."""
    from windlass.config.load import apply_override

    apply_override(raw, key.split("."), value)


def take_out(raw: dict[str, Any], key: str) -> None:
    *tables, last = key.split(".")
    here: Any = raw
    for part in tables:
        here = here.get(part, {})
    here.pop(last, None)
