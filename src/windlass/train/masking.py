"""Masked language modelling (Devlin et al., arXiv 1810.04805): which tokens of a sequence are hidden, and how.

A hash of the sequence's tokens and of the step decides, so that no layout and no resume changes it, and an epoch hides
others than the one before. The shares are BERT's; the hash is our own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.layout.types import IGNORED
from windlass.train.goldfish import FACTOR, scramble

# Of ten hidden tokens so many become the mask token, the next one a random token, the last one stays.
MASKED_OF_TEN, CHANGED_OF_TEN = 8, 9
# Salt of the held-out sequences: the same tokens are hidden in every validation.
HELD_OUT_SALT = -1


@dataclass(frozen=True)
class Masking:
    share: float
    mask_token: int
    special_tokens: tuple[int, ...]
    vocab: int

    def hide(self, tokens: Tensor, salt: Tensor | int) -> tuple[Tensor, Tensor]:
        """Inputs with hidden tokens, and targets: the tokens there, `IGNORED` elsewhere. `tokens`: (sequences, length);
        every sequence hides the same number, less special tokens where it has few others."""
        positions = torch.arange(tokens.shape[1], device=tokens.device) * FACTOR
        sequence = scramble(tokens + positions).sum(1, keepdim=True)
        code = scramble(scramble(scramble(sequence) + salt) + positions)
        special = (tokens[..., None] == tokens.new_tensor(self.special_tokens)).any(-1)
        order = positive(code).masked_fill(special, -1)
        count = max(1, round(self.share * tokens.shape[1]))
        hidden = torch.zeros_like(special).scatter_(1, order.topk(count, dim=1).indices, True) & ~special
        kind, random = positive(scramble(code + 1)) % 10, positive(scramble(code + 2)) % self.vocab
        inputs = torch.where(hidden & (kind < MASKED_OF_TEN), self.mask_token, tokens)
        inputs = torch.where(hidden & (kind >= MASKED_OF_TEN) & (kind < CHANGED_OF_TEN), random, inputs)
        return inputs, tokens.masked_fill(~hidden, IGNORED)


def positive(code: Tensor) -> Tensor:
    return (code >> 1) & 0x3FFFFFFFFFFFFFFF


def masking_of(recipe: Recipe, vocab: int) -> Masking | None:
    """None: the run does not hide tokens."""
    tune = recipe.tune
    if tune is None or tune.task != "masked":
        return None
    assert tune.mask_token is not None  # written when the run was created
    return Masking(tune.mask_share, tune.mask_token, tuple(tune.special_tokens), vocab)
