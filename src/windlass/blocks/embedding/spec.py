"""Sizes of the input embedding."""

from dataclasses import dataclass

PAD_ROWS = 128  # rows are padded to a multiple of this, so that the head's matrix product uses whole tiles


def padded_rows(vocab: int, multiple: int = PAD_ROWS) -> int:
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    vocab: int  # true vocabulary size
    rows: int  # as stored: `padded_rows(vocab)` in our own models
    width: int
    positions: int = 0  # learned position vectors (0: rotary, ALiBi or none)
    norm: bool = False  # a LayerNorm after the embedding (BLOOM)
    scale: float = 1.0  # factor of the vectors
