"""Token embedding."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """`lookup` finds vectors where a rank holds only some rows; `parallel.py` sets it."""

    __call__: Callable[..., Tensor]
    lookup: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) if self.lookup is None else self.lookup(tokens, self.weight)
