"""How does a TOML file plus `key=value` words become a checked recipe? Every problem is found before the first is reported."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from windlass.config.base import Table
from windlass.config.files import CALLED, TAKEN_BY, kind_of, missing_hint
from windlass.config.model import ModelConfig
from windlass.errors import ConfigError
from windlass.registry import BLOCKS, PRESETS

if TYPE_CHECKING:
    from windlass.config.recipe import Recipe

T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class Loaded:
    """A recipe, the text it came from and where each value came from."""

    recipe: Recipe
    text: str
    path: Path | None
    origins: Mapping[str, str]
    """Dotted key -> "recipe" or "override"; what is absent is a default."""


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The parsed file and its text, or an error that says where the syntax broke."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("config.file", f"there is no file {path}", hint=missing_hint(path)) from None
    except IsADirectoryError:
        raise ConfigError(
            "config.folder-toml-file", f"{path} is a folder, not a TOML file", hint="name the file itself"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "config.cannot-read",
            f"{path} cannot be read: {error}",
            hint="a recipe is a UTF-8 text file that you may read",
        ) from None
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "config.valid-toml", f"{path} is not valid TOML: {error}", hint=_syntax_hint(text, str(error))
        ) from None


def _syntax_hint(text: str, message: str) -> str:
    words = message.replace(",", " ").replace(")", " ").split()
    if "line" in words:
        number = words[words.index("line") + 1]
        lines = text.splitlines()
        if number.isdigit() and 0 < int(number) <= len(lines):
            return f"line {number} reads: {lines[int(number) - 1].strip()!r}; texts need quotes, numbers none"
    return "texts need quotes, numbers none; a table begins with [name]"


def parse_override(word: str) -> tuple[tuple[str, ...], Any]:
    """`layout.micro_batch=4` -> (("layout", "micro_batch"), 4); what is no TOML value is taken as text."""
    key, equals, value = word.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError(
            "config.override", f"{word!r} is not an override", hint="write key=value, for example layout.micro_batch=4"
        )
    try:
        return parts, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return parts, value


def apply_override(raw: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set one dotted key in a raw table; `none` takes a key out again."""
    table = raw
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError("config.value-table", f"{'.'.join(parts)}: {part} is a value, not a table")
        table = inner
    if value == "none" and parts[-1] in ("layout",):
        table.pop(parts[-1], None)
    else:
        table[parts[-1]] = value


def flatten(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted leaves of nested tables, in order."""
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Loaded:
    """Read, override, check. Raises one ConfigError that lists every problem with its dotted path."""
    from windlass.config.recipe import Recipe  # all tables: only where a recipe is read

    path = Path(path)
    raw, text = read_toml(path)
    origins = {key: "recipe" for key, _ in flatten(raw)}
    for word in overrides:
        parts, value = parse_override(word)
        apply_override(raw, parts, value)
        for key in [k for k in origins if k.startswith(".".join(parts) + ".")]:
            del origins[key]
        origins[".".join(parts)] = "override"
    recipe = validate(Recipe, raw, str(path))
    check(recipe)
    return Loaded(recipe, text, path, origins)


KINDS = {"Recipe": "recipe", "DataFile": "data", "SweepConfig": "sweep"}
"""The model of a file -> its kind."""


def validate(model: type[T], raw: Mapping[str, Any], where: str) -> T:
    """A checked table, or one ConfigError naming every problem."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        wanted, kind = KINDS.get(model.__name__), kind_of(raw)
        if wanted and kind and kind != wanted:  # a list of every key that is wrong would hide the one mistake
            raise ConfigError(
                "config.failed",
                f"{where} is {CALLED[kind]}, not {CALLED[wanted]}",
                hint=f"{TAKEN_BY[kind]}; {TAKEN_BY[wanted]}",
            ) from None
        problems = [_problem(model, item) for item in error.errors()]
        raise ConfigError("config.failed", _listing(where, problems), hint=_every_key(model)) from None


def _every_key(model: type[BaseModel]) -> str:
    """Where the reader of an error finds the keys of this kind of file."""
    pages = {"DataFile": "data-file", "SweepConfig": "sweep-file", "Cluster": "cluster-file", "Device": "cluster-file"}
    if model.__name__ in pages:
        return f"every key with its meaning: docs/reference/{pages[model.__name__]}.md"
    return "`windlass show --schema` lists every key; see docs/reference/recipe.md"


def _listing(where: str, problems: Sequence[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{where}: {count}\n" + "\n".join(f"  {p}" for p in problems)


def _problem(model: type[BaseModel], item: Any) -> str:
    loc = [str(part) for part in item["loc"]]
    dotted = ".".join(loc)
    kind = item["type"]
    if kind == "extra_forbidden":
        known = _keys_at(model, loc[:-1])
        near = get_close_matches(loc[-1], known, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"{dotted}: unknown key; {advice}"
    if kind == "missing":
        return f"{dotted}: missing, and there is no default"
    message = item["msg"].removeprefix("Value error, ")
    shown = item.get("input")
    return f"{dotted}: {message}" + (
        "" if isinstance(shown, Mapping) or repr(shown) in message else f" (got {shown!r})"
    )


def _keys_at(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    here: type[BaseModel] = model
    for part in loc:
        inner: type[BaseModel] | None = None
        if issubclass(here, ModelConfig) and part not in here.model_fields:
            inner = here.extra_table(part)
        if inner is None and (part.isdigit() or part not in here.model_fields):
            continue
        inner = inner or _table_of(here.model_fields[part].annotation)
        if inner is None:
            return []
        here = inner
    tables = [name for name in BLOCKS.names() if here.extra_table(name)] if issubclass(here, ModelConfig) else []
    return [*here.model_fields, *tables]


def _table_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def check(recipe: Recipe) -> None:
    """Rules that span several keys; changes nothing and lists every problem."""
    problems = list(_cross_problems(recipe))
    if problems:
        raise ConfigError(
            "config.failed", _listing(recipe.name, problems), hint="each line names the keys that disagree"
        )


def _cross_problems(recipe: Recipe) -> Iterator[str]:
    model, data = recipe.model, recipe.data
    if model.family == "hf":
        if model.config is None:
            yield 'model.config: needed when model.family = "hf" (a folder with config.json)'
    elif model.family in PRESETS.builtin:  # families of other packages check their own keys
        for key in ("layers", "width", "heads", "vocab"):
            if getattr(model, key) is None:
                yield f"model.{key}: missing, and there is no default for family {model.family!r}"
        if model.ffn is None:
            yield f"model.ffn: missing, and there is no default for family {model.family!r}"
        if model.width and model.heads and model.head_dim is None and model.width % model.heads:
            yield f"model.heads ({model.heads}) does not divide model.width ({model.width})"
        if model.heads and model.kv_heads and model.heads % model.kv_heads:
            yield f"model.kv_heads ({model.kv_heads}) does not divide model.heads ({model.heads})"
        yield from _head_problems(model)
    if data.tokens is None and recipe.train.steps is None:
        yield "data.tokens: missing; say how many tokens (or train.steps) to train for"
    if data.batch_tokens is not None and (data.batch_tokens == 0 or data.batch_tokens % data.seq_len):
        up = (data.batch_tokens // data.seq_len + 1) * data.seq_len
        yield f"data.batch_tokens ({data.batch_tokens:,}) is not a multiple of data.seq_len ({data.seq_len:,}); the next larger one is {up:,}"
    if any(weight < 0 for weight in data.mix.values()) or (data.mix and sum(data.mix.values()) <= 0):
        yield "data.mix: weights must be at least 0 and not all 0"


def _head_problems(model: ModelConfig) -> Iterator[str]:
    """What the width of a head must be, and what retention has not."""
    if not model.heads or not model.width:
        return
    size = model.head_dim or model.width // model.heads
    if size % 2:
        yield f"model.heads ({model.heads}) of width {size} each: rotary positions turn numbers in pairs, so a head needs an even width"
    if model.family != "retnet":
        return
    values = model.value_width or model.ffn
    if values and values % model.heads:
        key = "value_width" if model.value_width else "ffn (the default of value_width)"
        up = -(-values // model.heads) * model.heads
        yield f"model.heads ({model.heads}) does not divide model.{key} ({values}); the next larger one is {up}"
    if model.kv_heads not in (None, model.heads):
        yield f"model.kv_heads ({model.kv_heads}): retention has no groups of heads; leave it out, or say model.kv_heads = {model.heads}"
    if model.head_dim is not None and model.head_dim * model.heads != model.width:
        yield f"model.head_dim ({model.head_dim}): retention's heads divide model.width ({model.width}) by {model.heads}; leave it out"


def recipe_hash(recipe: Recipe) -> str:
    """A short hash of what a run *is*: two recipes with the same hash may share a run folder."""
    value = recipe.model_dump(mode="json", include={"name", "seed", "model", "data"})
    value["data"].pop("tokens", None)
    value["data"].pop("store", None)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
