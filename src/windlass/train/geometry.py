"""Which sequences does a rank take at a step? Arithmetic on batch, micro-batch and ranks; the global order never depends on their number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.config import Recipe
from windlass.errors import ConfigError


@dataclass(frozen=True)
class Geometry:
    seq_len: int
    batch: int
    """Sequences of one optimizer step over all ranks."""
    data_ranks: int
    micro_batch: int
    steps: int
    """Optimizer steps of the whole run."""

    @property
    def per_rank(self) -> int:
        return self.batch // self.data_ranks

    @property
    def micro_batches(self) -> int:
        return self.per_rank // self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    @property
    def total_tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def indexes(self, sequences_done: int, data_rank: int) -> npt.NDArray[np.int64]:
        """Global sequence numbers of this rank for the step that begins at `sequences_done`."""
        start = sequences_done + data_rank * self.per_rank
        return np.arange(start, start + self.per_rank, dtype=np.int64)


def geometry_of(recipe: Recipe, data_ranks: int) -> Geometry:
    """Refuses a batch that the ranks and micro-batches do not divide, and says the nearest one that they do."""
    data, layout = recipe.data, recipe.layout
    unit = layout.micro_batch * data_ranks
    batch = unit if data.batch_tokens is None else data.batch_tokens // data.seq_len
    if batch == 0 or batch % unit:
        step = unit * data.seq_len
        raise ConfigError(
            "train.data-batch-tokens-multiple",
            f"data.batch_tokens ({batch * data.seq_len:,}) is not a multiple of {step:,} = micro_batch {layout.micro_batch} x seq_len {data.seq_len:,} x {data_ranks} data-parallel ranks",
            hint=f"the next larger batch that fits is {(batch // unit + 1) * step:,}; or choose a micro_batch that divides {batch / data_ranks:g} sequences per rank",
        )
    if data.seq_len % layout.context:
        raise ConfigError(
            "train.layout-context-does-divide",
            f"layout.context ({layout.context}) does not divide data.seq_len ({data.seq_len})",
            hint="each context rank takes an equal part of the sequence",
        )
    steps = recipe.train.steps or max(1, (data.tokens or 0) // (batch * data.seq_len))
    made = Geometry(data.seq_len, batch, data_ranks, layout.micro_batch, steps)
    _check_pipeline(recipe, made)
    return made


def _check_pipeline(recipe: Recipe, geometry: Geometry) -> None:
    ranks, count = recipe.layout.pipeline, geometry.micro_batches
    if ranks == 1:
        return
    if recipe.layout.schedule == "interleaved" and count % ranks:
        raise ConfigError(
            "train.interleaved-schedule-needs-number",
            f"the interleaved schedule needs a number of micro-batches ({count}) that layout.pipeline ({ranks}) divides",
            hint="change data.batch_tokens or layout.micro_batch",
        )
    if count < ranks:
        raise ConfigError(
            "train.micro-batches-cannot-fill",
            f"{count} micro-batches cannot fill a pipeline of {ranks} stages",
            hint=f"at least {ranks} are needed: a larger data.batch_tokens or a smaller layout.micro_batch",
        )
