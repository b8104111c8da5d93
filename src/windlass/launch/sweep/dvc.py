"""Sweeps and DVC pipelines: a sweep as a matrix stage over its points, and a matrix stage as a sweep of its command.

Values of `${...}` come from params.yaml and `vars`, filled in as DVC does; `${item...}` and `${key}` are the point's.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from windlass.clusters.load import overlay
from windlass.config import validate
from windlass.config.load import parse_toml, refuse_implausible
from windlass.config.sweep import LoadedSweep, SweepConfig, find_problems
from windlass.errors import ConfigError, RunError
from windlass.files import parse_json, write_atomic
from windlass.launch.sweep.command import DEVICES_KEYS, NODES_KEYS, is_number
from windlass.launch.sweep.points import SweepPoint

# `${a.b[0]}`; a backslash before it leaves it to the shell.
EXPRESSION = re.compile(r"(?<!\\)\$\{\s*(.*?)\s*\}")
DEFAULT_FILE = "params.yaml"
# Types of plain values in YAML 1.2: the tag, what they look like, and with what they begin.
EXPONENT = r"[eE][-+]?[0-9]+"
FLOAT = rf"[0-9][0-9_]*\.[0-9_]*(?:{EXPONENT})?|[0-9][0-9_]*{EXPONENT}|\.[0-9_]+(?:{EXPONENT})?|\.(?:inf|Inf|INF)"
YAML_TYPES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
    ("float", rf"[-+]?(?:{FLOAT})|\.(?:nan|NaN|NAN)", "-+0123456789."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)


def write_dvc(loaded: LoadedSweep, points: Sequence[SweepPoint], path: Path) -> None:
    """One stage with a matrix over the points, without the excluded ones and with the included ones."""
    if path.exists():
        raise RunError(
            "sweep.file-exists", f"{path} already exists", hint="name a new file, then copy the stage by hand"
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
        text = path.read_text(encoding="utf-8-sig")
        value = read_yaml(text)
        refuse_implausible({"": value}, str(path))
    except FileNotFoundError:
        raise ConfigError(
            "sweep.file-missing", f"there is no file {path}", hint="name a dvc.yaml or a sweep file"
        ) from None
    except ValueError as error:
        raise ConfigError(
            "sweep.dvc-invalid", f"{path} is not valid YAML: {error}", hint="`dvc stage list` shows what is wrong"
        ) from None
    tables = value if isinstance(value, Mapping) else {}
    listed = tables["stages"] if isinstance(tables.get("stages"), Mapping) else {}
    stages = {str(n): s for n, s in listed.items() if isinstance(s, Mapping) and "matrix" in s and "cmd" in s}
    name = stage or (next(iter(stages)) if len(stages) == 1 else None)
    if name not in stages:
        fault = f"has no matrix stage {stage}" if stage else f"has {len(stages) or 'no'} matrix stages"
        raise ConfigError(
            "sweep.dvc-stage",
            f"{path} {fault} (matrix stages: {', '.join(stages) or 'none'})",
            hint="choose one with --stage NAME",
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
            f"{origin}: its matrix must map axes to lists of values",
            hint="write it like matrix: {model: [small, large]}",
        )
    lines = stage["cmd"] if isinstance(stage["cmd"], list) else str(stage["cmd"]).splitlines()
    # DVC starts each line in a shell of its own, one after another, as long as all succeed.
    calls = [_as_template(str(line), matrix, origin) for line in lines if str(line).strip()]
    calls = calls if len(calls) == 1 else [f"(\n{call}\n)" for call in calls]
    start = os.path.normpath(_as_template(str(folder), matrix, origin))
    # The folder is an argument of the shell: a quote in a value of its name must not end the name.
    argv = ["bash", "-c", " && ".join(calls)]
    argv = argv if start == "." else ["bash", "-c", " && ".join(['cd -- "$1"', *calls]), "bash", start]
    # The first metrics file is where a stage leaves its numbers.
    first = next(iter(stage.get("metrics") or []), None)
    results = next(iter(first)) if isinstance(first, Mapping) else first
    raw = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-") or "stage",
        "command": shlex.join(argv),
        "matrix": {str(key): _axis(str(key), axis) for key, axis in matrix.items()},
        "results": results and "./" + _as_template(os.path.normpath(folder / str(results)), matrix, origin),
    }
    sweep = validate(SweepConfig, raw, origin)
    if problems := find_problems(sweep, same_points=False):
        raise ConfigError(
            "sweep.invalid-file",
            f"{origin}: {'; '.join(problems)}",
            hint="docs/guides/sweep-commands.md lists what windlass reads from a dvc.yaml",
        )
    return sweep


# -- the matrix -------------------------------------------------------------------------------------------------------


def _is_divided(value: Any) -> bool:
    return isinstance(value, (Mapping, list))


def _axis(key: str, values: Sequence[Any]) -> list[Any]:
    """Plain values stay; where one is a list or a table, each becomes a table with its parts and DVC's name of it.

    The table's name is its own `name`, else its few plain parts, else as DVC counts it: `shape0`.
    """
    if not any(map(_is_divided, values)):
        return list({as_text(value): value for value in values}.values())  # a value twice is one point to DVC
    rows = []
    for index, value in enumerate(values):
        table = value if isinstance(value, Mapping) else {}
        counted = f"{key}{index}" if _is_divided(value) else as_text(value)
        is_short = 0 < len(table) <= 3 and not any(map(_is_divided, table.values()))
        name = ", ".join(f"{k} {as_text(v)}" for k, v in table.items()) if is_short else counted
        name = table["name"] if isinstance(table.get("name"), str) else name
        # How many nodes and devices a point takes, whatever the axis is called: a job needs to know.
        place = {
            keys[0]: table[k] for keys in (NODES_KEYS, DEVICES_KEYS) for k in reversed(keys) if is_number(table.get(k))
        }
        rows.append({**place, **_parts(value, key), key: as_text(value), f"{key}_key": counted, "name": name})
    return rows


def _parts(value: Any, prefix: str) -> dict[str, str]:
    """`shape_nodes` for `${item.shape.nodes}`."""
    parts: dict[str, str] = {}
    for key, item in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        parts |= {f"{prefix}_{key}": as_text(item), **_parts(item, f"{prefix}_{key}")}
    return parts


def _as_template(text: str, matrix: Mapping[str, Sequence[Any]], origin: str) -> str:
    """`${item.shape.nodes}` -> `{shape_nodes}`, `${key}` -> DVC's name of the point; other braces are doubled."""
    parts = EXPRESSION.split(text)
    for index, part in enumerate(parts):
        path = split_path(part)
        if index % 2 == 0:  # between two expressions
            parts[index] = part.replace("\\${", "${").replace("{", "{{").replace("}", "}}")
        elif path == ["key"]:
            names = (f"{key}_key" if any(map(_is_divided, axis)) else key for key, axis in matrix.items())
            parts[index] = "-".join(f"{{{name}}}" for name in names)
        elif len(path) < 2 or path[0] != "item":
            raise ConfigError(
                "sweep.dvc-value-missing",
                f"{origin}: ${{{part}}} has no value",
                hint="write ${item.AXIS} for an axis of the matrix, or ${key} for a key of params.yaml or `vars`",
            )
        else:
            for value in look_up(path[1], matrix, origin):
                look_up(".".join(path[1:]), {path[1]: value}, origin)
            parts[index] = "{" + "_".join(path[1:]) + "}"
    return "".join(parts)


# -- values of expressions -------------------------------------------------------------------------------------------


def load_values(listed: Any, folder: Path, *, default: bool) -> dict[str, Any]:
    """The values of `vars` (files, or tables written there), after those of params.yaml."""
    parts = listed if isinstance(listed, list) else []
    files = [part.partition(":")[0] for part in parts if isinstance(part, str)]
    if default and DEFAULT_FILE not in files and (folder / DEFAULT_FILE).is_file():
        parts = [DEFAULT_FILE, *parts]
    values: dict[str, Any] = {}
    for part in parts:
        # A table, `params.yaml`, or `params.yaml:train,data` for some of its tables.
        name, _, keys = ("", "", "") if isinstance(part, Mapping) else str(part).partition(":")
        table = part if isinstance(part, Mapping) else _read_file(folder / name)
        values = overlay(values, {key: table[key] for key in keys.split(",") if key in table} if keys else table)
    return values


def _read_file(path: Path) -> Mapping[str, Any]:
    parsers: dict[str, Callable[[str], Any]] = {
        ".yaml": read_yaml,
        ".yml": read_yaml,
        ".json": lambda text: parse_json(text.encode()),
        ".toml": lambda text: parse_toml(text, str(path)),
    }
    if path.suffix not in parsers:
        raise ConfigError(
            "sweep.dvc-values-format",
            f"{path}: values are read from YAML, JSON and TOML only",
            hint="write them in one of these formats",
        )
    try:
        value = parsers[path.suffix](path.read_text(encoding="utf-8"))
        refuse_implausible({"": value}, str(path))
    except OSError as error:
        raise ConfigError(
            "sweep.dvc-values-unreadable",
            f"{path} cannot be read: {error.strerror}",
            hint="correct its name in `vars` of the dvc.yaml, or restore the file",
        ) from None
    except ValueError as error:
        raise ConfigError(
            "sweep.dvc-values-invalid",
            f"{path} is not valid: {error}",
            hint="correct the file: the dvc.yaml reads values from it",
        ) from None
    return value if isinstance(value, Mapping) else {}


def fill(value: Any, values: Mapping[str, Any], origin: str) -> Any:
    """Replace every expression by its value; a text that is one expression becomes the value itself."""
    if isinstance(value, Mapping):
        return {key: fill(item, values, origin) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, values, origin) for item in value]
    if not isinstance(value, str):
        return value
    single = EXPRESSION.fullmatch(value)
    if single and not belongs_to_point(single[1]):
        return look_up(single[1], values, origin)
    return EXPRESSION.sub(lambda m: m[0] if belongs_to_point(m[1]) else as_text(look_up(m[1], values, origin)), value)


def belongs_to_point(expression: str) -> bool:
    return split_path(expression)[0] in ("item", "key")


def split_path(expression: str) -> list[str]:
    """`a.b[0]` -> a, b, 0."""
    return expression.replace("[", ".").replace("]", "").split(".")


def look_up(expression: str, values: Any, origin: str) -> Any:
    for part in split_path(expression):
        try:
            values = values[int(part)] if isinstance(values, list) else values[part]
        except (KeyError, IndexError, ValueError, TypeError):
            sources = f"values come from {DEFAULT_FILE}, `vars` and the matrix (${{item.AXIS}})"
            raise ConfigError(
                "sweep.dvc-value-missing",
                f"{origin}: ${{{expression}}} has no value: there is no {part}",
                hint=f"{sources}; \\${{...}} is left to the shell",
            ) from None
    return values


def as_text(value: Any) -> str:
    """As DVC writes a value into a command: `true`, and a table as options, `--lr 0.1 --tags a b`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(_options(value, "")) if isinstance(value, Mapping) else str(value)


def _options(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _options(value, f"{prefix}{key}.")
            continue
        items = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
        if items or value is True:  # false and an empty list are left out
            yield f"--{prefix}{key}"
        yield from (shlex.quote(item) if isinstance(item, str) else str(item) for item in items)


def yaml_module() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "sweep.pyyaml-missing", "reading and writing dvc.yaml needs PyYAML", hint="pip install pyyaml"
        ) from None
    return yaml


def read_yaml(text: str) -> Any:
    """By the rules of YAML 1.2, as DVC reads: `no` is a string (and a language), `1e-3` a number, `010` ten.

    ValueError: not YAML, nested too deeply, or an integer of thousands of digits.
    """

    class DvcLoader(yaml_module().SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def integer(loader: Any, node: Any) -> int:
        digits = str(node.value).replace("_", "")
        return int(digits, 0) if re.match(r"[-+]?0[bxo]", digits) else int(digits)

    for tag, pattern, first in YAML_TYPES:
        DvcLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    DvcLoader.add_constructor("tag:yaml.org,2002:int", integer)
    try:
        return yaml_module().load(text, Loader=DvcLoader)
    except (yaml_module().YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None
