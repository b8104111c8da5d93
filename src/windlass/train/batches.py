"""Which sequences each rank takes at a step, and the batches themselves, read ahead by a thread."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.data.stream import Loader
from windlass.layout.types import Layout
from windlass.train.mesh import World

# Tokens (sequences, seq_len + 1) and, where documents are masked, the document number of each.
Batch = tuple["Tensor | MarkedBatch", Tensor | None]


# What a model gets: tokens, targets, and the document number (or segment) of each token.
MicroBatch = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class ExampleBatch:
    """A rank's part of a step of examples, and what the summed loss of all ranks is divided by."""

    micro_batches: list[MicroBatch]
    counted: float


@dataclass(frozen=True)
class MarkedBatch:
    """A rank's sequences of which not every token counts, and what the summed loss of all ranks is divided by."""

    tokens: Tensor
    targets: Tensor
    counted: float


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a step and of the run. The global order of sequences does not depend on the number of ranks."""

    layout: Layout
    seq_len: int
    steps: int

    @property
    def sequences_per_rank(self) -> int:
        return self.layout.micro_batch * self.layout.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.layout.sequences_per_step * self.seq_len

    @property
    def total_tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def step_tokens(self, step: int) -> int:
        """Tokens of step number `step`, from 0."""
        return self.tokens_per_step

    def schedule_position(self, step: int, tokens: int) -> tuple[int, int]:
        """How far the learning rate's schedule is after step number `step`, and how long it is, in tokens."""
        return tokens + self.step_tokens(step), self.total_tokens

    def indexes(self, sequences_done: int, data_rank: int) -> npt.NDArray[np.int64]:
        """Global sequence numbers of this rank for the step that begins at `sequences_done`."""
        start = sequences_done + data_rank * self.sequences_per_rank
        return np.arange(start, start + self.sequences_per_rank, dtype=np.int64)


def batch_plan(recipe: Recipe, layout: Layout) -> BatchPlan:
    step_tokens = layout.sequences_per_step * recipe.data.seq_len
    steps = recipe.train.steps or max(1, (recipe.data.tokens or 0) // step_tokens)
    return BatchPlan(layout, recipe.data.seq_len, steps)


class BatchReader:
    """Batches from a position of the stream on, already on the device."""

    def __init__(self, stream: Any, plan: BatchPlan, world: World, sequences_done: int, *, documents: bool) -> None:
        self._device, self._documents = world.device, documents

        def counted(indexes: npt.NDArray[np.int64]) -> float:
            """Of the step's whole batch: every rank computes the same number from the marks alone."""
            first = int(indexes[0]) - world.data_rank * len(indexes)
            return float(max(1, stream.counted(np.arange(first, first + plan.layout.data * len(indexes)))))

        self._marked = not stream.counts_all
        self._loader = Loader(
            stream,
            lambda n: plan.indexes(sequences_done + n * plan.layout.sequences_per_step, world.data_rank),
            pin=world.cuda,
            documents=documents,
            counted=counted if self._marked else None,
        )

    def __next__(self) -> Batch:
        with torch.profiler.record_function("enumerate(DataLoader)#windlass.__next__"):  # data loading in a trace
            item = next(self._loader)
        if self._marked:
            tokens, documents, targets, counted = item
            batch = MarkedBatch(self._move(tokens), self._move(targets), counted)
            return batch, None if documents is None else self._move(documents)
        arrays = item if self._documents else (item,)
        tokens, *documents = map(self._move, arrays)
        return tokens, documents[0] if documents else None

    def _move(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True).long()

    @property
    def wait_seconds(self) -> float:
        return float(self._loader.last_wait_seconds)

    def close(self) -> None:
        self._loader.close()


def cut(tokens: Tensor, documents: Tensor | None, world: World, targets: Tensor | None = None) -> MicroBatch:
    """Inputs and targets, one position apart; under context parallelism only this rank's positions of them."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:] if targets is None else targets
    numbers = None if documents is None else documents[:, :-1]
    if world.layout.context > 1:
        width = inputs.shape[1] // world.layout.context
        part = slice(world.context_rank * width, (world.context_rank + 1) * width)
        inputs, targets = inputs[:, part], targets[:, part]
    return inputs, targets, numbers
