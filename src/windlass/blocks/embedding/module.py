"""Token embedding."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.embedding.spec import EmbeddingSpec


class TokenEmbedding(nn.Embedding):
    """`lookup` finds vectors where a rank holds only some rows; `parallel.py` sets it."""

    __call__: Callable[..., Tensor]
    lookup: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, spec: EmbeddingSpec) -> None:
        super().__init__(spec.rows, spec.width)
        self.scale = spec.scale

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = F.embedding(tokens, self.weight) if self.lookup is None else self.lookup(tokens, self.weight)
        return vectors if self.scale == 1.0 else vectors * self.scale
