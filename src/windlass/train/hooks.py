"""What the loop and its hooks share: the parts of a run in training, its position, and the interface of hooks.

A hook is a feature that takes part in training: a class in its own file with some of the methods of `Hook`. The loop
calls, in this order: on_start; for each step on_step_begin, on_step_end and, when a line is complete, on_log; between
steps on_eval after a validation pass and on_wait and on_save around a save; at the end on_stop.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from windlass.config import Recipe
from windlass.data.stream import Stream
from windlass.energy.meter import Meter
from windlass.models.spec import ModelSpec
from windlass.runs.folder import Run
from windlass.runs.starts import Start
from windlass.train.batches import BatchPlan
from windlass.train.engines import EngineOptimizer, EngineStepper
from windlass.train.mesh import World
from windlass.train.parallelize import ModelParts
from windlass.train.step import StepResult
from windlass.train.tuning import ExampleStream, ExampleValidator
from windlass.train.validate import Validation, Validator

# Shows one line to the person at the terminal.
Say = Callable[[str], None]


@dataclass
class Progress:
    """The position of a run; the only thing here that changes."""

    step: int = 0
    tokens: int = 0
    # The stream's position: global sequences consumed, skipped ranges included.
    sequences: int = 0

    def advance(self, plan: BatchPlan) -> None:
        tokens, sequences = plan.step_size(self.step, self.tokens)
        self.step += 1
        self.tokens += tokens
        self.sequences += sequences


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
    optimizer: EngineOptimizer
    stepper: EngineStepper
    stream: Stream | ExampleStream
    validator: Validator | ExampleValidator | None
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
        names = ("joules", "watts", "utilization")
        return {name: None if self.meter is None else getattr(self.meter, name)() for name in names}

    def total_joules(self) -> float | None:
        """Of the whole job, all restarts together. Call it on every rank."""
        mine = None if self.meter is None else self.meter.joules()
        values = [mine] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(values, mine)
        measured = [value for value in values if value is not None]
        return sum(measured) if measured else None


class Hook:
    """Every method may be left out. Methods are called on every rank, in the order of the list of hooks."""

    def on_start(self, training: Training) -> None:
        """Everything is built and restored; the first step comes next."""

    def on_step_begin(self, training: Training) -> None:
        """The batch is ready and the step is about to run."""

    def on_step_end(self, training: Training, result: StepResult) -> None:
        """The step was handed to the device; its numbers are not known yet. Do not wait for the device here."""

    def on_log(self, training: Training, line: dict[str, Any]) -> None:
        """A metrics line was written (rank 0 only)."""

    def on_wait(self, training: Training, phase: str) -> None:
        """Training is about to wait in `phase` ("save", "validation")."""

    def on_save(self, training: Training) -> None:
        """A save was started."""

    def on_eval(self, training: Training, validation: Validation) -> None:
        """A validation pass is complete."""

    def on_stop(self, training: Training, reason: str | None) -> None:
        """The run ends: finished (None), stopped early, or failed ("error"). Called once, also after an error."""


def each(hooks: Sequence[Hook], method: str, *args: Any) -> None:
    for hook in hooks:
        getattr(hook, method)(*args)
