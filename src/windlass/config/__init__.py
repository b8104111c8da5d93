"""The recipe, data and sweep files as frozen models: loading, overrides and checks."""

from windlass.config.data import DataConfig, DataStage
from windlass.config.launch import LaunchConfig
from windlass.config.layout import LayoutConfig
from windlass.config.load import Loaded, check, load_recipe, recipe_hash, validate
from windlass.config.model import ModelConfig
from windlass.config.observe import EnergyConfig, ProfileConfig, TrackersConfig
from windlass.config.optim import OptimConfig
from windlass.config.recipe import Recipe
from windlass.config.save import SaveConfig
from windlass.config.train import TrainConfig

__all__ = [
    "DataConfig", "DataStage", "EnergyConfig", "LaunchConfig", "LayoutConfig", "Loaded", "ModelConfig", "OptimConfig",
    "ProfileConfig", "Recipe", "SaveConfig", "TrackersConfig", "TrainConfig", "check", "load_recipe", "recipe_hash",
    "validate",
]  # fmt: skip
