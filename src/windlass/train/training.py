"""What the loop and its hooks share: the parts of a run in training, and its position."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from windlass.config import Recipe
from windlass.energy.meter import Meter
from windlass.models.spec import ModelSpec
from windlass.runs.folder import Run
from windlass.runs.starts import Start
from windlass.train.batches import BatchPlan
from windlass.train.mesh import World
from windlass.train.parallelize import ModelParts
from windlass.train.validate import Validator

Say = Callable[[str], None]
"""Shows one line to the person at the terminal."""


@dataclass
class Progress:
    """The position of a run; the only thing here that changes."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    sequences: int = 0
    """The stream's position: global sequences consumed, skipped ranges included."""

    def advance(self, plan: BatchPlan) -> None:
        self.step += 1
        self.tokens += plan.tokens_per_step
        self.sequences += plan.layout.sequences_per_step


@dataclass(frozen=True)
class Training:
    """A run in training. Hooks read it; only the loop moves `progress`."""

    recipe: Recipe
    run: Run
    start: Start
    spec: ModelSpec
    world: World
    plan: BatchPlan
    parts: ModelParts
    optimizer: Any
    stepper: Any
    stream: Any
    validator: Validator | None
    meter: Meter | None
    progress: Progress
    say: Say
    started_at: float = field(default_factory=time.monotonic)

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def tokens(self) -> int:
        return self.progress.tokens

    def energy(self) -> dict[str, float | None]:
        """Of this node, on the one rank per node that measures it; None on the others."""
        meter = self.meter
        if meter is None:
            return {"joules": None, "watts": None, "utilization": None}
        return {"joules": meter.joules(), "watts": meter.watts(), "utilization": meter.utilization()}

    def total_joules(self) -> float | None:
        """Of the whole job, all restarts together. Call it on every rank."""
        mine = None if self.meter is None else self.meter.joules()
        if self.world.size == 1:
            return mine
        values: list[float | None] = [None] * self.world.size
        dist.all_gather_object(values, mine)
        measured = [value for value in values if value is not None]
        return sum(measured) if measured else None
