"""Causal attention over heads, optionally within documents, and the choice of torch's kernel for it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from windlass.errors import ConfigError

# Queries per block when a mask is needed; only the mask of one block is in memory at a time.
QUERY_BLOCK = 1024


@dataclass(frozen=True)
class Scores:
    """How scores are formed, and which keys a query reaches."""

    window: int = 0  # keys up to its own; 0: all earlier ones
    scale: float | None = None  # None: head_dim^-0.5
    softcap: float = 0.0


# Queries, keys, values, scores, the document number of each key's position (None: one document), and the sink of each
# head (None: there are none).
AttentionCore = Callable[[Tensor, Tensor, Tensor, Scores, Tensor | None, Tensor | None], Tensor]


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores = Scores(),
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    start: int = 0,
) -> Tensor:
    """q is (batch, heads, time, head_dim) and begins at position `start` of the keys; k and v may have fewer heads.

    What a plain causal kernel cannot do runs in blocks of queries, each over the keys that it can reach."""
    masked = documents is not None or 0 < scores.window < k.shape[2] or start > 0
    masked = masked or scores.softcap > 0 or sinks is not None
    if needs_expanded_heads(q.device.type, q.dtype, q.shape[1] != k.shape[1], masked):
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    if not masked:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scores.scale)
    blocks = [
        attend_block(block, k, v, scores, documents, sinks, start + QUERY_BLOCK * number)
        for number, block in enumerate(q.split(QUERY_BLOCK, dim=2))
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Tensor | None, sinks: Tensor | None, start: int
) -> Tensor:
    """Attention of queries that begin at position `start` over the keys that they can reach."""
    end = start + q.shape[2]
    first = max(0, start - scores.window + 1) if scores.window else 0
    k, v = k[:, :, first:end], v[:, :, first:end]
    mask: Tensor | None = None
    if documents is not None or q.shape[2] > 1:
        query = torch.arange(start, end, device=q.device)[:, None]
        key = torch.arange(first, end, device=q.device)
        mask = (key <= query) & (query - key < scores.window) if scores.window else key <= query
        if documents is not None:
            mask = (mask & (documents[:, start:end, None] == documents[:, None, first:end])).unsqueeze(1)
    if scores.softcap or sinks is not None:
        sinks = None if sinks is None else sinks[:, None, None]
        return weighted_values(q, expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1]), scores, mask, sinks)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, scale=scores.scale)


def weighted_values(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention operation by operation, with the probabilities in fp32. `sinks` has the heads where the scores have
    them, and one key."""
    score = (q @ k.transpose(-1, -2)).float() * (scores.scale or q.shape[-1] ** -0.5)
    if scores.softcap:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return score.softmax(-1).to(v.dtype) @ v
    score = torch.cat((score, sinks.float().expand(*score.shape[:-1], 1)), dim=-1)
    return score.softmax(-1)[..., :-1].to(v.dtype) @ v


def block_mask(window: int, length: int, documents: Tensor | None, device: torch.device) -> BlockMask:
    """Which keys each block of queries reaches; made without the square of all positions."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        reached = query >= key
        if window:
            reached = reached & (query - key < window)
        return reached if documents is None else reached & (documents[batch, query] == documents[batch, key])

    batch = None if documents is None else documents.shape[0]
    mask: BlockMask = _compiled(create_block_mask)(visible, batch, None, length, length, device=str(device))
    return mask


def block_masked_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: BlockMask, sinks: Tensor | None = None
) -> Tensor:
    """One kernel for windows, documents, caps and sinks, which skips the blocks that the mask hides."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return scores.softcap * torch.tanh(score / scores.softcap)

    options = {"block_mask": mask, "scale": scores.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    attend = partial(_compiled(flex_attention), q, k, v, score_mod=capped if scores.softcap else None, **options)
    if sinks is None:
        out: Tensor = attend()
        return out
    out, log_sums = attend(return_lse=True)
    # The sink is one more term of the sum that the kernel divided by.
    return out * torch.sigmoid(log_sums - sinks.float()[:, None]).unsqueeze(-1).to(out.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def needs_expanded_heads(device: str, dtype: torch.dtype, grouped: bool, masked: bool) -> bool:
    """On a GPU, fp32 and masks need the memory-efficient kernel, which does not take groups of heads. Left grouped,
    torch falls back to full score matrices: 78 GiB instead of 28 for a 0.4B model in fp32 on an H200."""
    return device == "cuda" and grouped and (masked or dtype == torch.float32)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, groups, time, dim) -> (batch, heads, time, dim): the heads of a group share theirs."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


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


def flash3_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """FlashAttention 3 wants (batch, time, heads, dim); documents, sinks and values of another width than the keys go
    through torch's kernels."""
    if documents is not None or sinks is not None or q.shape[-1] != v.shape[-1]:
        return causal_attention(q, k, v, scores, documents, sinks)
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        causal=True,
        softmax_scale=scores.scale,
        window_size=(scores.window - 1, 0) if scores.window else (-1, -1),
        softcap=scores.softcap,
    )
    result: Tensor = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    return result
