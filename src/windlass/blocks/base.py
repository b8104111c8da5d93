"""The torch side of a block: what the decoder, the engine and text generation call."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from windlass.blocks.initial_values import Filler, fill_constant, residual_filler

Table = tuple[Tensor, ...]


class BlockContext(NamedTuple):
    """What the decoder computes once per step and hands to every block."""

    # Constants of positions (rotary angles, decays) by the block's `table_key`; where positions begin again at each
    # document (batch, 1, positions, numbers).
    tables: dict[str, Table]
    # Document number of each position (batch, positions), of all context ranks; None: one document.
    documents: Tensor | None = None
    # Window of an attention block -> torch's block mask, where the device has a kernel that skips what it hides.
    masks: dict[int, Any] = {}


class Block(nn.Module):
    """One residual branch. A block's `module.py` names its class as `BLOCK`; the class takes the block's spec.

    The defaults serve a block that treats each position alone. One that mixes positions overrides the decoding methods.
    """

    __call__: Callable[..., Tensor]
    table_key: str | None = None  # blocks with the same key share one table of positions; None: it needs none
    # Attention kernel, which the engine and `parallel.py` may replace; None: the block has none.
    core: Callable[..., Tensor] | None = None
    window: int | None = None  # keys that attention reaches, 0 for all of them; None: the block has no attention
    needs_mask = False  # its attention does more than a plain causal kernel can
    measures_logits = False  # attention by `wq` and `wk`, whose largest logits `max_logits` can hold
    # Factor of the gradient of the block's auxiliary loss, a sum over tokens; the training step sets it.
    auxiliary_scale = 0.0
    fused = False  # products of the same input run as one (`StepSpec.fused_projections`)
    # The backward pass computes the block's inside again although the layer is kept; off where the layer is not kept.
    repeats = False
    prefill_chunk: int | None = None  # tokens of a prompt that are decoded at once; None: all of them
    last_weight: str | None = None  # the parameter that ends the branch, which begins smaller; None: it has none

    def make_table(self, start: int, end: int, device: torch.device) -> Table:
        """Constants of positions start..end (rotary angles, decays)."""
        raise NotImplementedError

    def filler(self, name: str, std: float, num_layers: int) -> Filler:
        """Initial values of the parameter `name` of this block."""
        if name.endswith("bias"):
            return partial(fill_constant, value=0.0)
        return residual_filler(name == self.last_weight, std, num_layers)

    def clear_counts(self) -> None:
        """A training step begins: what was counted in the last one is forgotten."""

    def new_state(self, batch: int, limit: int) -> Any:
        """What decoding carries from token to token, for at most `limit` tokens; None: nothing."""
        return None

    def decode(self, x: Tensor, state: Any, places: Tensor, start: int | None, table: Table | None) -> Tensor:
        """New tokens at `places`, which begin at `start`; None: one token, by kernels that do not depend on the
        place."""
        return self(x, BlockContext({}))

    def state_bytes(self, state: Any, position: int) -> int:
        """Memory of the state after `position` tokens."""
        return 0
