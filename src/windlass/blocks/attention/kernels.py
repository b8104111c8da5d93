"""Causal attention over heads, optionally within documents, and the choice of torch's kernel for it."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from windlass.errors import ConfigError

AttentionCore = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """q is (batch, heads, time, head_dim); k and v may have fewer heads. `documents` is what `document_mask` made, or
    None."""
    if documents is not None:
        return masked_attention(q, k, v, documents)
    k, v = _expanded(q, k, v, masked=False)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Where the mask is true; queries may be fewer than keys."""
    k, v = _expanded(q, k, v, masked=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _expanded(q: Tensor, k: Tensor, v: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    if not needs_expanded_heads(q.device.type, q.dtype, q.shape[1] != k.shape[1], masked):
        return k, v
    return expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])


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


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Which document each position belongs to: the end-of-document token still belongs to the document it ends."""
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


KERNELS = {
    "auto": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
"""cuDNN first: on the H200 it was 1.5 to 1.7 times as fast as flash-2, forward and backward. AMD does not have it;
flash is next."""


@contextlib.contextmanager
def attention_kernel(name: str, device: torch.device) -> Iterator[None]:
    """Use the kernels of a recipe's `train.attention` inside the block. A CPU has only one."""
    if device.type != "cuda" or name not in KERNELS:
        yield
        return
    with sdpa_kernel(list(KERNELS[name]), set_priority=True):
        yield


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
