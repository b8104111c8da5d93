"""Batches arrive in order and ahead of time, and the thread ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from windlass.config import DataConfig
from windlass.data.stream import Loader, SyntheticStream


@pytest.fixture
def stream() -> SyntheticStream:
    return SyntheticStream(DataConfig(seq_len=8), seed=0, vocab=100)


def test_batches_come_in_order_from_a_function_and_from_an_iterator(stream: SyntheticStream) -> None:
    def batch(step: int) -> np.ndarray | None:
        return np.arange(4) + 4 * step if step < 5 else None

    with Loader(stream, batch) as loader:
        first = [batch.tokens for batch in loader]
    with Loader(stream, (np.arange(4) + 4 * step for step in range(5)), prefetch=1) as loader:
        second = [batch.tokens for batch in loader]
    assert np.array_equal(np.concatenate(first), stream.sequences(np.arange(20)))
    assert np.array_equal(np.concatenate(first), np.concatenate(second))


def test_reading_ahead_hides_the_reading(stream: SyntheticStream) -> None:
    class Slow(SyntheticStream):
        def sequences(self, indexes: object) -> np.ndarray:
            time.sleep(0.05)
            return super().sequences(indexes)  # type: ignore[arg-type]

    loader = Loader(Slow(DataConfig(seq_len=8), seed=0, vocab=100), (np.arange(2) for _ in range(6)), prefetch=2)
    next(loader)
    assert loader.wait_seconds > 0.02  # nothing was ready yet
    time.sleep(0.4)
    before = loader.wait_seconds
    next(loader)
    assert loader.wait_seconds - before < 0.02
    assert loader.last_wait_seconds < 0.02
    loader.close()


def test_an_error_in_the_thread_reaches_the_reader(stream: SyntheticStream) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield np.arange(2)
        raise OSError(5, "the disk is gone")

    loader = Loader(stream, broken())
    next(loader)
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)


def test_close_ends_the_thread_although_nobody_reads(stream: SyntheticStream) -> None:
    before = threading.active_count()
    loader = Loader(stream, lambda step: np.arange(2) + step)
    time.sleep(0.05)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(loader)


def test_document_ids_come_with_the_tokens(stream: SyntheticStream) -> None:
    with Loader(stream, [np.arange(3)], documents=True) as loader:
        batch = next(loader)
    assert batch.documents is not None and batch.tokens.shape == batch.documents.shape == (3, 9)
    assert batch.ignored is None and batch.pairs is None


def test_the_room_imports_no_torch() -> None:
    import subprocess

    code = "import sys, windlass.data.stream, windlass.data.tokenize, windlass.data.corpus, windlass.data.store; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
