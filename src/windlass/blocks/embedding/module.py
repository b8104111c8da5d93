"""Token embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """`lookup` finds vectors where a rank holds only some rows; `parallel.py` sets it."""

    if TYPE_CHECKING:

        def __call__(self, tokens: Tensor) -> Tensor: ...

    lookup: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) if self.lookup is None else self.lookup(tokens, self.weight)
