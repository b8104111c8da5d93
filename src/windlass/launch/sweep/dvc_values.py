"""What stands for `${...}` in a dvc.yaml? Values of params.yaml and `vars`, filled in as DVC does; `${item...}` and `${key}` stay for the points."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from windlass.errors import ConfigError

PLACE = re.compile(r"(?<!\\)\$\{\s*(.*?)\s*\}")
"""`${a.b[0]}`; a backslash before it leaves it to the shell."""
DEFAULT_FILE = "params.yaml"
OF_POINT = ("item", "key")


def known_values(listed: Any, folder: Path, *, default: bool) -> dict[str, Any]:
    """The values of `vars` (files, or tables written there), after those of params.yaml."""
    parts = listed if isinstance(listed, list) else []
    files = [part.partition(":")[0] for part in parts if isinstance(part, str)]
    found: dict[str, Any] = {}
    if default and DEFAULT_FILE not in files and (folder / DEFAULT_FILE).is_file():
        found = dict(_read(folder / DEFAULT_FILE))
    for part in parts:
        found = _merged(found, part if isinstance(part, Mapping) else _of_file(str(part), folder))
    return found


def _of_file(text: str, folder: Path) -> Mapping[str, Any]:
    """`params.yaml`, or `params.yaml:train,data` for some of its tables."""
    name, _, wanted = text.partition(":")
    values = _read(folder / name)
    return {key: values[key] for key in wanted.split(",") if key in values} if wanted else values


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = _READERS[path.suffix](text)
    except KeyError:
        raise ConfigError("launch.values-read-yaml-json", f"{path}: values are read from YAML, JSON and TOML only", hint="write them as one of these") from None  # fmt: skip
    except OSError as error:
        raise ConfigError("launch.cannot-read", f"{path} cannot be read: {error.strerror}", hint="it is named in `vars` of the dvc.yaml") from None  # fmt: skip
    except (ValueError, yaml().YAMLError) as error:
        raise ConfigError(
            "launch.valid", f"{path} is not valid: {error}", hint="it is read for the values of a dvc.yaml"
        ) from None
    return value if isinstance(value, Mapping) else {}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _merged(one[k], v) for k, v in other.items() if isinstance(v, Mapping) and isinstance(one.get(k), Mapping)}  # fmt: skip
    return {**one, **other, **both}


def filled(value: Any, known: Mapping[str, Any], where: str) -> Any:
    """With every known value in its place: a text that is nothing but one place becomes the value itself, a list or a table too."""
    if isinstance(value, Mapping):
        return {key: filled(item, known, where) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, known, where) for item in value]
    if not isinstance(value, str):
        return value
    whole = PLACE.fullmatch(value)
    if whole and not of_point(whole[1]):
        return look_up(whole[1], known, where)
    return PLACE.sub(lambda m: m[0] if of_point(m[1]) else as_text(look_up(m[1], known, where)), value)


def of_point(expression: str) -> bool:
    return re.split(r"[.\[]", expression)[0] in OF_POINT


def steps(expression: str) -> list[str]:
    """`a.b[0]` -> a, b, 0."""
    return expression.replace("[", ".").replace("]", "").split(".")


def look_up(expression: str, known: Any, where: str) -> Any:
    here = known
    for part in steps(expression):
        try:
            here = here[int(part)] if isinstance(here, list) else here[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ConfigError(
                "launch.value",
                f"{where}: ${{{expression}}} has no value: there is no {part}",
                hint=f"values come from {DEFAULT_FILE}, `vars` and the matrix (${{item.AXIS}}); \\${{...}} leaves it to the shell",
            ) from None
    return here


def as_text(value: Any) -> str:
    """As DVC writes a value into a command: `true`, and a table as options, `--lr 0.1 --tags a b`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return " ".join(option for key, item in _flat(value) for option in _options(key, item))
    return str(value)


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        pairs += _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else [(f"{prefix}{key}", item)]
    return pairs


def _options(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    if isinstance(value, list):
        return [f"--{key}", *(_quoted(item) for item in value)] if value else []
    return [f"--{key}", _quoted(value)]


def _quoted(value: Any) -> str:
    return shlex.quote(value) if isinstance(value, str) else str(value)


def yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "launch.reading-writing-dvc-yaml", "reading and writing dvc.yaml needs PyYAML", hint="pip install pyyaml"
        ) from None
    return yaml


def read_yaml(text: str) -> Any:
    """By the rules of YAML 1.2, as DVC reads: `no` is a word (and a language), `1e-3` a number, `010` ten."""
    return yaml().load(text, Loader=_loader())


@cache
def _loader() -> type:
    class Loader(yaml().SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def number(loader: Any, node: Any) -> int:
        text = str(node.value).replace("_", "")
        return int(text, 0) if re.match(r"[-+]?0[bxo]", text) else int(text)

    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
        ("float", r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)", "-+0123456789."),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("merge", r"<<", "<"),
    ):  # fmt: skip
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))
    Loader.add_constructor("tag:yaml.org,2002:int", number)
    return Loader


_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": json.loads,
    ".toml": tomllib.loads,
}
