from collections.abc import Callable
from typing import Any

import pytest

from windlass.config import Recipe
from windlass.models.presets import model_spec
from windlass.models.spec import ModelSpec


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """A small recipe; keyword arguments replace values of its tables."""

    def make(**tables: Any) -> Recipe:
        raw: dict[str, Any] = {
            "name": "small",
            "model": {"layers": 12, "width": 768, "ffn": 2048, "heads": 12, "kv_heads": 4, "vocab": 32000},
            "data": {"tokens": 10**9, "seq_len": 2048, "batch_tokens": 2048 * 128},
        }
        for key, value in tables.items():
            raw[key] = {**raw.get(key, {}), **value}
        return Recipe.model_validate(raw)

    return make


@pytest.fixture
def model(recipe: Callable[..., Recipe]) -> ModelSpec:
    return model_spec(recipe().model)
