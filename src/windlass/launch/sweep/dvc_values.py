"""The values of `${...}` in a dvc.yaml: params.yaml and `vars`, filled in as DVC does. `${item...}` and `${key}` stay for the points."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from windlass.errors import ConfigError

EXPRESSION = re.compile(r"(?<!\\)\$\{\s*(.*?)\s*\}")
"""`${a.b[0]}`; a backslash before it leaves it to the shell."""
DEFAULT_FILE = "params.yaml"


def load_values(listed: Any, folder: Path, *, default: bool) -> dict[str, Any]:
    """The values of `vars` (files, or tables written there), after those of params.yaml."""
    parts = listed if isinstance(listed, list) else []
    files = [part.partition(":")[0] for part in parts if isinstance(part, str)]
    if default and DEFAULT_FILE not in files and (folder / DEFAULT_FILE).is_file():
        parts = [DEFAULT_FILE, *parts]
    values: dict[str, Any] = {}
    for part in parts:
        table = part
        if not isinstance(part, Mapping):  # `params.yaml`, or `params.yaml:train,data` for some of its tables
            name, _, keys = str(part).partition(":")
            table = _read_file(folder / name)
            table = {key: table[key] for key in keys.split(",") if key in table} if keys else table
        values = _merge(values, table)
    return values


def _read_file(path: Path) -> Mapping[str, Any]:
    parsers: dict[str, Callable[[str], Any]]
    parsers = {".yaml": read_yaml, ".yml": read_yaml, ".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in parsers:
        raise ConfigError(
            "sweep.dvc-values-format",
            f"{path}: values are read from YAML, JSON and TOML only",
            hint="write them in one of these formats",
        )
    try:
        value = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "sweep.dvc-values-unreadable",
            f"{path} cannot be read: {error.strerror}",
            hint="it is named in `vars` of the dvc.yaml",
        ) from None
    except (ValueError, yaml_module().YAMLError) as error:
        raise ConfigError(
            "sweep.dvc-values-invalid", f"{path} is not valid: {error}", hint="it is read for the values of a dvc.yaml"
        ) from None
    return value if isinstance(value, Mapping) else {}


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shared = [k for k, v in other.items() if isinstance(v, Mapping) and isinstance(one.get(k), Mapping)]
    return {**one, **other, **{key: _merge(one[key], other[key]) for key in shared}}


def fill(value: Any, values: Mapping[str, Any], origin: str) -> Any:
    """Replace every expression by its value; a text that is only one expression becomes the value itself (a list or table)."""
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
                hint=f"{sources}; \\${{...}} leaves it to the shell",
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
    """By the rules of YAML 1.2, as DVC reads: `no` is a string (and a language), `1e-3` a number, `010` ten."""
    return yaml_module().load(text, Loader=_dvc_loader())


@cache
def _dvc_loader() -> type:
    class DvcLoader(yaml_module().SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def integer(loader: Any, node: Any) -> int:
        text = str(node.value).replace("_", "")
        return int(text, 0) if re.match(r"[-+]?0[bxo]", text) else int(text)

    exponent = r"[eE][-+]?[0-9]+"
    numbers = rf"[0-9][0-9_]*\.[0-9_]*(?:{exponent})?|[0-9][0-9_]*{exponent}|\.[0-9_]+(?:{exponent})?|\.(?:inf|Inf|INF)"
    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
        ("float", rf"[-+]?(?:{numbers})|\.(?:nan|NaN|NAN)", "-+0123456789."),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("merge", r"<<", "<"),
    ):
        DvcLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    DvcLoader.add_constructor("tag:yaml.org,2002:int", integer)
    return DvcLoader
