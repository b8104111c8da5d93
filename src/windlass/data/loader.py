"""Batches that are read ahead by one thread; the time spent waiting for it is counted."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data.stream import Stream

Batch = npt.NDArray[np.int32]
_DONE = object()


class Loader(Iterator[Any]):
    """Yields `stream.sequences(indexes)` for each batch of indexes, in order, read ahead by `prefetch` batches.

    `batches` is an iterator of index arrays, or a function from a count (0, 1, 2, ...) to one; None or the end of the
    iterator ends it. With `documents` each item is a pair (tokens, document ids). With `pin` the arrays lie in page-
    locked memory, so that copies to the device can overlap; without a GPU it changes nothing.
    """

    def __init__(
        self,
        stream: Stream,
        batches: Iterable[npt.ArrayLike] | Callable[[int], npt.ArrayLike | None],
        *,
        prefetch: int = 2,
        pin: bool = False,
        documents: bool = False,
    ) -> None:
        self.stream, self.documents = stream, documents
        self.wait_seconds = 0.0  # that all calls of `next` have waited
        self.last_wait_seconds = 0.0
        self._pin = pin
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(batches,), name="windlass-loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        if self._stop.is_set():
            raise StopIteration
        started = time.perf_counter()
        item = self._queue.get()
        self.last_wait_seconds = time.perf_counter() - started
        self.wait_seconds += self.last_wait_seconds
        if item is _DONE or isinstance(item, BaseException):
            self._stop.set()
            raise item if isinstance(item, BaseException) else StopIteration
        return item

    def close(self) -> None:
        """Stop reading ahead; safe to call twice and from a `finally`."""
        self._stop.set()
        while True:  # make room, so that a thread waiting to put sees the flag
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=5)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self, batches: Iterable[npt.ArrayLike] | Callable[[int], npt.ArrayLike | None]) -> None:
        settle = pinned if self._pin else np.asarray
        try:
            arrays: Iterable[Any] = map(batches, itertools.count()) if callable(batches) else batches
            for indexes in itertools.takewhile(lambda indexes: indexes is not None, arrays):
                item: Any = settle(self.stream.sequences(indexes))
                if self.documents:
                    item = (item, settle(self.stream.document_ids(indexes)))
                if not self._put(item):
                    return
            self._put(_DONE)
        except BaseException as error:  # raised again by `next`, where somebody listens
            self._put(error)

    def _put(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def pinned(array: Batch) -> Batch:
    """The same numbers in page-locked memory; `torch.from_numpy` of it is a pinned tensor. Unchanged without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return array
    view: Batch = torch.empty(array.shape, dtype=torch.int32, pin_memory=True).numpy()
    view[...] = array
    return view
