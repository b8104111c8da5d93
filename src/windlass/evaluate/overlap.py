"""Was the evaluation set trained on? Which of its runs of n tokens also stand in the training split; one pass, flat memory. No torch.

Hashes of all n-grams of the evaluation items are kept (8 bytes each); the training tokens are read once, in stretches. A hit is a
hash that agrees: with 64 bits a false one is expected once in 2^64 / (n-grams x training tokens) cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data.permute import mix64
from windlass.data.store import Store
from windlass.evaluate.record import Score, wilson_interval

N = 13
SHARE = 0.5
"""An item with at least this share of its n-grams in the training data counts as overlapping."""
STRETCH = 1 << 22
Hashes = npt.NDArray[np.uint64]
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Overlap:
    shares: list[float | None]
    """Of each item: share of its n-grams that the training split has; None for an item shorter than n."""
    n: int
    trained_tokens: int
    """Training tokens that were looked at."""

    @property
    def overlapping(self) -> list[int]:
        return [i for i, share in enumerate(self.shares) if share is not None and share >= SHARE]

    def score(self, task: str, group: str, numbers: Sequence[int]) -> Score:
        """Share of items that overlap; items too short to say are left out."""
        known = [share for i in numbers if (share := self.shares[i]) is not None]
        hits = sum(share >= SHARE for share in known)
        low, high = wilson_interval(hits, len(known))
        detail = {
            "n": self.n,
            "at_least": SHARE,
            "trained_tokens": self.trained_tokens,
            "too_short": len(numbers) - len(known),
        }
        value = hits / len(known) if known else None
        return Score(
            task=task,
            group=group,
            metric="overlap_with_training",
            value=value,
            low=low,
            high=high,
            count=len(known),
            detail=detail,
        )


def find_overlap(
    store: Store, items: Sequence[npt.NDArray[Any]], *, split: str = "train", n: int = N, max_tokens: int | None = None,
    tell: Tell = lambda done, total: None,
) -> Overlap:  # fmt: skip
    """Compare items (arrays of token ids) with a split of the store."""
    asked = [hashes(item, n) for item in items]
    wanted = np.unique(np.concatenate([np.empty(0, np.uint64), *asked]))
    seen, looked = np.zeros(len(wanted), dtype=bool), 0
    sizes = {name: len(store.tokens(name, split)) for name in store.sources if store.shards[name].get(split)}
    total = sum(sizes.values())
    share = 1.0 if max_tokens is None else min(1.0, max_tokens / max(1, total))
    for name, size in sizes.items():
        for found, count in _stretches(store.tokens(name, split), int(size * share), n):
            _mark(wanted, seen, found)
            looked += count
            tell(looked, int(total * share))
    return Overlap([_share(part, wanted, seen) for part in asked], n, looked)


def _stretches(array: Any, limit: int, n: int) -> Iterator[tuple[Hashes, int]]:
    """Hashes of all n-grams of the first `limit` tokens; stretches overlap by n - 1, so that none is lost at a border."""
    for start in range(0, limit, STRETCH):
        stop = min(limit, start + STRETCH)
        yield hashes(array[start : min(limit, stop + n - 1)], n), stop - start


def hashes(tokens: npt.NDArray[Any], n: int) -> Hashes:
    """One number for each run of n tokens."""
    count = len(tokens) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    mixed = mix64(tokens.astype(np.uint64))
    total = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for place in range(n):
            total = total * np.uint64(0x9E3779B97F4A7C15) + mixed[place : place + count]
    return total


def _mark(wanted: Hashes, seen: npt.NDArray[np.bool_], found: Hashes) -> None:
    if not len(wanted):
        return
    place = np.minimum(np.searchsorted(wanted, found), len(wanted) - 1)
    seen[place[wanted[place] == found]] = True


def _share(part: Hashes, wanted: Hashes, seen: npt.NDArray[np.bool_]) -> float | None:
    return float(seen[np.searchsorted(wanted, part)].mean()) if len(part) else None
