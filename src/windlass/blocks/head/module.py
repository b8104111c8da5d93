"""Output head: hidden states to logits, or straight to the summed loss, so that full logits need never exist."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from windlass.blocks.head.loss import next_token_loss

LossFunction = Callable[..., Tensor]


class OutputHead(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, width: int, rows: int, vocab: int, tied: bool = False) -> None:
        super().__init__()
        self.vocab = vocab  # true size; the padded rows above it never win
        # None: the embedding's weights are handed in.
        self.weight = None if tied else nn.Parameter(torch.empty(rows, width))
        # Replaced by the objective (chunked, plain) and by `parallel.py` (divided vocabulary).
        self.loss: LossFunction = next_token_loss
        # Brings logits of a divided vocabulary together; `parallel.py` sets it.
        self.logits: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear

    def forward(self, hidden: Tensor, targets: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied head gets the embedding's weights"
        if targets is not None:
            return self.loss(hidden, weight, targets, vocab=self.vocab)
        logits = self.logits(hidden, weight)
        if logits.shape[-1] == self.vocab:
            return logits
        # Padded rows get the lowest value, so that neither softmax nor argmax ever picks them.
        column = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(column >= self.vocab, torch.finfo(logits.dtype).min)
