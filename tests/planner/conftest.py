from pathlib import Path

import pytest

from windlass.clusters import load_cluster
from windlass.config import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe_of():
    """A shipped recipe by name, with overrides."""

    def load(name, *overrides):
        return load_recipe(RECIPES / f"{name}.toml", list(overrides)).recipe

    return load


@pytest.fixture
def cluster_of():
    return load_cluster


@pytest.fixture
def small():
    """A recipe that is small in every respect; keyword arguments replace whole tables."""

    def make(**tables):
        raw = {
            "name": "small", "cluster": "snellius-h100", "nodes": 2,
            "model": {"layers": 12, "width": 768, "ffn": 2048, "heads": 12, "kv_heads": 4, "vocab": 32000},
            "data": {"tokens": 10**9, "seq_len": 2048, "batch_tokens": 2048 * 128},
        }  # fmt: skip
        for key, value in tables.items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        return Recipe.model_validate(raw)

    return make
