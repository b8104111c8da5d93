"""Every value of a recipe with its origin, and the JSON schema of recipes for editors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.config.load import Loaded
from windlass.config.recipe import Recipe


@dataclass(frozen=True)
class RecipeValue:
    key: str
    value: Any
    origin: str  # recipe, override or default


def recipe_values(loaded: Loaded) -> Iterator[RecipeValue]:
    """All keys in the order of the recipe's tables."""

    def walk(table: Any, prefix: str) -> Iterator[RecipeValue]:
        for name in type(table).model_fields:
            value, key = getattr(table, name), f"{prefix}{name}"
            if hasattr(type(value), "model_fields"):
                yield from walk(value, f"{key}.")
            else:
                inner = (o for k, o in loaded.origins.items() if k.startswith(f"{key}."))
                yield RecipeValue(key, value, loaded.origins.get(key) or next(inner, "default"))

    yield from walk(loaded.recipe, "")


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors that check TOML (for example Even Better TOML)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "windlass recipe",
        **Recipe.model_json_schema(),
    }
