"""How does a feature take part in training without a word in the loop? As a hook: a class in its own file with some of these methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.train.job import Job
    from windlass.train.step import StepResult


class Hook:
    """Every method may be left out. They are called on every rank, in the order of the hooks."""

    def on_start(self, job: Job) -> None:
        """Everything is built and restored; the first step comes next."""

    def on_step_begin(self, job: Job) -> None:
        """The batch is there and the step is about to run."""

    def on_step_end(self, job: Job, result: StepResult) -> None:
        """The step was given to the device; its numbers are not known yet. Do not wait for the device here."""

    def on_log(self, job: Job, line: dict[str, Any]) -> None:
        """A metrics line is complete (rank 0 only) and was written."""

    def on_wait(self, job: Job, what: str) -> None:
        """Training is about to wait for `what` (a save, the next batch of a validation): life without a step."""

    def on_save(self, job: Job) -> None:
        """A save was begun."""

    def on_eval(self, job: Job, val_loss: float) -> None:
        """A validation pass is done."""

    def on_stop(self, job: Job, reason: str | None) -> None:
        """The run ends: finished (None), stopped early, or failing. Called once, also after an error."""


def each(hooks: Sequence[Hook], method: str, *args: Any) -> None:
    for hook in hooks:
        getattr(hook, method)(*args)
