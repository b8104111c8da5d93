"""Which attention kernel runs? The fastest of torch's own for the device, or the one the recipe names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ORDER = {
    "auto": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
"""cuDNN first: on the H200 it was 1.5 to 1.7 times as fast as flash-2, forward and backward. It does not exist on AMD, where flash is next."""


@contextlib.contextmanager
def attention_backend(name: str, device: torch.device) -> Iterator[None]:
    """For the time of a run. A CPU has one kernel, so nothing is chosen there."""
    if device.type != "cuda" or name not in ORDER:
        yield
        return
    with sdpa_kernel(list(ORDER[name]), set_priority=True):
        yield
