"""The recipe, data and sweep files as frozen models: loading, overrides and checks.

A name is imported when it is first used: a command that needs one table, as `windlass tokenize` does, starts without
the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "DataConfig",
    "DataStage",
    "EnergyConfig",
    "LaunchConfig",
    "LayoutConfig",
    "Loaded",
    "ModelConfig",
    "OptimConfig",
    "ProfileConfig",
    "Recipe",
    "SaveConfig",
    "TrackersConfig",
    "TrainConfig",
    "check",
    "load_recipe",
    "recipe_hash",
    "validate",
]  # fmt: skip

_HOMES = {
    "data": ("DataConfig", "DataStage"), "launch": ("LaunchConfig",), "layout": ("LayoutConfig",), "model": ("ModelConfig",),
    "load": ("Loaded", "check", "load_recipe", "recipe_hash", "validate"), "observe": ("EnergyConfig", "ProfileConfig", "TrackersConfig"),
    "optim": ("OptimConfig",), "recipe": ("Recipe",), "save": ("SaveConfig",), "train": ("TrainConfig",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
