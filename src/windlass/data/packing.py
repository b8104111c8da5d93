"""Documents placed whole into windows of one size: best fit decreasing, over the histogram of their lengths.

Documents of one length are interchangeable, so whole groups of windows are filled at a time: the work depends on the
number of lengths, not of documents. Which documents a window holds is computed when it is read.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from windlass.data.shards import Ints

Pattern = tuple[int, ...]  # lengths of the documents in a window, longest first


def pack_lengths(counts: Ints, size: int) -> list[tuple[Pattern, int]]:
    """(lengths in a window, number of such windows) for `counts[n]` documents of n tokens each."""
    pattern: Pattern
    groups: dict[int, list[tuple[Pattern, int]]] = {}  # free tokens -> windows that have so many left
    spaces: list[int] = []  # the keys of `groups`, sorted

    def put(space: int, pattern: Pattern, number: int) -> None:
        if space not in groups:
            insort(spaces, space)
        groups.setdefault(space, []).append((pattern, number))

    for length in range(min(size, len(counts) - 1), 0, -1):
        left = int(counts[length])
        while left:
            at = bisect_left(spaces, length)  # the fullest windows that the document still fits into
            if at == len(spaces):
                space, pattern, number = size, (), -(-left // (size // length))
            else:
                space = spaces[at]
                pattern, number = groups[space].pop()
                if not groups[space]:
                    del groups[space], spaces[at]
            copies = space // length  # the next document of this length fits best into the same window
            full = min(number, left // copies)
            last = left - full * copies if full < number else 0  # one more window takes what is left
            if full:
                put(space - copies * length, (*pattern, *[length] * copies), full)
            if last:
                put(space - last * length, (*pattern, *[length] * last), 1)
            if spare := number - full - bool(last):
                put(space, pattern, spare)
            left -= full * copies + last
    return [entry for space in spaces for entry in groups[space]]


@dataclass(frozen=True)
class Packing:
    """The windows of one source. `begins` and `lengths` are its documents, or pieces of documents, in stored order."""

    begins: Ints
    lengths: Ints
    size: int
    left_out: int = 0  # documents that are longer than a window
    cut: int = 0  # documents of which only the first tokens are used

    @cached_property
    def _patterns(self) -> list[tuple[Pattern, int]]:
        return pack_lengths(np.bincount(self.lengths, minlength=1), self.size)

    @cached_property
    def _ends(self) -> list[int]:
        """Number of the window after the last one of each pattern."""
        ends: list[int] = np.cumsum([number for _, number in self._patterns]).tolist()
        return ends

    @cached_property
    def _by_length(self) -> tuple[Ints, list[list[int]]]:
        """Documents ordered by length, and for each pattern where in that order each of its places begins."""
        order = np.argsort(self.lengths, kind="stable")
        next_free = np.concatenate([[0], np.cumsum(np.bincount(self.lengths, minlength=1))]).tolist()
        places = []
        for pattern, number in self._patterns:
            firsts = []
            for length in pattern:
                firsts.append(next_free[length])
                next_free[length] += number
            places.append(firsts)
        return order, places

    @property
    def windows(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def window(self, number: int) -> list[tuple[int, int]]:
        """(first token, tokens) of each document in a window."""
        group = bisect_right(self._ends, number)
        offset = number - (self._ends[group - 1] if group else 0)
        order, places = self._by_length
        documents = [int(order[first + offset]) for first in places[group]]
        return [(int(self.begins[document]), int(self.lengths[document])) for document in documents]


def pack_documents(ends: Ints, size: int, long: str) -> Packing:
    """`ends`: token position after each document. `long`: what becomes of a document that is longer than a window,
    "split" (it continues in others), "cut" or "leave_out"."""
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = (ends - begins).astype(np.int64)
    is_long = lengths > size
    count = int(is_long.sum())
    if long == "split":
        pieces = -(-lengths // size)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begins, lengths = np.repeat(begins, pieces) + number * size, np.repeat(lengths, pieces) - number * size
    elif long == "leave_out":
        begins, lengths = begins[~is_long], lengths[~is_long]
    kept = lengths > 0
    return Packing(
        begins[kept],
        np.minimum(lengths[kept], size),
        size,
        left_out=count if long == "leave_out" else 0,
        cut=count if long == "cut" else 0,
    )
