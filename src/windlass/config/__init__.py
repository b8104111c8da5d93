"""What does a run consist of? Frozen models of a recipe; load, override and check them."""

from windlass.config.data import DataConfig, Stage
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
    "DataConfig", "EnergyConfig", "LaunchConfig", "LayoutConfig", "Loaded", "ModelConfig", "OptimConfig", "ProfileConfig",
    "Recipe", "SaveConfig", "Stage", "TrackersConfig", "TrainConfig", "check", "load_recipe", "recipe_hash", "validate",
]  # fmt: skip
