"""Next-token cross-entropy from hidden states: plain, and in chunks whose logits never exist together.

A target below 0 (`IGNORED`) counts nowhere.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.layout.types import IGNORED

# Logits and targets of a chunk -> loss, cross-entropy, gradient of the logits.
ChunkTerms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def next_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, z_loss: float = 0.0) -> Tensor:
    """(loss to descend, cross-entropy), both summed over tokens, from full logits in fp32."""
    return entropy_sums(F.linear(hidden, weight)[..., :vocab].float().flatten(0, -2), targets.flatten(), z_loss)


def entropy_sums(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """(loss to descend, cross-entropy) of full fp32 logits (tokens, vocabulary)."""
    # torch's own cross-entropy: one pass forward and one back, where logsumexp and its backward take four.
    entropy = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    total = entropy
    if z_loss:
        total = total + z_loss * torch.where(targets >= 0, torch.logsumexp(logits, -1).pow(2), 0.0).sum()
    return torch.stack((total, entropy.detach()))


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, chunk: int = 4096, z_loss: float = 0.0
) -> Tensor:
    """The same in chunks of `chunk` tokens, with both gradients computed on the way forward."""
    terms = partial(chunk_terms(hidden.device.type), vocab=vocab, z_loss=z_loss)
    out: Tensor = cast(Any, ChunkedLoss).apply(hidden.flatten(0, -2), weight, targets.flatten(), chunk, terms)
    return out


def _chunk_terms(logits: Tensor, targets: Tensor, vocab: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and gradient of one chunk's logits; compiled on GPUs without a kernel of our own."""
    wide = logits.float()
    column = torch.arange(wide.shape[1], device=wide.device)
    wide = torch.where(column < vocab, wide, float("-inf"))
    lse = torch.logsumexp(wide, -1, keepdim=True)
    counted = targets[:, None] >= 0
    entropy = torch.where(counted, lse - wide.gather(1, targets[:, None].clamp(min=0)), 0.0).sum()
    total = entropy + z_loss * torch.where(counted, lse.pow(2), 0.0).sum()
    probability = torch.exp(wide - lse)
    slope = probability * (1 + 2 * z_loss * lse) - (column == targets[:, None]).to(wide.dtype)
    return total, entropy, torch.where(counted, slope, 0.0).to(logits.dtype)


@cache
def chunk_terms(device_type: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    # Not measured on AMD, which has Triton, too.
    if device_type == "cuda" and torch.version.hip is None and importlib.util.find_spec("triton") is not None:
        from windlass.blocks.head.kernel import fused_terms

        return fused_terms
    return _chunk_terms if device_type == "cpu" else torch.compile(_chunk_terms, dynamic=False)


class ChunkedLoss(torch.autograd.Function):
    """Head and cross-entropy in one: the forward pass leaves only the two gradients behind."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, terms: ChunkTerms) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if any(ctx.needs_input_grad[:2]) else None
        grad_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], chunk):
            part, goal = hidden[start : start + chunk], targets[start : start + chunk]
            total, entropy, slope = terms(part @ weight.t(), goal)
            sums += torch.stack((total, entropy))
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[start : start + chunk])
                if ctx.needs_input_grad[1]:  # a frozen head has no gradient
                    grad_weight = add_outer(grad_weight, slope, part)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0][0]  # of the loss, which is the first of the two sums
        weight_gradient = None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype)
        return grad_hidden * scale.to(grad_hidden.dtype), weight_gradient, None, None, None


def add_outer(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left^T right in fp32. On NVIDIA GPUs the GEMM itself adds bf16 products to the fp32 sum; ROCm has no
    such form."""
    if left.device.type == "cuda" and left.dtype == torch.bfloat16 and torch.version.hip is None:
        if total is None:
            return torch.mm(left.t(), right, out_dtype=torch.float32)
        return torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    product = (left.t() @ right).float()
    return product if total is None else total.add_(product)
