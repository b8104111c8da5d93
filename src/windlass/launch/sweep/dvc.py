"""Sweeps and DVC pipelines: a sweep as a matrix stage over its points, and a matrix stage as a sweep of its command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.config import validate
from windlass.config.sweep import LoadedSweep, SweepConfig, find_problems
from windlass.errors import ConfigError, RunError
from windlass.files import write_atomic
from windlass.launch.sweep.dvc_values import (
    EXPRESSION,
    as_text,
    belongs_to_point,
    fill,
    load_values,
    look_up,
    read_yaml,
    split_path,
    yaml_module,
)
from windlass.launch.sweep.points import SweepPoint


def write_dvc(loaded: LoadedSweep, points: Sequence[SweepPoint], path: Path) -> None:
    """One stage with a matrix over the points, without the excluded ones and with the included ones."""
    if path.exists():
        raise RunError(
            "sweep.file-exists", f"{path} already exists", hint="name a new file; copy the stage over by hand"
        )
    sweep, folder, file = loaded.sweep, f"runs/{loaded.sweep.name}", loaded.path
    # DVC starts a stage in the folder of its dvc.yaml; the sweep's paths are relative to this folder.
    workdir = os.path.relpath(Path.cwd(), path.parent)
    recipe = [os.path.normpath(file.parent / sweep.recipe)] if isinstance(sweep.recipe, str) else []
    stage = {
        "matrix": {"point": [p.name for p in points]},
        **({} if workdir == "." else {"wdir": workdir}),
        "cmd": f"windlass sweep {shlex.quote(str(file))} --run {folder} --point ${{item.point}}",
        "deps": [str(file), *recipe],
        # DVC removes outputs before it runs a stage; the outcome is in the sweep's folder, which must stay.
        "outs": [{f"{folder}/points/${{item.point}}": {"persist": True, "cache": False}}],
    }
    write_atomic(path, yaml_module().safe_dump({"stages": {sweep.name: stage}}, sort_keys=False, width=200))


def read_dvc(path: Path, stage: str | None = None) -> LoadedSweep:
    """A matrix stage of a dvc.yaml as a sweep of its command: the stage named, else the only one."""
    try:
        text = path.read_text(encoding="utf-8")
        value = read_yaml(text)
    except FileNotFoundError:
        raise ConfigError(
            "sweep.file-missing", f"there is no file {path}", hint="name a dvc.yaml or a sweep file"
        ) from None
    except yaml_module().YAMLError as error:
        raise ConfigError(
            "sweep.dvc-invalid", f"{path} is not valid YAML: {error}", hint="`dvc stage list` shows what is wrong"
        ) from None
    tables = value if isinstance(value, Mapping) else {}
    listed = tables.get("stages")
    rows = listed.items() if isinstance(listed, Mapping) else ()
    stages = {str(n): s for n, s in rows if isinstance(s, Mapping) and "matrix" in s and "cmd" in s}
    name = stage or (next(iter(stages)) if len(stages) == 1 else None)
    if name not in stages:
        fault = f"has no matrix stage {stage}" if stage else f"has {len(stages) or 'no'} matrix stages"
        raise ConfigError(
            "sweep.dvc-stage",
            f"{path} {fault} (matrix stages: {', '.join(stages) or 'none'})",
            hint="--stage NAME chooses one",
        )
    values = load_values(tables.get("vars"), path.parent, default=True)
    return LoadedSweep(_stage_as_sweep(name, stages[name], values, path), text, path, None)


def _stage_as_sweep(name: str, stage: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> SweepConfig:
    origin = f"{path}: stage {name}"
    workdir = str(fill(stage.get("wdir") or ".", values, origin))
    values = {**values, **load_values(stage.get("vars"), path.parent / workdir, default=False)}
    stage = fill({k: v for k, v in stage.items() if k not in ("vars", "wdir")}, values, origin)
    matrix, folder = stage["matrix"], Path(os.path.relpath(path.parent)) / workdir
    if not isinstance(matrix, Mapping) or not all(isinstance(axis, list) for axis in matrix.values()):
        raise ConfigError(
            "sweep.dvc-matrix",
            f"{origin}: its matrix is not axes with lists of values",
            hint="matrix: {model: [small, large]}",
        )
    lines = stage["cmd"] if isinstance(stage["cmd"], list) else str(stage["cmd"]).splitlines()
    # DVC starts each line in a shell of its own, one after another, as long as all succeed.
    calls = [_as_template(str(line), matrix, origin) for line in lines if str(line).strip()]
    start = os.path.normpath(_as_template(str(folder), matrix, origin))
    enter = [] if start == "." else [f"cd {shlex.quote(start)}"]
    shell = " && ".join([*enter, *(calls if len(calls) == 1 else [f"(\n{call}\n)" for call in calls])])
    # The first metrics file is where a stage leaves its numbers.
    first = next(iter(stage.get("metrics") or []), None)
    results = next(iter(first)) if isinstance(first, Mapping) else first
    raw = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-") or "stage",
        "command": shlex.join(["bash", "-c", shell]),
        "matrix": {str(key): _axis(str(key), axis) for key, axis in matrix.items()},
        "results": results and "./" + _as_template(os.path.normpath(folder / str(results)), matrix, origin),
    }
    sweep = validate(SweepConfig, raw, origin)
    if problems := find_problems(sweep, same_points=False):
        raise ConfigError(
            "sweep.invalid-file",
            f"{origin}: {'; '.join(problems)}",
            hint="docs/guides/sweep.md says what is read of a dvc.yaml",
        )
    return sweep


# -- the matrix -------------------------------------------------------------------------------------------------------


def _is_divided(value: Any) -> bool:
    return isinstance(value, (Mapping, list))


def _axis(key: str, values: Sequence[Any]) -> list[Any]:
    """Plain values stay; where one is a list or a table, each becomes a table with its parts and DVC's name of it."""
    if not any(map(_is_divided, values)):
        return list({as_text(value): value for value in values}.values())  # a value twice is one point to DVC
    return [_axis_table(key, value, index) for index, value in enumerate(values)]


def _axis_table(key: str, value: Any, index: int) -> dict[str, Any]:
    """Its name is its own `name`, else its few plain parts, else as DVC counts it: `shape0`."""
    table = value if isinstance(value, Mapping) else {}
    counted = f"{key}{index}" if _is_divided(value) else as_text(value)
    described = ", ".join(f"{k} {as_text(v)}" for k, v in table.items())
    name = described if 0 < len(table) <= 3 and not any(map(_is_divided, table.values())) else counted
    # How many nodes and devices a point takes, whatever the axis is called: a job needs to know.
    place = {k: table[k] for k in ("nodes", "devices") if isinstance(table.get(k), int)}
    own_name = table["name"] if isinstance(table.get("name"), str) else name
    return {**place, **dict(_parts(value, key)), key: as_text(value), f"{key}_key": counted, "name": own_name}


def _parts(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """`shape_nodes` for `${item.shape.nodes}`."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield f"{prefix}_{key}", as_text(item)
        yield from _parts(item, f"{prefix}_{key}")


def _as_template(text: str, matrix: Mapping[str, Sequence[Any]], origin: str) -> str:
    """`${item.shape.nodes}` -> `{shape_nodes}`, `${key}` -> DVC's name of the point; the shell's own braces are doubled."""
    parts, last = [], 0
    for match in EXPRESSION.finditer(text):
        parts += [_double_braces(text[last : match.start()]), _placeholder(match[1], matrix, origin)]
        last = match.end()
    return "".join([*parts, _double_braces(text[last:])])


def _placeholder(expression: str, matrix: Mapping[str, Sequence[Any]], origin: str) -> str:
    path = split_path(expression)
    if path == ["key"]:
        return "-".join(
            f"{{{key}_key}}" if any(map(_is_divided, axis)) else f"{{{key}}}" for key, axis in matrix.items()
        )
    if len(path) < 2 or not belongs_to_point(expression):
        raise ConfigError(
            "sweep.dvc-value-missing",
            f"{origin}: ${{{expression}}} is not a value",
            hint="${item.AXIS} is one, or ${key}",
        )
    for value in look_up(path[1], matrix, origin):
        look_up(".".join(path[1:]), {path[1]: value}, origin)
    return "{" + "_".join(path[1:]) + "}"


def _double_braces(text: str) -> str:
    return text.replace("\\${", "${").replace("{", "{{").replace("}", "}}")
