"""Recipes and clusters that the launch tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.config import Recipe, validate

RAW = {
    "name": "nine-b",
    "cluster": "leonardo-booster",
    "nodes": 16,
    "model": {"family": "llama", "layers": 34, "width": 4096, "ffn": 12288, "heads": 32, "kv_heads": 8, "vocab": 50000},
    "data": {"store": "data/shards", "tokens": "1T", "seq_len": 4096, "batch_tokens": "4Mi"},
    "layout": {"shard": "hybrid", "micro_batch": 2},
    "launch": {"account": "EUHPC_A01_006", "venv": "/project/venv"},
    "trackers": {"wandb": True},
}


def _merge(base: dict, top: dict) -> dict:
    merged = dict(base)
    for key, value in top.items():
        merged[key] = (
            _merge(merged[key], value) if isinstance(merged.get(key), dict) and isinstance(value, dict) else value
        )
    return merged


@pytest.fixture
def make_recipe():
    """`make_recipe(cluster="lumi-g", launch={"chain": 3})`: a recipe of nine billion parameters with the changes applied."""

    def make(**changes) -> Recipe:
        return validate(Recipe, _merge(RAW, changes), "test recipe")

    return make


@pytest.fixture
def golden(request):
    """Compare a text with its golden file; `WINDLASS_GOLDEN=write` writes it anew."""
    import os

    folder = Path(__file__).parents[1] / "golden" / "launch"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if os.environ.get("WINDLASS_GOLDEN") == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: run with WINDLASS_GOLDEN=write, read it, commit it"
        assert text == path.read_text()

    return compare
