"""Which attention kernel runs? The fastest of torch's own for the device, or the one the recipe names; FlashAttention 3 by its package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from windlass.errors import ConfigError
from windlass.models.attention import causal_attention
from windlass.models.parts import Model

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


def apply_attention(module: Model, name: str) -> None:
    """flash3 replaces the call itself; the other names only order torch's own kernels."""
    if name != "flash3":
        return
    try:
        import flash_attn_interface  # noqa: F401
    except ImportError:
        raise ConfigError(
            "train.train-attention-flash-but",
            'train.attention = "flash3", but the package flash_attn_interface is not installed',
            hint='use "auto": torch\'s cuDNN attention is about as fast on Hopper',
        ) from None
    for block in module.layers.values():
        if hasattr(block, "attention"):
            block.attention.core = flash3


def flash3(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """FlashAttention 3 wants (batch, time, heads, dim); packed documents go through torch's masked kernel."""
    if documents is not None:
        return causal_attention(q, k, v, documents)
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
