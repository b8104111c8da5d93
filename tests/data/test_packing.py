"""Documents are placed whole into windows: every one exactly once, nearly without gaps, the same on every rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.config import DataConfig
from windlass.data.packing import pack_documents, pack_lengths
from windlass.data.stream import StoreStream, open_stream


def test_best_fit_decreasing_by_hand() -> None:
    counts = np.bincount([6, 5, 4, 4, 1], minlength=7)
    # 6 and 4 fill one window of 10, 5 and 4 leave the place that 1 takes.
    assert sorted(pack_lengths(counts, 10)) == [((5, 4, 1), 1), ((6, 4), 1)]
    assert sorted(pack_lengths(np.bincount([3] * 7), 10)) == [((3,), 1), ((3, 3, 3), 2)]


@pytest.mark.parametrize("seed", range(3))
def test_every_document_is_placed_once_and_windows_are_full(seed: int) -> None:
    random = np.random.default_rng(seed)
    # Conversations: log-normal lengths with a median of some hundred tokens.
    lengths = np.clip(random.lognormal(5.5, 1.0, 20_000).astype(np.int64), 8, 4000)
    packing = pack_documents(np.cumsum(lengths), 2049, "leave_out")
    placed = [document for window in range(packing.windows) for document in packing.window(window)]
    assert sorted(placed) == sorted(zip(packing.begins.tolist(), packing.lengths.tolist(), strict=True))
    assert packing.left_out == (lengths > 2049).sum()
    assert all(sum(n for _, n in packing.window(w)) <= 2049 for w in range(packing.windows))
    assert packing.tokens / (packing.windows * 2049) > 0.98


def test_long_documents_are_split_cut_or_left_out() -> None:
    ends = np.array([5, 30, 34])
    split = pack_documents(ends, 10, "split")
    assert sorted(split.lengths.tolist()) == [4, 5, 5, 10, 10]
    cut = pack_documents(ends, 10, "cut")
    assert (sorted(cut.lengths.tolist()), cut.cut, cut.left_out) == ([4, 5, 10], 1, 0)
    left_out = pack_documents(ends, 10, "leave_out")
    assert (sorted(left_out.lengths.tolist()), left_out.cut, left_out.left_out) == ([4, 5], 0, 1)


def test_packed_sequences_hold_complete_documents(write_megatron: Any, tmp_path: Path) -> None:
    lengths = [7, 1, 30, 12, 5, 3, 6, 17] * 6
    starts = np.cumsum([0, *lengths])
    documents = [list(range(s, e)) for s, e in itertools.pairwise(starts)]
    write_megatron(tmp_path / "m" / "a", documents, "<i4")
    config = DataConfig(store=str(tmp_path / "m"), seq_len=32, max_epochs=9, pack="documents")
    stream = open_stream(config, seed=0)
    assert isinstance(stream, StoreStream)
    count = int(stream.mixture.windows[0])
    tokens, ids, marks = (read(np.arange(count)) for read in (stream.sequences, stream.document_ids, stream.marks))
    seen = []
    for row, numbers, counted in zip(tokens, ids, marks, strict=True):
        for number in np.unique(numbers):
            part, is_counted = row[numbers == number], counted[numbers == number]
            if is_counted.any() or (len(part) == 1 and part[0] in starts):
                seen.append(part.tolist())
                assert is_counted.tolist() == [0] + [1] * (len(part) - 1)  # nothing predicts the first token
            else:
                assert not part.any()  # padding
    assert sorted(document for document in seen if len(document) > 1) == sorted(d for d in documents if len(d) > 1)
    assert "filled" in stream.packing_line()
    again = open_stream(config, seed=0)
    assert np.array_equal(again.sequences([3, 1]), tokens[[3, 1]])
