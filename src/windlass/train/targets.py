"""Inputs and targets of a training step, and what the summed loss is divided by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.layout.types import IGNORED
from windlass.train.batches import MicroBatch, TokenBatch
from windlass.train.goldfish import left_out
from windlass.train.masking import masking_of
from windlass.train.mesh import World


@dataclass(frozen=True)
class TargetBatch:
    """This rank's part of a batch, as the model gets it."""

    inputs: Tensor
    # (sequences, positions), `IGNORED` where a target does not count; preference pairs: four numbers of each position
    # of the complete sequences, see `blocks/head/preference.py`.
    targets: Tensor
    documents: Tensor | None
    # Preference pairs in the sequences; None: tokens are counted.
    pairs: int | None = None

    def micro_batches(self, size: int) -> list[MicroBatch]:
        parts = [slice(at, at + size) for at in range(0, len(self.inputs), size)]
        numbers = self.documents
        return [(self.inputs[part], self.targets[part], None if numbers is None else numbers[part]) for part in parts]


class TargetMaker:
    """Makes targets: the next tokens, or with `[tune]` hidden tokens, answers or preference pairs. `held_out`: for
    validation."""

    def __init__(self, recipe: Recipe, world: World, vocab: int, *, held_out: bool = False) -> None:
        self.world = world
        self.masking = masking_of(recipe, vocab)
        self.goldfish = (0, 0) if held_out else (recipe.train.goldfish_k, recipe.train.goldfish_h)

    def make(self, batch: TokenBatch, salt: Tensor | int) -> TargetBatch:
        """Inputs and targets, one position apart; under context parallelism only this rank's positions of them. `salt`
        changes which tokens are hidden."""
        tokens, documents, world = batch.tokens, batch.documents, self.world
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.masking is not None:
            inputs, targets = self.masking.hide(inputs, salt)
            return TargetBatch(inputs, targets, None)
        if batch.ignored is not None:
            targets = targets.masked_fill(batch.ignored, IGNORED)
        if self.goldfish[0]:
            targets = targets.masked_fill(left_out(tokens, *self.goldfish), IGNORED)
        if batch.pairs is not None:
            targets = torch.cat((targets[..., None], batch.pairs), -1)
        numbers = None if documents is None else documents[:, :-1]
        if world.layout.context > 1:
            width = inputs.shape[1] // world.layout.context
            part = slice(world.context_rank * width, (world.context_rank + 1) * width)
            inputs, targets = inputs[:, part], targets if batch.pairs is not None else targets[:, part]
        return TargetBatch(inputs, targets, numbers, None if batch.pairs is None else batch.pair_count)

    def scale(self, batch: TokenBatch, part: TargetBatch) -> float | Tensor:
        """Factor of the loss, summed over all ranks: one over the tokens, targets or pairs that count in the step."""
        if self.masking is None and not self.goldfish[0] and batch.ignored is None:
            return 1.0 / (batch.tokens[:, 1:].numel() * self.world.layout.data)
        return self.world.sum_(self.count(part)).to(torch.float32).clamp(min=1).reciprocal()

    def count(self, part: TargetBatch) -> Tensor:
        """How many targets or pairs of `part` count, so that a sum over all ranks counts each of them once."""
        world = self.world
        is_first = world.coordinate("tp") == world.coordinate("pp") == 0  # the other ranks have the same targets
        if part.pairs is not None:
            # Context ranks have the same pairs, too.
            counted = part.pairs * (is_first and world.context_rank == 0)
            return torch.tensor(float(counted), dtype=torch.float64, device=world.device)
        return (part.targets != IGNORED).sum().double() * float(is_first)
