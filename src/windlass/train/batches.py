"""Which sequences each rank takes at a step, and the batches themselves, read ahead by a thread."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.config.ramp import BatchPhase, batch_phases
from windlass.data.stream import Loader, pair_count
from windlass.layout.types import IGNORED, Layout
from windlass.train.mesh import World

# Tokens (sequences, seq_len + 1) and, where documents are masked, the document number of each.
Batch = tuple["Tensor | MarkedBatch", Tensor | None]


# What a model gets: tokens, targets, and the document number (or segment) of each token.
MicroBatch = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class ExampleBatch:
    """A rank's part of a step of examples, and what the summed loss of all ranks is divided by."""

    micro_batches: list[tuple[Tensor, Tensor, Tensor]]
    counted: float


@dataclass(frozen=True)
class MarkedBatch:
    """A rank's sequences, and which of their targets (sequences, seq_len) do not count. Preference pairs: also
    `StoreStream.pairs`, and the number of pairs."""

    tokens: Tensor
    ignored: Tensor
    pairs: Tensor | None = None
    pair_count: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of the steps and of the run. The global order of sequences does not depend on the number of ranks."""

    # Its accumulation is that of the largest batch.
    layout: Layout
    seq_len: int
    phases: tuple[BatchPhase, ...]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def total_tokens(self) -> int:
        return self.phases[-1].end

    @property
    def sequences_per_rank(self) -> int:
        """In the largest batch."""
        return self.layout.micro_batch * self.layout.accumulation

    @property
    def tokens_per_step(self) -> int:
        """In the largest batch."""
        return self.layout.sequences_per_step * self.seq_len

    def batch_tokens(self, tokens: int) -> int:
        """Tokens of the step that begins after `tokens`."""
        return next(phase.batch_tokens for phase in reversed(self.phases) if phase.start <= tokens)

    def step_size(self, step: int, tokens: int) -> tuple[int, int]:
        """Tokens and sequences of step number `step` (from 0), which begins after `tokens`."""
        batch = self.batch_tokens(tokens)
        return batch, batch // self.seq_len

    def schedule_position(self, step: int, tokens: int) -> tuple[int, int]:
        """How far the learning rate's schedule is after step number `step`, and how long it is, in tokens."""
        return tokens + self.batch_tokens(tokens), self.total_tokens

    def tokens_after(self, tokens: int, steps: int) -> int:
        """Position of a run that is at `tokens`, `steps` steps later."""
        for phase, following in itertools.zip_longest(self.phases, self.phases[1:]):
            if following is None:
                return tokens + steps * phase.batch_tokens
            count = min(steps, max(0, -(-(following.start - tokens) // phase.batch_tokens)))
            tokens, steps = tokens + count * phase.batch_tokens, steps - count
        raise AssertionError("a plan has phases")

    def indexes(self, sequences_done: int, data_rank: int, tokens: int = 0) -> npt.NDArray[np.int64]:
        """Global sequence numbers of this rank for the step that begins at `sequences_done`, after `tokens`."""
        count = self.batch_tokens(tokens) // self.seq_len // self.layout.data
        start = sequences_done + data_rank * count
        return np.arange(start, start + count, dtype=np.int64)


def batch_plan(recipe: Recipe, layout: Layout) -> BatchPlan:
    batch_tokens = recipe.data.batch_tokens or layout.sequences_per_step * recipe.data.seq_len
    return BatchPlan(layout, recipe.data.seq_len, batch_phases(recipe, batch_tokens))


class BatchReader:
    """Batches from a position of the stream on, already on the device."""

    def __init__(
        self, stream: Any, plan: BatchPlan, world: World, progress: tuple[int, int], *, documents: bool
    ) -> None:
        """`progress`: tokens and sequences before the first batch."""
        self._device, self._documents = world.device, documents
        tokens, sequences = progress

        def indexes(number: int) -> npt.NDArray[np.int64]:
            position = plan.tokens_after(tokens, number)
            return plan.indexes(sequences + (position - tokens) // plan.seq_len, world.data_rank, position)

        self._loader = Loader(
            stream,
            indexes,
            pin=world.cuda,
            documents=documents,
        )

    def __next__(self) -> Batch:
        with torch.profiler.record_function("enumerate(DataLoader)#windlass.__next__"):  # data loading in a trace
            item = next(self._loader)
        arrays = item if isinstance(item, tuple) else (item,)
        moved: list[Any] = [
            None if a is None else torch.from_numpy(a).to(self._device, non_blocking=True) for a in arrays
        ]
        tokens, documents, ignored, pairs = [*moved, None, None, None][:4]
        numbers = None if documents is None else documents.long()
        if ignored is None:
            return tokens.long(), numbers
        if pairs is None:
            return MarkedBatch(tokens.long(), ignored), numbers
        return MarkedBatch(tokens.long(), ignored, pairs.long(), pair_count(arrays[3])), numbers

    @property
    def wait_seconds(self) -> float:
        return float(self._loader.last_wait_seconds)

    def close(self) -> None:
        self._loader.close()


def cut(
    tokens: Tensor, documents: Tensor | None, world: World, ignored: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs and targets, one position apart; under context parallelism only this rank's positions of them. Targets
    that are `ignored` (sequences, seq_len) do not count in the loss."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    targets = targets if ignored is None else targets.masked_fill(ignored, IGNORED)
    numbers = None if documents is None else documents[:, :-1]
    if world.layout.context > 1:
        width = inputs.shape[1] // world.layout.context
        part = slice(world.context_rank * width, (world.context_rank + 1) * width)
        inputs, targets = inputs[:, part], targets[:, part]
    return inputs, targets, numbers
