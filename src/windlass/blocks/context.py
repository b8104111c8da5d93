"""What the decoder computes once per step and hands to every block."""

from typing import NamedTuple

from torch import Tensor

Table = tuple[Tensor, ...]


class BlockContext(NamedTuple):
    tables: dict[str, Table]
    """Constants of positions (rotary angles, decays) by the block's `table_key`."""
    documents: Tensor | None = None
    """Document mask (batch, 1, queries, keys); under context parallelism the document number of each position."""
