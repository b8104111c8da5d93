"""The interface of features that take part in training: each is a class in its own file with some of these methods.

The loop calls, in this order: on_start; for each step on_step_begin, on_step_end and, when a line is complete, on_log;
between steps on_eval after a validation pass and on_wait and on_save around a save; at the end on_stop.
"""

from collections.abc import Sequence
from typing import Any

from windlass.train.step import StepResult
from windlass.train.training import Training
from windlass.train.validate import Validation


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
