"""How do a sweep and a DVC pipeline become each other? A matrix stage over the points, and a matrix stage read as a sweep of its command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.config import validate
from windlass.config.sweep import LoadedSweep, SweepConfig
from windlass.errors import ConfigError, RunError
from windlass.launch.sweep.points import Point
from windlass.runs.files import write_whole

_ITEM = re.compile(r"\$\{item\.([A-Za-z0-9_.]+)\}")
_OTHER = re.compile(r"\$\{(?!item\.|key\})[^}]*\}")


def write_dvc(loaded: LoadedSweep, points: Sequence[Point], path: Path) -> None:
    """One stage with a matrix over the points: excluded ones are not there, included ones are."""
    if path.exists():
        raise RunError(f"{path} exists already", hint="name a new file; copy the stage over by hand")
    folder = f"runs/{loaded.sweep.name}"
    deps = [str(loaded.path)]
    if isinstance(loaded.sweep.recipe, str):
        deps.append(str(loaded.path.parent / loaded.sweep.recipe))
    stage = {
        "matrix": {"point": [p.name for p in points]},
        "cmd": f"windlass sweep {shlex.quote(str(loaded.path))} --run {folder} --point ${{item.point}}",
        "deps": deps,
        # DVC removes outputs before it runs a stage; the outcome is in the sweep's folder, which must stay.
        "outs": [{f"{folder}/points/${{item.point}}": {"persist": True, "cache": False}}],
    }
    write_whole(path, _yaml().safe_dump({"stages": {loaded.sweep.name: stage}}, sort_keys=False, width=200))


def read_dvc(path: Path, stage: str | None = None) -> LoadedSweep:
    """A matrix stage of a dvc.yaml as a sweep of its command."""
    try:
        text = path.read_text(encoding="utf-8")
        value = _yaml().safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}", hint="name a dvc.yaml or a sweep file") from None
    except _yaml().YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", hint="`dvc stage list` shows what is wrong") from None
    stages = value.get("stages") if isinstance(value, Mapping) else None
    found = {n: s for n, s in (stages or {}).items() if isinstance(s, Mapping) and "matrix" in s and "cmd" in s}
    name = stage or next(iter(found), None)
    if name not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"{path} has no matrix stage{f' {stage}' if stage else ''} (matrix stages: {known})", hint="--stage NAME chooses one")  # fmt: skip
    return LoadedSweep(_sweep(str(name), found[name], path), text, path, None)


def _sweep(name: str, stage: Mapping[str, Any], path: Path) -> SweepConfig:
    words = stage["cmd"] if isinstance(stage["cmd"], str) else " && ".join(stage["cmd"])
    results = _results(stage) or ""
    for text in (words, results):
        other = _OTHER.search(text)
        if other:
            raise ConfigError(f"{path}: {other.group()} in stage {name} is not of its matrix", hint="only ${item.AXIS} is understood; put the value itself there")  # fmt: skip
    words, results = (text.replace("${key}", _key(stage["matrix"])) for text in (words, results))
    matrix = {key: [_value(key, v, i) for i, v in enumerate(values)] for key, values in stage["matrix"].items()}
    raw = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", name), "command": shlex.join(["bash", "-c", _braces(words)]), "matrix": matrix,
        "results": "./" + _braces(results) if results else None,
    }  # fmt: skip
    return validate(SweepConfig, raw, f"{path}: stage {name}")


def _value(key: str, value: Any, index: int) -> Any:
    """A mapping in a DVC matrix is one value with parts: `${item.model.layers}`."""
    if not isinstance(value, Mapping):
        return value
    label = str(value.get("name") or f"{key}{index}")
    return {"name": label, f"{key}_key": f"{key}{index}", **{f"{key}_{part}": v for part, v in value.items()}}


def _key(matrix: Mapping[str, Any]) -> str:
    """DVC's own name of a point, `small-1-conf0`: the values in order, a mapping by its axis and number."""
    parts = [f"{axis}.key" if any(isinstance(v, Mapping) for v in values) else axis for axis, values in matrix.items()]
    return "-".join(f"${{item.{part}}}" for part in parts)


def _results(stage: Mapping[str, Any]) -> str | None:
    """The first metrics file, which is where a stage leaves its numbers."""
    listed = stage.get("metrics") or []
    first = listed[0] if listed else None
    return next(iter(first)) if isinstance(first, Mapping) else first


def _braces(text: str) -> str:
    """`${item.model.layers}` -> `{model_layers}`; plain braces of the shell are doubled."""
    parts, last = [], 0
    for match in _ITEM.finditer(text):
        parts += [_double(text[last : match.start()]), "{" + match.group(1).replace(".", "_") + "}"]
        last = match.end()
    return "".join([*parts, _double(text[last:])])


def _double(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading and writing dvc.yaml needs PyYAML", hint="pip install pyyaml") from None
    return yaml
