"""The recipe, data and sweep files as frozen models: loading, overrides and checks."""

from windlass.config.launch import LaunchConfig
from windlass.config.load import Loaded, check, load_recipe, recipe_hash, validate
from windlass.config.model import ModelConfig
from windlass.config.observe import EnergyConfig, ProfileConfig, TrackersConfig
from windlass.config.recipe import DataConfig, DataStage, LayoutConfig, OptimConfig, Recipe, TrainConfig
from windlass.config.save import SaveConfig

__all__ = [
    "DataConfig", "DataStage", "EnergyConfig", "LaunchConfig", "LayoutConfig", "Loaded", "ModelConfig", "OptimConfig",
    "ProfileConfig", "Recipe", "SaveConfig", "TrackersConfig", "TrainConfig", "check", "load_recipe", "recipe_hash",
    "validate",
]  # fmt: skip
