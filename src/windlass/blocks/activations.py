"""Activations of feed-forward blocks that have no parameters; of gated ones what acts on the gate."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}
