"""Engines: how a model is divided, updated and stepped. Each is one module with a function `assemble`.

`assemble(model, recipe, step, world, plan, beat)` takes the model on the meta device and returns its parts, its
optimizer and its stepper; `beat(phase)` is to be called at each phase of a step, so that the watchdog can say how far
this rank came. `windlass.registry.ENGINES` finds engines by module name, and those of other packages by the entry
point group "windlass.engines"."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from windlass.train.batches import Batch
from windlass.train.guard import Guard
from windlass.train.step import StepResult


class SavedState(Protocol):
    """One parameter with its moments, as checkpoints hold them."""

    @property
    def name(self) -> str: ...
    @property
    def weights(self) -> Tensor: ...
    @property
    def moments(self) -> dict[str, Tensor]: ...


class EngineOptimizer(Protocol):
    """What the loop and its checkpoints ask of an optimizer."""

    @property
    def moment_names(self) -> tuple[str, ...]: ...
    @property
    def slots(self) -> Sequence[SavedState]: ...

    # Steps that changed weights.
    count: Tensor

    def refresh(self) -> None:
        """The slots were filled from a checkpoint: bring them into the model."""

    def adopt(self) -> None:
        """Weights were loaded into the model: bring them into the slots."""

    def zero_grad(self) -> None: ...


class EngineStepper(Protocol):
    guard: Guard

    def step(self, batch: Batch, lr: float, *, measure: bool = False) -> StepResult:
        """One optimizer step; `measure`: with the numbers of `train.instruments`."""
