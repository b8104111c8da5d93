"""Output head: hidden states to logits, or straight to the summed loss, so that full logits need never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from windlass.blocks.head.loss import next_token_loss

LossFunction = Callable[..., Tensor]


class OutputHead(nn.Module):
    if TYPE_CHECKING:

        def __call__(self, hidden: Tensor, targets: Tensor | None = None, weight: Tensor | None = None) -> Tensor: ...

    def __init__(self, width: int, rows: int, vocab: int, tied: bool = False) -> None:
        super().__init__()
        self.vocab = vocab
        """True size; the padded rows above it never win."""
        self.weight = None if tied else nn.Parameter(torch.empty(rows, width))
        """None: the embedding's weights are handed in."""
        self.loss: LossFunction = next_token_loss
        """Replaced by the objective (chunked, plain) and by `parallel.py` (divided vocabulary)."""
        self.logits: Callable[[Tensor, Tensor], Tensor] | None = None
        """Brings logits of a divided vocabulary together; `parallel.py` sets it."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied head gets the embedding's weights"
        if targets is not None:
            return self.loss(hidden, weight, targets, vocab=self.vocab)
        logits = nn.functional.linear(hidden, weight) if self.logits is None else self.logits(hidden, weight)
        return mask_padding(logits, self.vocab)


def mask_padding(logits: Tensor, vocab: int) -> Tensor:
    """Padded rows get the lowest value, so that neither softmax nor argmax ever picks them."""
    if logits.shape[-1] == vocab:
        return logits
    column = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(column >= vocab, torch.finfo(logits.dtype).min)
