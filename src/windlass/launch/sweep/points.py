"""The points of a sweep: sweep file -> named points with their complete recipe or command. Pure."""

import copy
import hashlib
import itertools
import json
import math
import re
import shlex
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.config import Recipe, validate
from windlass.config.load import check
from windlass.config.sweep import POINT_KEYS, LoadedSweep, SweepConfig, axes_of, put
from windlass.errors import ConfigError
from windlass.units import parse_bytes, parse_seconds

MAX_SWEEP_POINTS = 100_000
MAX_NAME_LENGTH = 180  # a folder's name has at most 255 bytes
LIMIT_PARSERS: dict[str, Callable[[Any], Any]] = {
    "devices": int,
    "memory_limit": parse_bytes,
    "time_limit": parse_seconds,
}
# (axis, value) pairs.
Cell = list[tuple[str, Any]]


class ArgumentFormatter(string.Formatter):
    """`{axis}`, and `{axis!q}` quoted for a shell: inside `bash -c '...'` a value with spaces would be split."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return shlex.quote(str(value)) if conversion == "q" else super().convert_field(value, conversion)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    name: str
    values: Mapping[str, Any]  # axis -> value as it is shown (a table by its name)
    settings: Mapping[str, Any]  # dotted keys that this point sets
    devices: int | None = None
    memory_limit: int | None = None  # bytes
    time_limit: float | None = None  # seconds
    raw: dict[str, Any] | None = None  # the complete recipe as tables
    recipe: Recipe | None = None
    problem: str | None = None  # why the recipe is invalid (keys that disagree): a result, not the end of the sweep
    wanted_batch_tokens: int | None = None  # the file's batch, where the nearest that the layout divides is used
    in_grid: bool = True  # of the product, or an included point that sets only axes and limits
    argv_template: tuple[str, ...] = ()  # with placeholders, for a sweep of a command

    def command(self, folder: Path) -> list[str]:
        """The command's argv for this point; values are never split."""
        return [ArgumentFormatter().vformat(part, (), self._fields(folder)) for part in self.argv_template]

    def shown_command(self) -> str:
        """As a person would type it; FOLDER stands for the folder that does not exist yet."""
        return shlex.join(self.command(Path("FOLDER")))

    def results_file(self, folder: Path, results: str) -> Path:
        """Inside the point's folder; a path that begins with ./ or / is relative to where the sweep runs."""
        text = ArgumentFormatter().vformat(results, (), self._fields(folder))
        return Path(text) if text.startswith(("./", "/")) else folder / text

    def _fields(self, folder: Path) -> dict[str, Any]:
        place = {"name": self.name, "folder": str(folder), "devices": self.devices, "nodes": 1}
        return {key: as_written(value) for key, value in {**place, **self.settings}.items()}


def as_written(value: Any) -> Any:
    """A value as the sweep file has it, not as Python prints it: `true`, `["a", "b"]`. Numbers stay, for `{n:03d}`."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, list, tuple)) else value


def make_points(loaded: LoadedSweep) -> list[SweepPoint]:
    """All points in the order of the file; refuses unknown keys, an empty matrix and two points of one name."""
    sweep, order = loaded.sweep, axes_of(loaded.sweep)

    def is_excluded(cell: Cell) -> bool:
        values = {key: _label(value) for key, value in cell}
        return any(
            table and all(values.get(key) in (v if isinstance(v, list) else [v]) for key, v in table.items())
            for table in sweep.exclude
        )

    axes: list[list[Cell]] = [[[(key, value)] for value in values] for key, values in sweep.matrix.items()]
    axes += [[list(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True)] for group in sweep.zip]
    count = math.prod(map(len, axes))
    if count > MAX_SWEEP_POINTS:
        raise ConfigError(
            "sweep.too-many-points",
            f"the matrix has {count:,} points",
            hint=f"use exclude or zip to have at most {MAX_SWEEP_POINTS:,}",
        )
    product = (list(itertools.chain(*combination)) for combination in itertools.product(*axes) if axes)
    cells = [cell for cell in product if not is_excluded(cell)]
    for table in sweep.include:  # a named table of the matrix may be given by its name
        named = {(key, v["name"]): v for key in table for v in sweep.matrix.get(key, ()) if isinstance(v, Mapping)}
        pairs = sorted(table.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
        cells.append([(k, named.get((k, v), v) if isinstance(v, str) else v) for k, v in pairs])
    if not cells:
        raise ConfigError(
            "sweep.empty-matrix",
            f"{loaded.path}: the matrix is empty after exclude: there is no point to run",
            hint="correct [[exclude]]: a table removes every point that matches all its axes",
        )
    points = [_point(loaded, cell, name) for cell, name in zip(cells, _names(cells, sweep), strict=True)]
    by_name: dict[str, SweepPoint] = {}
    for point in points:
        other = by_name.setdefault(point.name, point)
        if other is not point:
            first, second = (", ".join(f"{k} = {v!r}" for k, v in p.values.items()) for p in (other, point))
            raise ConfigError(
                "sweep.duplicate-point",
                f"{loaded.path}: two points are called {point.name}: ({first}) and ({second})",
                hint="remove one with exclude, or give an included point a `name` of its own",
            )
    return points


def _label(value: Any) -> Any:
    return value["name"] if isinstance(value, Mapping) else value


def _names(cells: Sequence[Cell], sweep: SweepConfig) -> list[str]:
    """One name per point: its own, else made from its values. Values of the same text (`x y`, `x/y`) get a number."""
    # A limit is part of the name only if it is an axis.
    included = {key for table in sweep.include for key in table} - {"name", "memory_limit", "time_limit"}
    keys = included | set(axes_of(sweep))
    tails = [key.rsplit(".", 1)[-1] for key in keys]
    short = {key: tail if tails.count(tail) == 1 else key for key, tail in zip(keys, tails, strict=True)}
    parts: dict[str, dict[str, str]] = {}
    for key, value in (pair for cell in cells for pair in cell):
        taken, text = parts.setdefault(key, {}), _name_part(short.get(key, key), value)
        numbered = itertools.chain([text], (f"{text}-{n}" for n in itertools.count(2)))
        taken.setdefault(_identity(value), next(t for t in numbered if t not in taken.values()))
    names = []
    for cell in cells:
        own = next((_folder_text(str(v), keep=".") for k, v in cell if k == "name"), None)
        name = own or ".".join(parts[key][_identity(value)] for key, value in cell if key in short)
        if len(name) > MAX_NAME_LENGTH:
            name = f"{name[: MAX_NAME_LENGTH - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        names.append(name)
    return names


def _identity(value: Any) -> str:
    """A table counts by its name; the check for equal point names finds two tables with one name."""
    return json.dumps(_label(value), default=str)


def _name_part(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return _folder_text(str(value["name"]))
    if isinstance(value, bool):
        return key if value else f"no-{key}"
    sign = "minus-" if isinstance(value, (int, float)) and value < 0 else ""
    return f"{key}-{sign}{_folder_text(str(value))}"


def _folder_text(text: str, keep: str = "") -> str:
    """Usable in a folder's name; accents are dropped, their letters stay."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(rf"[^A-Za-z0-9_+{keep}-]+", "-", letters).strip("-+.") or "x"


def _point(loaded: LoadedSweep, cell: Cell, name: str) -> SweepPoint:
    sweep, origin = loaded.sweep, f"{loaded.path}: point {name}"
    settings: dict[str, Any] = {}
    for key, value in cell:
        settings |= dict(value) if isinstance(value, Mapping) else {key: value}
    settings.pop("name", None)
    shown = {key: _label(value) for key, value in cell if key != "name"}
    shown = {key: as_written(value) if isinstance(value, (list, tuple)) else value for key, value in shown.items()}
    in_grid = set(shown) <= {*axes_of(sweep), "memory_limit", "time_limit"}
    limits = {key: settings.get(key, sweep.set.get(key, getattr(sweep, key))) for key in POINT_KEYS}
    try:
        limits = {key: None if value is None else LIMIT_PARSERS[key](value) for key, value in limits.items()}
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            "sweep.invalid-limit",
            f"{origin}: {error}",
            hint='write for example devices = 2, memory_limit = "2 GiB", time_limit = "5m"',
        ) from None
    if sweep.command is not None:
        argv, settings = tuple(shlex.split(sweep.command)), {**sweep.set, **settings}
        return SweepPoint(name=name, values=shown, settings=settings, in_grid=in_grid, argv_template=argv, **limits)
    raw = copy.deepcopy(loaded.base or {})
    for key, value in settings.items():
        if key not in POINT_KEYS:
            put(raw, key, value)
    raw["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", f"{sweep.name}.{name}")[:120]
    recipe, problem = validate(Recipe, raw, origin), None
    try:
        check(recipe)
    except ConfigError as error:
        problem = " ".join(line.strip() for line in error.message.splitlines()[1:]) or error.message
    return SweepPoint(
        name=name,
        values=shown,
        settings=settings,
        raw=raw,
        recipe=recipe,
        problem=problem,
        in_grid=in_grid,
        **limits,
    )
