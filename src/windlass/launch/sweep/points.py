"""Which points does a sweep have? Sweep file -> named points with their whole recipe or command. Pure."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import shlex
import string
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.config import Recipe, validate
from windlass.config.load import check
from windlass.config.sweep import POINT_KEYS, LoadedSweep, SweepConfig, axes_of, put
from windlass.errors import ConfigError
from windlass.units import parse_bytes, parse_seconds

MOST_POINTS = 100_000
LONGEST_NAME = 180


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of the matrix."""

    name: str
    values: Mapping[str, Any]
    """Axis -> value as it is shown (a table by its name)."""
    settings: Mapping[str, Any]
    """Dotted keys that this point sets."""
    devices: int | None = None
    memory_limit: int | None = None
    time_limit: float | None = None
    raw: dict[str, Any] | None = None
    """The whole recipe, as tables."""
    recipe: Recipe | None = None
    problem: str | None = None
    """Why the recipe cannot be: keys that disagree. Such a point is a result (error), not a reason to stop the sweep."""
    in_grid: bool = True
    """Of the product, or an included point that sets nothing but axes and limits; others would hide a cell of the heat map."""
    words: tuple[str, ...] = field(default=())
    """The command's words with placeholders, for a sweep of a command."""

    def command(self, folder: Path) -> list[str]:
        """The command's words for this point; values never split into several words."""
        return [FILL.vformat(word, (), self._known(folder)) for word in self.words]

    def shown_command(self) -> str:
        """As a person would type it, with a word for the folder that is not there yet."""
        return shlex.join(self.command(Path("FOLDER")))

    def results_file(self, folder: Path, results: str) -> Path:
        """Inside the point's folder; a path that begins with ./ or / is meant from where the sweep runs."""
        text = FILL.vformat(results, (), self._known(folder))
        return Path(text) if text.startswith(("./", "/")) else folder / text

    def _known(self, folder: Path) -> dict[str, Any]:
        known = {"name": self.name, "folder": str(folder), "devices": self.devices, "nodes": 1, **self.settings}
        return {key: as_written(value) for key, value in known.items()}


class Fill(string.Formatter):
    """`{axis}`, and `{axis!q}` quoted for a shell: inside `bash -c '...'` a value with spaces is several words otherwise."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return shlex.quote(str(value)) if conversion == "q" else super().convert_field(value, conversion)


FILL = Fill()


def as_written(value: Any) -> Any:
    """A value as the sweep file has it, not as Python prints it: `true`, `["a", "b"]`. Numbers stay numbers, for `{n:03d}`."""
    if isinstance(value, (bool, list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    return value


def make_points(loaded: LoadedSweep) -> list[Point]:
    """All points in the order of the file; refuses unknown keys, an empty matrix and two points of one name."""
    sweep = loaded.sweep
    cells = [cell for cell in _product(sweep) if not _excluded(sweep, cell)]
    cells += [_included(sweep, table) for table in sweep.include]
    if not cells:
        raise ConfigError(
            "launch.matrix-empty-after-exclude",
            f"{loaded.path}: the matrix is empty after exclude: there is no point to run",
            hint="an exclude table leaves out every point that matches all its axes",
        )
    names = _names(cells, _short_names(sweep))
    points = [_point(loaded, cell, name) for cell, name in zip(cells, names, strict=True)]
    axes = {*axes_of(sweep), "memory_limit", "time_limit", "name"}
    points = [replace(p, in_grid=set(p.values) <= axes) for p in points]
    _check_names(loaded, points)
    return points


Cell = list[tuple[str, Any]]
"""(axis, value) pairs."""


def _product(sweep: SweepConfig) -> Iterator[Cell]:
    axes: list[list[Cell]] = [[[(key, value)] for value in values] for key, values in sweep.matrix.items()]
    axes += [[list(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True)] for group in sweep.zip]
    if not axes:
        return
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_POINTS:
        raise ConfigError(
            "launch.matrix-points",
            f"the matrix has {count:,} points",
            hint=f"at most {MOST_POINTS:,} are possible; use exclude or zip",
        )
    for combination in itertools.product(*axes):
        yield [pair for part in combination for pair in part]


def _label(value: Any) -> Any:
    return value["name"] if isinstance(value, Mapping) else value


def _shown(value: Any) -> Any:
    """One cell of a table: a list as the text it has in the file."""
    label = _label(value)
    return as_written(label) if isinstance(label, (list, tuple)) else label


def _excluded(sweep: SweepConfig, cell: Cell) -> bool:
    values = {key: _label(value) for key, value in cell}
    return any(
        table and all(values.get(key) in (want if isinstance(want, list) else [want]) for key, want in table.items())
        for table in sweep.exclude
    )


def _included(sweep: SweepConfig, table: Mapping[str, Any]) -> Cell:
    """An extra point; a bundle may be given by its name."""
    cell: Cell = []
    order = axes_of(sweep)
    for key, value in sorted(table.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)):
        bundles = {v["name"]: v for v in sweep.matrix.get(key, ()) if isinstance(v, Mapping)}
        cell.append((key, bundles.get(value, value) if isinstance(value, str) else value))
    return cell


def _short_names(sweep: SweepConfig) -> dict[str, str]:
    """The last part of a dotted key where that is enough to tell the axes apart."""
    axes = set(axes_of(sweep))
    # A limit names a point only where it is an axis: it says how the point is run, not what it is.
    further = {key for table in sweep.include for key in table} - {"name", "memory_limit", "time_limit"}
    keys = axes | further
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: (tail if last.count(tail := key.rsplit(".", 1)[-1]) == 1 else key) for key in keys}


def _names(cells: Sequence[Cell], shorts: Mapping[str, str]) -> list[str]:
    """One name per point: as given, else its axes' words. Different values that make one word (0.1 and -0.1) are told apart by a number."""
    words: dict[str, dict[str, str]] = {}
    for cell in cells:
        for key, value in cell:
            mine = words.setdefault(key, {})
            mine.setdefault(_identity(value), _unlike(_word(shorts.get(key, key), value), mine.values()))

    def name(cell: Cell) -> str:
        given = next((_plain(str(v), keep=".") for k, v in cell if k == "name"), None)
        return _short(given or ".".join(words[key][_identity(value)] for key, value in cell if key in shorts))

    return [name(cell) for cell in cells]


def _identity(value: Any) -> str:
    """A table is its name: two of one name are a mistake, which the check for equal names finds."""
    return json.dumps(_label(value), default=str)


def _unlike(word: str, others: Collection[str]) -> str:
    return next(w for n in itertools.count(1) if (w := word if n == 1 else f"{word}-{n}") not in others)


def _word(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return _plain(str(value["name"]))
    if isinstance(value, bool):
        return key if value else f"no-{key}"
    if isinstance(value, (int, float)) and value < 0:
        return f"{key}-minus-{_plain(str(value))}"
    return f"{key}-{_plain(str(value))}"


def _plain(text: str, keep: str = "") -> str:
    """Fit for the name of a folder; an accent is left away rather than its letter."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(rf"[^A-Za-z0-9_+{keep}-]+", "-", letters).strip("-+.") or "x"


def _short(name: str) -> str:
    """A folder's name has at most 255 bytes: the end of a very long one is replaced by a number made from the whole."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{digest}"


def _point(loaded: LoadedSweep, cell: Cell, name: str) -> Point:
    sweep = loaded.sweep
    settings: dict[str, Any] = {}
    for key, value in cell:
        if isinstance(value, Mapping):
            settings |= {k: v for k, v in value.items() if k != "name"}
        elif key != "name":
            settings[key] = value
    run = {key: settings.get(key, sweep.set.get(key, getattr(sweep, key))) for key in POINT_KEYS}
    limits = _limits(run, f"{loaded.path}: point {name}")
    values = {key: _shown(value) for key, value in cell if key != "name"}
    if sweep.command is not None:
        words = tuple(shlex.split(sweep.command))
        return Point(name=name, values=values, settings={**sweep.set, **settings}, words=words, **limits)
    assert loaded.base is not None
    raw = copy.deepcopy(loaded.base)
    for key, value in settings.items():
        if key not in POINT_KEYS:
            put(raw, key, value)
    raw["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", f"{sweep.name}.{name}")[:120]
    recipe = validate(Recipe, raw, f"{loaded.path}: point {name}")
    problem = None
    try:
        check(recipe)
    except ConfigError as error:
        problem = " ".join(line.strip() for line in error.message.splitlines()[1:]) or error.message
    return Point(name=name, values=values, settings=settings, raw=raw, recipe=recipe, problem=problem, **limits)


def _limits(run: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return {
            "devices": None if run["devices"] is None else int(run["devices"]),
            "memory_limit": None if run["memory_limit"] is None else parse_bytes(run["memory_limit"]),
            "time_limit": None if run["time_limit"] is None else parse_seconds(run["time_limit"]),
        }
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            "launch.failed",
            f"{where}: {error}",
            hint='for example devices = 2, memory_limit = "2 GiB", time_limit = "5m"',
        ) from None


def _check_names(loaded: LoadedSweep, points: Sequence[Point]) -> None:
    seen: dict[str, Point] = {}
    for point in points:
        other = seen.setdefault(point.name, point)
        if other is not point:
            first, second = (", ".join(f"{k} = {v!r}" for k, v in p.values.items()) for p in (other, point))
            raise ConfigError(
                "launch.two-points-called",
                f"{loaded.path}: two points are called {point.name}: ({first}) and ({second})",
                hint="take one out with exclude, or give an included point a `name` of its own",
            )
