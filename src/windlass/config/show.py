"""Every value of a recipe and where it came from, for `windlass show`; and the JSON schema for editors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.config.load import Loaded
from windlass.config.recipe import Recipe


@dataclass(frozen=True)
class Value:
    key: str
    value: Any
    origin: str
    """recipe, override or default."""


def values(loaded: Loaded) -> Iterator[Value]:
    """All leaves in the order of the recipe's tables."""
    yield from _walk(loaded.recipe, "", loaded)


def _walk(table: Any, prefix: str, loaded: Loaded) -> Iterator[Value]:
    for name in type(table).model_fields:
        value, key = getattr(table, name), f"{prefix}{name}"
        if hasattr(type(value), "model_fields"):
            yield from _walk(value, f"{key}.", loaded)
        else:
            yield Value(key, value, origin(key, loaded))


def origin(key: str, loaded: Loaded) -> str:
    if key in loaded.origins:
        return loaded.origins[key]
    inner = [o for k, o in loaded.origins.items() if k.startswith(f"{key}.")]
    return inner[0] if inner else "default"


def schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors that check TOML (for example Even Better TOML)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "windlass recipe",
        **Recipe.model_json_schema(),
    }
