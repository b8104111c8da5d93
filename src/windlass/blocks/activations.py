"""Activations of feed-forward blocks that have no parameters; of gated ones what acts on the gate."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


def gate_function(activation: str, clamp: tuple[float, float]) -> Callable[[Tensor, Tensor | None], Tensor]:
    """What a block makes of its first products, gate and up; without a gate there is one, and up is None. `clamp` is
    that of `clamped_swiglu`."""
    if activation == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=clamp[0], limit=clamp[1])
    function = ACTIVATIONS[activation]
    return lambda gate, up: function(gate) if up is None else function(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float) -> Tensor:
    assert up is not None
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
