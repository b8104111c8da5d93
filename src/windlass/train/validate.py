"""How good is the model on text it has not seen? The mean loss on the validation split, over the same sequences every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.config import Recipe
from windlass.data.store import open_store
from windlass.data.stream import open_stream
from windlass.train.mesh import World
from windlass.train.parallelize import Parts
from windlass.train.step import Stepper, cut


class Validator:
    def __init__(
        self, stream: Any, sequences: int, recipe: Recipe, world: World, parts: Parts, stepper: Stepper
    ) -> None:
        self.stream, self.sequences, self.recipe, self.world, self.parts, self.stepper = (
            stream,
            sequences,
            recipe,
            world,
            parts,
            stepper,
        )

    @torch.no_grad()
    def loss(self, stopping: Callable[[], object] = lambda: None) -> float | None:
        """Mean cross-entropy over `sequences` sequences, the same on every rank; None when all ranks agreed to stop on the way."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for start in range(0, self.sequences, self._width()):
            total += self._batch(start)
            if stopping():
                return None
        self.world.sum_(total)
        return float(total) / (self.sequences * self.recipe.data.seq_len)

    def _width(self) -> int:
        """Sequences of one pass over all ranks; a pipeline always takes as many micro-batches as in training."""
        geometry = self.stepper.geometry
        each = geometry.per_rank if self.stepper.schedule is not None else geometry.micro_batch
        return each * self.world.axes.data

    def _batch(self, start: int) -> torch.Tensor:
        each = self._width() // self.world.axes.data
        numbers = start + self.world.data_rank * each + np.arange(each, dtype=np.int64)
        tokens = torch.from_numpy(self.stream.sequences(numbers)).to(self.world.device).long()
        documents = (
            torch.from_numpy(self.stream.document_ids(numbers)).to(self.world.device).long()
            if self.recipe.data.mask_documents
            else None
        )
        inputs, targets, ids = cut(tokens, documents, self.world)
        sums = self._sums(inputs, targets, ids)
        return sums if self.world.counts_loss else torch.zeros_like(sums)

    def _sums(self, inputs: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        if self.stepper.schedule is None:
            return self.parts.modules[0](inputs, targets, documents)[1].double()
        return self.stepper.pipeline_sums(inputs, targets, documents)[1].double()


def open_validator(recipe: Recipe, world: World, parts: Parts, stepper: Stepper, vocab: int) -> Validator | None:
    """None when there is nothing held out."""
    data = recipe.data
    if data.store is None:
        return None
    split = data.validation or "validation"
    if data.validation is None and split not in open_store(Path(data.store)).splits:
        return None
    stream = open_stream(data, seed=recipe.seed, split=split, vocab=vocab)
    made = Validator(stream, 1, recipe, world, parts, stepper)
    width = made._width()
    made.sequences = max(1, recipe.train.eval_tokens // data.seq_len // width) * width
    return made
