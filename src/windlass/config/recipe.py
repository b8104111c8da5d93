"""A recipe: one TOML file that describes one run, frozen once loaded."""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from windlass.config.base import Table
from windlass.config.data import DataConfig
from windlass.config.launch import LaunchConfig
from windlass.config.layout import LayoutConfig
from windlass.config.model import ModelConfig
from windlass.config.observe import EnergyConfig, ProfileConfig, TrackersConfig
from windlass.config.optim import OptimConfig
from windlass.config.save import SaveConfig
from windlass.config.train import TrainConfig


class Recipe(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    """Letters, digits, dot, dash and underscore: it becomes the run folder's name."""
    cluster: str = "workstation"
    """Cluster that the run uses; `windlass clusters` lists them."""
    nodes: PositiveInt = 1
    """Number of nodes of one job; the number of devices follows from the cluster."""
    seed: NonNegativeInt = 0
    """Determines the initial weights and the order of sequences, on any number of devices."""
    notes: str = ""
    """Anything a reader should know: what was published, what is assumed."""
    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    layout: LayoutConfig | None = None
    """None: the planner chooses and prints its reason."""
    save: SaveConfig = Field(default_factory=SaveConfig)
    energy: EnergyConfig = Field(default_factory=EnergyConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors that check TOML (for example Even Better TOML)."""
    schema = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": schema, "title": "windlass recipe", **Recipe.model_json_schema()}
