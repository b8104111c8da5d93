"""Models of tests: our own families by a `[model]` table, the classic ones by their sizes."""

from typing import Any

from windlass.blocks.embedding.spec import padded_rows
from windlass.config import ModelConfig
from windlass.models.presets import model_spec
from windlass.models.presets.hf import classic_spec
from windlass.models.spec import ModelSpec


def own(**keys: Any) -> ModelSpec:
    return model_spec(ModelConfig(**keys))


def retnet(**keys: Any) -> ModelSpec:
    sizes = {"layers": 16, "width": 1024, "ffn": 1728, "heads": 4, "vocab": 50000, "retention": "parallel"}
    return own(family="retnet", **{**sizes, "value_width": 1728, **keys})


def classic(family: str, *, layers: int, width: int, heads: int, vocab: int) -> ModelSpec:
    """GPT and BLOOM: four times the width inside, tied, LayerNorm and biases."""
    return classic_spec(
        family=family,
        layers=layers,
        width=width,
        hidden=4 * width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        vocab=vocab,
        rows=padded_rows(vocab),
        tied=True,
    )
