"""How do a sweep and a DVC pipeline become each other? A matrix stage over the points, and a matrix stage read as a sweep of its command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.config import validate
from windlass.config.sweep import LoadedSweep, SweepConfig, problems_of
from windlass.errors import ConfigError, RunError
from windlass.files import write_atomic
from windlass.launch.sweep.dvc_values import (
    PLACE,
    as_text,
    filled,
    known_values,
    look_up,
    of_point,
    read_yaml,
    steps,
    yaml,
)
from windlass.launch.sweep.points import Point


def write_dvc(loaded: LoadedSweep, points: Sequence[Point], path: Path) -> None:
    """One stage with a matrix over the points: excluded ones are not there, included ones are."""
    if path.exists():
        raise RunError(
            "launch.exists-already", f"{path} exists already", hint="name a new file; copy the stage over by hand"
        )
    folder = f"runs/{loaded.sweep.name}"
    deps = [str(loaded.path)]
    if isinstance(loaded.sweep.recipe, str):
        deps.append(os.path.normpath(loaded.path.parent / loaded.sweep.recipe))
    stage = {
        "matrix": {"point": [p.name for p in points]},
        # DVC starts a stage in the folder of its dvc.yaml; the sweep's paths are meant from here.
        **({"wdir": here} if (here := os.path.relpath(Path.cwd(), path.parent)) != "." else {}),
        "cmd": f"windlass sweep {shlex.quote(str(loaded.path))} --run {folder} --point ${{item.point}}",
        "deps": deps,
        # DVC removes outputs before it runs a stage; the outcome is in the sweep's folder, which must stay.
        "outs": [{f"{folder}/points/${{item.point}}": {"persist": True, "cache": False}}],
    }
    write_atomic(path, yaml().safe_dump({"stages": {loaded.sweep.name: stage}}, sort_keys=False, width=200))


def read_dvc(path: Path, stage: str | None = None) -> LoadedSweep:
    """A matrix stage of a dvc.yaml as a sweep of its command."""
    try:
        text = path.read_text(encoding="utf-8")
        value = read_yaml(text)
    except FileNotFoundError:
        raise ConfigError("launch.file", f"there is no file {path}", hint="name a dvc.yaml or a sweep file") from None
    except yaml().YAMLError as error:
        raise ConfigError(
            "launch.valid-yaml", f"{path} is not valid YAML: {error}", hint="`dvc stage list` shows what is wrong"
        ) from None
    tables = value if isinstance(value, Mapping) else {}
    name, found = _choose(tables.get("stages"), path, stage)
    known = known_values(tables.get("vars"), path.parent, default=True)
    return LoadedSweep(_sweep(name, found, known, path), text, path, None)


def _choose(stages: Any, path: Path, wanted: str | None) -> tuple[str, Mapping[str, Any]]:
    """The stage that was asked for, else the only one: which of several is not ours to guess."""
    listed = stages.items() if isinstance(stages, Mapping) else ()
    found = {str(n): s for n, s in listed if isinstance(s, Mapping) and "matrix" in s and "cmd" in s}
    name = wanted or (next(iter(found)) if len(found) == 1 else None)
    if name not in found:
        known = ", ".join(found) or "none"
        which = f"has no matrix stage {wanted}" if wanted else "has no matrix stage" if not found else f"has {len(found)} matrix stages"  # fmt: skip
        raise ConfigError(
            "launch.matrix-stages", f"{path} {which} (matrix stages: {known})", hint="--stage NAME chooses one"
        )
    return name, found[name]


def _sweep(name: str, stage: Mapping[str, Any], known: Mapping[str, Any], path: Path) -> SweepConfig:
    where = f"{path}: stage {name}"
    inner = str(filled(stage.get("wdir") or ".", known, where))
    own = known_values(stage.get("vars"), path.parent / inner, default=False)
    whole = filled({k: v for k, v in stage.items() if k not in ("vars", "wdir")}, {**known, **own}, where)
    folder = Path(os.path.relpath(path.parent)) / inner
    matrix = whole["matrix"]
    if not isinstance(matrix, Mapping) or not all(isinstance(v, list) for v in matrix.values()):
        raise ConfigError("launch.matrix-axes-lists-values", f"{where}: its matrix is not axes with lists of values", hint="matrix: {model: [small, large]}")  # fmt: skip
    axes = {str(key): _axis(str(key), values) for key, values in matrix.items()}
    place = Places(matrix, where)
    lines = whole["cmd"] if isinstance(whole["cmd"], list) else str(whole["cmd"]).splitlines()
    shell = _shell(place.text(str(folder)), [place.text(str(line)) for line in lines])
    results = _results(whole)
    raw = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-") or "stage", "command": shlex.join(["bash", "-c", shell]), "matrix": axes,
        "results": None if results is None else "./" + place.text(os.path.normpath(folder / results)),
    }  # fmt: skip
    sweep = validate(SweepConfig, raw, where)
    if problems := problems_of(sweep, same_points=False):
        raise ConfigError("launch.failed", f"{where}: {'; '.join(problems)}", hint="docs/guides/sweep.md says what is read of a dvc.yaml")  # fmt: skip
    return sweep


def _shell(folder: str, lines: Sequence[str]) -> str:
    """DVC starts each line in a shell of its own, one after another, as long as all end well."""
    enter = [] if os.path.normpath(folder) == "." else [f"cd {shlex.quote(os.path.normpath(folder))}"]
    calls = [line for line in lines if line.strip()]
    return " && ".join([*enter, *(calls if len(calls) == 1 else [f"(\n{line}\n)" for line in calls])])


def _results(stage: Mapping[str, Any]) -> str | None:
    """The first metrics file, which is where a stage leaves its numbers."""
    listed = stage.get("metrics") or []
    first = listed[0] if listed else None
    return str(next(iter(first))) if isinstance(first, Mapping) else first


# -- the matrix -----------------------------------------------------------------------------------------------------------------


def _axis(key: str, values: Sequence[Any]) -> list[Any]:
    """Plain values stay; where one is a list or a table, each becomes a table of ours that knows its parts and what DVC calls it."""
    if not any(isinstance(value, (Mapping, list)) for value in values):
        return list({as_text(value): value for value in values}.values())  # a value twice is one point to DVC
    return [_bundle(key, value, index) for index, value in enumerate(values)]


def _bundle(key: str, value: Any, index: int) -> dict[str, Any]:
    parts = dict(_parts(value, key))
    # How many nodes and devices a point takes, whatever the axis is called: a job needs to know.
    place = {k: value[k] for k in ("nodes", "devices") if isinstance(value, Mapping) and isinstance(value.get(k), int)}
    divided = isinstance(value, (Mapping, list))
    return {**place, **parts, key: as_text(value), _field(key, "key"): f"{key}{index}" if divided else as_text(value), "name": _label(key, value, index)}  # fmt: skip


def _parts(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """`shape_nodes` for `${item.shape.nodes}`."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield _field(prefix, str(key)), as_text(item)
        yield from _parts(item, _field(prefix, str(key)))


def _field(*parts: str) -> str:
    return "_".join(parts)


def _label(key: str, value: Any, index: int) -> str:
    """Its own `name`, else its few plain parts in words, else as DVC counts it: `shape0`."""
    if not isinstance(value, (Mapping, list)):
        return as_text(value)
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return str(value["name"])
    pairs = list(value.items()) if isinstance(value, Mapping) else []
    plain = 0 < len(pairs) <= 3 and not any(isinstance(v, (Mapping, list)) for _, v in pairs)
    return ", ".join(f"{k} {as_text(v)}" for k, v in pairs) if plain else f"{key}{index}"


class Places:
    """`${item.shape.nodes}` -> `{shape_nodes}` and `${key}` -> what DVC calls the point; plain braces of the shell are doubled."""

    def __init__(self, matrix: Mapping[str, Sequence[Any]], where: str) -> None:
        self.matrix, self.where = matrix, where

    def text(self, text: str) -> str:
        parts, last = [], 0
        for match in PLACE.finditer(text):
            parts += [_double(text[last : match.start()]), self._place(match[1])]
            last = match.end()
        return "".join([*parts, _double(text[last:])])

    def _place(self, expression: str) -> str:
        words = steps(expression)
        if words == ["key"]:
            return "-".join(self._key(axis) for axis in self.matrix)
        if len(words) < 2 or not of_point(expression):
            raise ConfigError(
                "launch.value", f"{self.where}: ${{{expression}}} is not a value", hint="${item.AXIS} is one, or ${key}"
            )
        axis, rest = words[1], words[2:]
        for value in look_up(axis, self.matrix, self.where):
            look_up(".".join([axis, *rest]), {axis: value}, self.where)
        return "{" + _field(axis, *rest) + "}"

    def _key(self, axis: str) -> str:
        divided = any(isinstance(v, (Mapping, list)) for v in self.matrix[axis])
        return "{" + (_field(axis, "key") if divided else axis) + "}"


def _double(text: str) -> str:
    return text.replace("\\${", "${").replace("{", "{{").replace("}", "}}")
