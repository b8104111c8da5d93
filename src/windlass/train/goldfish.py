"""Goldfish loss (Hans et al., arXiv 2406.10209): some tokens never count in the loss, so that text is not learned by
heart.

Whether a token counts follows from the tokens before it alone: the same passage leaves out the same tokens wherever and
in whatever layout it is read. The rule is the paper's; the hash is our own, so that masks differ from other engines'.
"""

import torch
from torch import Tensor

# An odd factor near 2^64 / the golden ratio, and the finalizer of MurmurHash3; products wrap around at 64 bits.
FACTOR, MIX = -7046029254386353131, -49064778989728563


def scramble(code: Tensor) -> Tensor:
    for _ in range(2):
        code = (code ^ ((code >> 33) & 0x7FFFFFFF)) * MIX
    return code


def left_out(tokens: Tensor, k: int, h: int) -> Tensor:
    """Which targets (sequences, seq_len) of `tokens` (sequences, seq_len + 1) do not count: on average every k-th, by a
    hash of the `h` tokens before it. The first targets, with fewer before them, count."""
    count = tokens.shape[1] - h
    code = torch.zeros_like(tokens[:, :count])
    for offset in range(h):
        code = code * FACTOR + tokens[:, offset : offset + count] + 1
    chosen = ((scramble(code) >> 24) & 0xFFFFFFFF) % k == 0
    ignored = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool, device=tokens.device)
    ignored[:, h - 1 :] = chosen
    return ignored
