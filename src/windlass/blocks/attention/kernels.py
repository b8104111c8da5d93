"""Causal attention over heads, optionally within documents, and the choice of torch's kernel for it."""

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from windlass.errors import ConfigError

AttentionCore = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """q is (batch, heads, time, head_dim); k and v may have fewer heads.

    With a mask (see `document_mask`) attention goes where it is true, and queries may be fewer than keys."""
    if needs_expanded_heads(q.device.type, q.dtype, q.shape[1] != k.shape[1], mask is not None):
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def needs_expanded_heads(device: str, dtype: torch.dtype, grouped: bool, masked: bool) -> bool:
    """On a GPU, fp32 and masks need the memory-efficient kernel, which does not take groups of heads. Left grouped,
    torch falls back to full score matrices: 78 GiB instead of 28 for a 0.4B model in fp32 on an H200."""
    return device == "cuda" and grouped and (masked or dtype == torch.float32)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, groups, time, dim) -> (batch, heads, time, dim): the heads of a group share theirs."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def document_mask(query: Tensor, key: Tensor, query_start: int = 0) -> Tensor:
    """(batch, 1, queries, keys): same document and not in the future. Queries begin at position `query_start` of the
    keys."""
    position = query_start + torch.arange(query.shape[1], device=query.device)
    past = torch.arange(key.shape[1], device=key.device) <= position[:, None]
    return ((query[:, :, None] == key[:, None, :]) & past).unsqueeze(1)


# cuDNN first: on the H200 it was 1.5 to 1.7 times as fast as flash-2, forward and backward. AMD does not have it;
# flash is next.
KERNELS = {
    "auto": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}


def attention_kernel(name: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Use the kernels of a recipe's `train.attention` inside the block. A CPU has only one."""
    if device.type != "cuda" or name not in KERNELS:
        return contextlib.nullcontext()
    kernels: contextlib.AbstractContextManager[None] = sdpa_kernel(list(KERNELS[name]), set_priority=True)
    return kernels


def attention_core(name: str) -> AttentionCore:
    """The attention function of `train.attention`: FlashAttention 3 by its package, torch's own for every other
    name."""
    if name != "flash3":
        return causal_attention
    try:
        import flash_attn_interface  # noqa: F401
    except ImportError:
        raise ConfigError(
            "train.flash3-missing",
            'train.attention = "flash3", but the package flash_attn_interface is not installed',
            hint='use "auto": torch\'s cuDNN attention is about as fast on Hopper',
        ) from None
    return flash3_attention


def flash3_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """FlashAttention 3 wants (batch, time, heads, dim); packed documents go through torch's masked kernel."""
    if documents is not None:
        return causal_attention(q, k, v, documents)
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    result: Tensor = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    return result
