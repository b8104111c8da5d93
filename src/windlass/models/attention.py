"""How do positions look back? Causal attention over heads, with an optional border between packed documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """q is (batch, heads, time, head_dim); k and v may have fewer heads. `documents` is what `document_mask` made, or None."""
    if documents is not None:
        return masked_attention(q, k, v, documents)
    k, v = _for_kernel(q, k, v, masked=False)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Where the mask is true; queries may be fewer than keys."""
    k, v = _for_kernel(q, k, v, masked=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _for_kernel(q: Tensor, k: Tensor, v: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    if not only_slow_kernel_groups(q.device.type, q.dtype, q.shape[1] != k.shape[1], masked):
        return k, v
    return every_head(k, q.shape[1]), every_head(v, q.shape[1])


def only_slow_kernel_groups(device: str, dtype: torch.dtype, grouped: bool, masked: bool) -> bool:
    """On a GPU, fp32 and masks are for the memory-efficient kernel, which wants as many heads of keys as of queries. Left grouped,
    torch falls back to whole score matrices: 78 GiB instead of 28 for a 0.4B model in fp32 on an H200."""
    return device == "cuda" and grouped and (masked or dtype == torch.float32)


def every_head(x: Tensor, heads: int) -> Tensor:
    """(batch, groups, time, dim) -> (batch, heads, time, dim): the heads of a group share theirs."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def document_mask(query: Tensor, key: Tensor, query_start: int = 0) -> Tensor:
    """(batch, 1, queries, keys): same document and not in the future. Queries begin at position `query_start` of the keys."""
    here = query_start + torch.arange(query.shape[1], device=query.device)
    past = torch.arange(key.shape[1], device=key.device) <= here[:, None]
    return ((query[:, :, None] == key[:, None, :]) & past).unsqueeze(1)


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Which document each position belongs to: the end-of-document token still belongs to the document it ends."""
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends
