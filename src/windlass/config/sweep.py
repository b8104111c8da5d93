"""The sweep file: a base recipe or any command, times a matrix (product, zip, include, exclude)."""

import copy
import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from windlass.config.base import Bytes, Seconds, Table
from windlass.config.launch import LaunchConfig
from windlass.config.load import apply_override, parse_override, read_toml, refuse, validate
from windlass.errors import ConfigError

# Axes that are about how a point is run, not about its recipe.
POINT_KEYS = ("devices", "memory_limit", "time_limit")
# Columns of results: an axis of such a name would hide one.
RESULT_COLUMNS = (
    "point", "outcome", "evidence", "detail", "name", "folder", "seconds", "tokens_per_second",
    "tokens_per_second_per_device", "mfu", "memory_bytes", "step_seconds", "step_spread", "joules_per_token",
    "kwh_per_step", "energy_joules", "loss",
)  # fmt: skip
LESS_IS_BETTER = (
    "step_seconds", "step_spread", "memory_bytes", "joules_per_token", "kwh_per_step", "energy_joules", "loss",
    "seconds",
)  # fmt: skip
HINT = "docs/guides/sweep.md shows a complete sweep file; recipes/sweeps/ has more"


class LeaderboardConfig(Table):
    rows: str = "model"
    """Axis whose values are ranked, one per row."""
    columns: str = "dataset"
    """Axis of the data sets, one per column."""
    score: str = "score"
    """Column of the results to show; the column `spread` is its spread over seeds."""
    choose: str = "validation_score"
    """Column of the results that decides between several points with the same row and column."""


class SweepConfig(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)
    """Name of the sweep; its folder is runs/<name>."""
    title: str = ""
    """Heading of the report."""
    notes: str = ""
    """Printed in the report."""
    recipe: str | dict[str, Any] | None = None
    """Base recipe: a file, relative to this one, or a complete recipe as a table."""
    command: str | None = None
    """Instead of a recipe: any command with {placeholders}; {folder} is the point's own folder, {name} its name."""
    results: str | None = None
    """With `command`: the file, relative to the point's folder, to which the command writes its numbers (JSON, JSON
    lines or CSV)."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """With `command`: windlass column -> key in the results file, for example tokens_per_second =
    "samples_per_second"."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted recipe keys to set for every point."""
    unset: list[str] = Field(default_factory=list)
    """Dotted keys of the base recipe to remove."""
    matrix: dict[str, list[Any]] = Field(default_factory=dict)
    """Axis -> values; the points are all combinations. A value that is a table with a `name` sets several keys at
    once."""
    zip: list[dict[str, list[Any]]] = Field(default_factory=list)
    """Groups of axes that advance together; each group counts as one axis of the matrix."""
    include: list[dict[str, Any]] = Field(default_factory=list)
    """Extra points, in addition to the matrix."""
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    """Points to leave out: those that match every axis named here; a list matches any of its values."""
    devices: PositiveInt | None = None
    """Number of processes of a point on this machine, or devices per node on a cluster (default: the cluster's)."""
    memory_limit: Bytes | None = None
    """Private memory that each process may use; beyond it the process runs out of memory, even on a CPU."""
    time_limit: Seconds | None = None
    """A point that takes longer is stopped and counts as a timeout."""
    adjust_batch: bool = False
    """If data.batch_tokens does not divide evenly over a point's layout, use the nearest batch that does, and print
    it."""
    restarts: int = Field(default=0, ge=0)
    """Maximum number of times that `windlass train` restarts a point's workers."""
    startup: Seconds = 60.0
    """Assumed time from the start of a point to its first step, for the cost estimate."""
    allocation: Seconds | None = None
    """Wall time of one packed SLURM job (default: the partition's limit, but at most 4 h)."""
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """With `command` and --slurm: account, partition, qos, time, environment, container, env and sbatch, as in a
    recipe."""
    skip_oom: NonNegativeFloat = 0.95
    """Skip a point if its predicted probability of running out of memory is at least this; more than 1: run all
    points."""
    rank_by: str = "tokens_per_second_per_device"
    """Column by which points are ranked."""
    goal: Literal["max", "min"] = "max"
    """Whether higher (max) or lower (min) values are better (default: min for time, memory, energy and loss, otherwise
    max)."""
    heat: list[str] = Field(default_factory=list, max_length=2)
    """The two axes of the heat map: rows, then columns (default: the two axes with the most values)."""
    scaling: Literal["strong", "weak", "none"] = "none"
    """How points with different numbers of devices are compared: with the same batch (strong), or with a batch that
    grows with the devices (weak)."""
    leaderboard: LeaderboardConfig | None = None
    """How the results become a leaderboard of models and data sets."""
    equivalence: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Strategy -> engine -> name of the strategy in that engine; shown with the results."""


@dataclass(frozen=True)
class LoadedSweep:
    sweep: SweepConfig
    text: str
    path: Path
    base: dict[str, Any] | None  # the base recipe's raw tables, with `set` and `unset` applied; None for a command

    @property
    def hash(self) -> str:
        """The same for the same sweep: keys that only change how it is shown or packed do not count."""
        keys = {"name", "command", "results", "matrix", "zip", "include", "exclude", "devices"}
        keys |= {"adjust_batch"} if self.sweep.adjust_batch else set()
        kept = self.sweep.model_dump(mode="json", include=keys)
        value = json.dumps([kept, self.base], sort_keys=True, default=str)
        return hashlib.sha256(value.encode()).hexdigest()[:16]


def load_sweep(path: Path | str) -> LoadedSweep:
    """Read and check a sweep file; every problem that does not need the points is found here."""
    path = Path(path)
    raw, text = read_toml(path)
    sweep = validate(SweepConfig, raw, str(path))
    refuse("sweep.invalid-file", str(path), find_problems(sweep), HINT)
    base: dict[str, Any] | None = None
    if sweep.command is None:
        recipe = sweep.recipe if isinstance(sweep.recipe, dict) else read_toml(path.parent / str(sweep.recipe))[0]
        base = copy.deepcopy(recipe)
        for *tables, last in (key.split(".") for key in sweep.unset):
            table: Any = base
            for part in tables:
                table = table.get(part, {})
            table.pop(last, None)
        for key, value in sweep.set.items():
            if key not in POINT_KEYS:
                put(base, key, value)
    return LoadedSweep(with_goal(sweep), text, path, base)


def with_goal(sweep: SweepConfig, rank_by: str | None = None) -> SweepConfig:
    """Ranked by another column, and with that column's own goal unless the file states one for its column."""
    key = rank_by or sweep.rank_by
    stated = "goal" in sweep.model_fields_set and key == sweep.rank_by
    goal = sweep.goal if stated else "min" if key.removeprefix("predicted_") in LESS_IS_BETTER else "max"
    return sweep.model_copy(update={"rank_by": key, "goal": goal})


def with_launch(loaded: LoadedSweep, overrides: Sequence[str]) -> LoadedSweep:
    """`launch.account=NAME` of the command line: a dvc.yaml has no place for it."""
    raw: dict[str, Any] = {"launch": loaded.sweep.launch.model_dump(exclude_unset=True)}
    for override in overrides:
        parts, value = parse_override(override)
        if parts[0] != "launch" or len(parts) < 2 or loaded.sweep.command is None:
            raise ConfigError(
                "sweep.override-not-launch",
                f"{override}: only a sweep of a command takes overrides here, as launch.KEY=VALUE",
                hint="put axes and recipe keys in the file, under [matrix] or [set]",
            )
        apply_override(raw, parts, value)
    launch = validate(LaunchConfig, raw["launch"], "launch")
    return replace(loaded, sweep=loaded.sweep.model_copy(update={"launch": launch}))


def with_command(loaded: LoadedSweep, command: str) -> LoadedSweep:
    """Another command over the same matrix, such as ours over a dvc.yaml; it leaves its numbers in metrics.json of the
    point's folder."""
    changed = {"command": command, "results": "metrics.json", "recipe": None}
    sweep = loaded.sweep.model_copy(update=changed)
    if loaded.base is not None:
        raise ConfigError(
            "sweep.command-needs-command",
            f"--command: {loaded.path} is a sweep of recipes, which has no command",
            hint="omit --command, or name a sweep file with a `command`",
        )
    refuse("sweep.invalid-file", "--command", find_problems(sweep, same_points=False), HINT)
    return replace(loaded, sweep=sweep)


def axes_of(sweep: SweepConfig) -> list[str]:
    """Names of all axes, in the order of the file."""
    return [*sweep.matrix, *(key for group in sweep.zip for key in group)]


def find_problems(sweep: SweepConfig, *, same_points: bool = True) -> list[str]:
    """What is wrong with the file itself. `same_points`: an axis that the command does not use is a mistake too."""
    problems, axes = [], axes_of(sweep)
    if (sweep.recipe is None) == (sweep.command is None):
        problems.append("give either `recipe` or `command`" + (", not both" if sweep.recipe is not None else ""))
    if sweep.recipe is not None and sweep.launch.model_fields_set:
        problems.append('launch: only a sweep of a command has this table; write "launch.account" = ... under [set]')
    if not (sweep.matrix or sweep.zip or sweep.include):
        problems.append("the matrix is empty: there is no point to run; add [matrix], [[zip]] or [[include]]")
    for name, values in sweep.matrix.items():
        tables = [v for v in values if isinstance(v, Mapping)]
        problems += [] if values else [f"matrix.{name}: no values"]
        problems += [f"matrix.{name}: tables and plain values are mixed"] if 0 < len(tables) < len(values) else []
        unnamed = [index for index, table in enumerate(tables) if not isinstance(table.get("name"), str)]
        problems += [f"matrix.{name}.{index}: a table needs a `name`" for index in unnamed]
    for index, group in enumerate(sweep.zip):
        lengths = {key: len(values) for key, values in group.items()}
        if not lengths or 0 in lengths.values():
            problems.append(f"zip.{index}: no values")
        elif len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            problems.append(f"zip.{index}: lists of different length: {listed}")
    rename = "an axis cannot have the name of a column of the results; call it"
    problems += [f"{axis}: {rename} {axis}_kind, for example" for axis in axes if axis in RESULT_COLUMNS]
    if sweep.command is not None:
        problems += _command_problems(sweep, axes, same_points)
    board = sweep.leaderboard
    wanted = [] if board is None else [("leaderboard", board.rows), ("leaderboard", board.columns)]
    named = (
        wanted + [("exclude", key) for table in sweep.exclude for key in table] + [("heat", key) for key in sweep.heat]
    )
    listed = ", ".join(sorted(axes))
    return problems + [f"{kind}: {key} is not an axis; axes: {listed}" for kind, key in named if key not in axes]


def _command_problems(sweep: SweepConfig, axes: list[str], same_points: bool) -> list[str]:
    tables = [value for values in sweep.matrix.values() for value in values if isinstance(value, Mapping)]
    keys = {key for table in tables for key in table} - {"name"}
    keys |= {key for table in sweep.include for key in table} | {
        *sweep.set,
        *axes,
        *POINT_KEYS,
        "folder",
        "name",
        "nodes",
    }
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(sweep.command or "") if name is not None]
    except ValueError as error:
        return [f"command: {error}; write {{{{ and }}}} for plain braces"]
    dotted = [name for name in fields if name in keys and set(name) & set(".[]")]
    unknown = [name for name in fields if name not in keys]
    bundles = {axis for axis, values in sweep.matrix.items() if any(isinstance(v, Mapping) for v in values)}
    # Limits and nodes say where a point runs: they need not appear in the command.
    unused = [axis for axis in axes if axis not in {*fields, *bundles, *POINT_KEYS, "nodes"}] if same_points else []
    return [
        *(f"command: {{{name}}}: an axis of a command is a plain name, without dots" for name in dotted),
        *(f"command: {{{name}}} is not an axis; known: {', '.join(sorted(keys))}" for name in unknown),
        *(f"command: the axis {axis} does not appear in it, so its points would be the same" for axis in unused),
    ]


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key."""
    apply_override(raw, key.split("."), value)
