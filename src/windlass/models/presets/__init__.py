"""Published model families: recipe keys to `ModelSpec`, Hugging Face names and weight transforms. Torch-free."""

from __future__ import annotations

from windlass.config import ModelConfig
from windlass.models.spec import ModelSpec
from windlass.registry import PRESETS



def model_spec(config: ModelConfig) -> ModelSpec:
    """The model that a recipe's `[model]` table describes."""
    spec: ModelSpec = PRESETS.load(config.family)(config)
    return spec
