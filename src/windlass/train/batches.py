"""Which sequences each rank takes at a step, and the batches themselves, read ahead by a thread."""

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.config.ramp import BatchPhase, batch_phases
from windlass.data.stream import Loader, SequenceBatch, Stream, pair_count
from windlass.layout.types import Layout
from windlass.train.mesh import World

# What a model gets: tokens, targets, and the document number (or segment) of each token.
MicroBatch = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class TokenBatch:
    """A rank's sequences of one step (sequences, seq_len + 1)."""

    tokens: Tensor
    # Document number of each token, where documents are masked.
    documents: Tensor | None = None
    # Which targets (sequences, seq_len) do not count.
    ignored: Tensor | None = None
    # Preference pairs: `StoreStream.pairs`, and how many there are.
    pairs: Tensor | None = None
    pair_count: int = 0


@dataclass(frozen=True)
class ExampleBatch:
    """A rank's part of a step of examples, and what the summed loss of all ranks is divided by."""

    micro_batches: list[tuple[Tensor, Tensor, Tensor]]
    counted: float


Batch = TokenBatch | ExampleBatch


class BatchSource(Protocol):
    """Batches of the steps from a position of the run on."""

    @property
    def wait_seconds(self) -> float:
        """How long the last `next` has waited."""

    def __next__(self) -> Batch: ...
    def close(self) -> None: ...


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
    def sequences_per_pass(self) -> int:
        """Of a rank in a pass without gradients. A pipeline always takes as many micro-batches as in training."""
        return self.sequences_per_rank if self.layout.pipeline > 1 else self.layout.micro_batch

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
        self, stream: Stream, plan: BatchPlan, world: World, progress: tuple[int, int], *, documents: bool
    ) -> None:
        """`progress`: tokens and sequences before the first batch."""
        self._device = world.device
        tokens, sequences = progress

        def indexes(number: int) -> npt.NDArray[np.int64]:
            position = plan.tokens_after(tokens, number)
            return plan.indexes(sequences + (position - tokens) // plan.seq_len, world.data_rank, position)

        self._loader = Loader(stream, indexes, pin=world.cuda, documents=documents)

    def __next__(self) -> TokenBatch:
        with torch.profiler.record_function("enumerate(DataLoader)#windlass.__next__"):  # data loading in a trace
            item = next(self._loader)
        return token_batch(item, self._device)

    @property
    def wait_seconds(self) -> float:
        return float(self._loader.last_wait_seconds)

    def close(self) -> None:
        self._loader.close()


def token_batch(item: SequenceBatch, device: torch.device) -> TokenBatch:
    """Sequences of a stream on the device."""

    def moved(array: npt.NDArray[Any] | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)

    tokens, documents, ignored, pairs = map(moved, (item.tokens, item.documents, item.ignored, item.pairs))
    assert tokens is not None
    return TokenBatch(
        tokens.long(),
        None if documents is None else documents.long(),
        ignored,
        None if pairs is None else pairs.long(),
        0 if item.pairs is None else pair_count(item.pairs),
    )
