"""A permutation that is computed, not stored: any element at any position in constant time and memory.

A Feistel network permutes the numbers below the next power of four; a result outside 0..n-1 is fed in again until it
falls inside (cycle walking, fewer than four rounds on average). It depends on its key only, so every rank on every
machine, with any version of numpy, computes the same order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(values: U64) -> U64:
    """A 64-bit hash of each value (the finaliser of splitmix64)."""
    x = values + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int) -> int:
    """One 64-bit key from several numbers; order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix64(key ^ np.uint64(part & _MASK))
    return int(key[0])


def permute(positions: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """Where each of `positions` (0..size-1) lands under the permutation of 0..size-1 with this key."""
    values = np.asarray(positions, dtype=np.uint64)
    if size <= 1:
        return values.astype(np.int64)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = mix64(np.arange(_ROUNDS, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93) ^ np.uint64(key & _MASK))
    result = _network(values, half, mask, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        result[outside] = _network(result[outside], half, mask, keys)
        outside = outside[result[outside] >= np.uint64(size)]
    return result.astype(np.int64)


def _network(values: U64, half: np.uint64, mask: np.uint64, keys: U64) -> U64:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << half) | right
