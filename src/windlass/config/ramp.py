"""The steps of a run: one batch size, or one for each stretch of tokens (`data.batch_ramp`)."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from windlass.config.recipe import DataConfig, Recipe


@dataclass(frozen=True, slots=True)
class BatchPhase:
    """Consecutive steps of one size."""

    # Tokens before its first step. The first step that begins at a position of the ramp or later has the new size.
    start: int
    batch_tokens: int
    steps: int

    @property
    def end(self) -> int:
        return self.start + self.steps * self.batch_tokens


def batch_sizes(data: DataConfig, batch_tokens: int) -> list[tuple[int, int]]:
    """(position, tokens of a step from there on), the first at 0 with `batch_tokens`."""
    return [(0, batch_tokens), *data.batch_ramp]


def batch_phases(recipe: Recipe, batch_tokens: int) -> tuple[BatchPhase, ...]:
    """All steps of a run that begins with `batch_tokens`; at least one."""
    sizes, position = batch_sizes(recipe.data, batch_tokens), 0
    steps_left: float = math.inf if recipe.train.steps is None else recipe.train.steps
    limit: float = math.inf if recipe.train.steps is not None else recipe.data.tokens or 0
    phases = list[BatchPhase]()
    for number, (_, batch) in enumerate(sizes):
        next_start = sizes[number + 1][0] if number + 1 < len(sizes) else math.inf
        # A step that would end beyond the run's tokens is not begun; one that crosses into the next phase is.
        fitting = steps_left if limit == math.inf else (limit - position) // batch
        steps = int(
            min(fitting, steps_left, math.inf if next_start == math.inf else -(-(next_start - position) // batch))
        )
        if steps > 0:
            phases.append(BatchPhase(position, batch, steps))
            position, steps_left = position + steps * batch, steps_left - steps
    return tuple(phases) or (BatchPhase(0, batch_tokens, 1),)


def run_length(recipe: Recipe, batch_tokens: int | None = None) -> tuple[int, int] | None:
    """(steps, tokens) of a run; None where the batch depends on the number of devices."""
    batch_tokens = batch_tokens or recipe.data.batch_tokens
    if batch_tokens is None:
        return None
    phases = batch_phases(recipe, batch_tokens)
    return sum(phase.steps for phase in phases), phases[-1].end


def planned_tokens(recipe: Recipe, step: int | None, tokens: float | None) -> int | None:
    """What the run is to train on; None where the batch depends on the number of devices. Texts of fine-tuning are not
    filled to seq_len: their tokens are expected from those of the steps so far."""
    if recipe.reads_examples:
        if recipe.train.steps is None or not step or tokens is None:
            return None
        return round(tokens * recipe.train.steps / step)
    if recipe.train.steps is None and recipe.data.tokens is not None:
        return recipe.data.tokens
    length = run_length(recipe)
    return None if length is None else length[1]


def ramp_problems(data: DataConfig) -> list[str]:
    """What is wrong with `data.batch_ramp`, each with the nearest legal value."""
    problems: list[Any] = []
    if data.batch_ramp and data.batch_tokens is None:
        problems.append("data.batch_ramp: set data.batch_tokens too, the batch from which it starts")
    starts = [0, *(start for start, _ in data.batch_ramp)]
    for before, start in itertools.pairwise(starts):
        if start <= before:
            problems.append(f"data.batch_ramp: position {start:,} is not above the one before it ({before:,})")
    return problems
