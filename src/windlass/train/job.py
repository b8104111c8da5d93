"""What do the loop and its hooks share? A run in the making: its parts, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from windlass.checkpoint.save import Saver
from windlass.config import Recipe, recipe_hash
from windlass.energy.meter import Meter
from windlass.runs.folder import Run
from windlass.train.geometry import Geometry
from windlass.train.hooks import Hook
from windlass.train.interval import IntervalChoice, SaveTimer
from windlass.train.mesh import World
from windlass.train.metrics import Recorder
from windlass.train.optimizers.base import Optimizer
from windlass.train.parallelize import Parts
from windlass.train.signals import StopFlag
from windlass.train.state import training_state
from windlass.train.step import Stepper
from windlass.train.validate import Validation, Validator

Say = Callable[[str], None]


@dataclass
class Job:
    """A run in the making: what the loop and its hooks share."""

    recipe: Recipe
    run: Run
    world: World
    geometry: Geometry
    parts: Parts
    optimizer: Optimizer
    stepper: Stepper
    stream: Any
    say: Say
    recorder: Recorder
    saver: Saver
    stop: StopFlag
    interval: SaveTimer
    meter: Meter | None
    validator: Validator | None = None
    hooks: list[Hook] = field(default_factory=list)
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    sequences: int = 0
    """The stream's position: global sequences consumed, skipped ranges included."""
    energy_carried: float | None = None
    data_seconds: float = 0.0
    validation: Validation | None = None
    """The newest validation pass, done after `val_step` steps."""
    val_loss: float | None = None
    val_step: int | None = None
    best: list[float] = field(default_factory=list)
    """The lowest values of save.metric that were saved, at most save.keep_best."""
    rolled_back: bool = False
    began: float = field(default_factory=time.monotonic)
    first_step: int = 0
    """Where this process began."""
    first_done: float = 0.0
    """When its first step was done."""
    told: IntervalChoice | None = None
    """The saving interval that was last announced."""

    def state(self) -> dict[str, Any]:
        return training_state(self.optimizer, self.stepper.guard)

    def extra(self) -> dict[str, Any]:
        """The small values of a checkpoint."""
        return {
            "step": self.step, "tokens": self.tokens, "sequences": self.sequences, "energy_joules": self.energy_total(),
            "recipe_hash": recipe_hash(self.recipe), "seed": self.recipe.seed, "rolled_back": self.rolled_back, "best": self.best, "config": self.recipe.model_dump(mode="json"),
            "schedule": {"total_tokens": self.geometry.total_tokens, "name": self.recipe.optim.schedule, "lr": self.recipe.optim.lr},
        }  # fmt: skip

    def energy(self) -> dict[str, float | None]:
        """Of this node; only one rank per node knows it."""
        if self.meter is None:
            return {"joules": None, "watts": None, "utilization": None}
        return {"joules": self.meter.joules(), "watts": self.meter.watts(), "utilization": self.meter.utilization()}

    def energy_total(self) -> float | None:
        """Of the whole job, all restarts together."""
        mine = None if self.meter is None else self.meter.joules()
        if self.world.size == 1:
            return mine
        values: list[float | None] = [None] * self.world.size
        dist.all_gather_object(values, mine)
        known = [v for v in values if v is not None]
        return sum(known) if known else None
