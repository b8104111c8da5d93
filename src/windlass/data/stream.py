"""The tokens of sequence number i of a run, the same for any number of ranks, and batches of them read ahead."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.config import DataConfig
from windlass.data.conversations import COUNTED, REJECTED
from windlass.data.mix import Ints, Mixture, SourcePasses, key_of, mix64, plan_phases, refuse_repeats, source_passes
from windlass.data.packing import Packing, pack_documents
from windlass.data.shards import TokenArray, refuse_outside
from windlass.data.store import MANIFEST, Store, open_store, refuse_unlawful
from windlass.errors import ConfigError, DataError
from windlass.units import print_share

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SequenceBatch:
    """Some sequences of a stream; None where the stream has no such values."""

    tokens: Tokens
    # Number of each token's document inside its sequence, where asked for.
    documents: Tokens | None = None
    # Which targets do not count.
    ignored: npt.NDArray[np.bool_] | None = None
    # `StoreStream.pairs`.
    pairs: Tokens | None = None


class StoreStream:
    """Windows of a token store, mixed and shuffled, in an endless order.

    Its position is the number of the next sequence; there is no other state.
    """

    def __init__(self, store: Store, config: DataConfig, *, seed: int, split: str, vocab: int | None = None) -> None:
        names = [name for name in store.sources if split in store.shards[name]]
        if not names:
            raise DataError(
                "data.split-missing",
                f"{store.path} has no {split!r} split",
                hint=f"it has {', '.join(store.splits) or 'none'}; "
                "set `validation` in the data file and tokenize again",
            )
        self.store, self.config, self.split, self.seq_len, self.vocab = store, config, split, config.seq_len, vocab
        self.ledger_hash = store.ledger_hash
        self.arrays = [store.tokens(name, split) for name in names]
        self.packings: list[Packing] | None = None
        # Preference pairs: of each document of each source, by how much the starting model prefers the chosen answer.
        self.reference: list[npt.NDArray[np.float32]] | None = None
        if config.pack == "documents":
            self.packings = [
                pack_documents(array.document_ends(), config.seq_len + 1, self._long(name))
                for name, array in zip(names, self.arrays, strict=True)
            ]
            windows = [packing.windows for packing in self.packings]
        else:
            # Windows overlap by the one token that is only a target in the first and an input in the second.
            windows = [max(0, (len(array) - 1) // config.seq_len) for array in self.arrays]
        if sum(windows) == 0:
            needed = config.seq_len + 1
            raise DataError(
                "data.too-few-tokens",
                f"the {split} split of {store.path} has no source with {needed:,} tokens",
                hint=f"a sequence needs data.seq_len + 1 = {needed:,} tokens: "
                "choose a shorter data.seq_len or more data",
            )
        plain = config if split == "train" else config.model_copy(update={"mix": {}, "stages": [], "epochs": {}})
        self.mixture = Mixture(names, windows, plan_phases(plain, names, windows, config.seq_len), seed)

    def _long(self, source: str) -> str:
        """How documents longer than a window are handled: a text continues in further windows, a pair is left out."""
        form = self.store.form(source)
        return "split" if form == "text" else "leave_out" if form == "pairs" else self.config.long_documents

    @property
    def sources(self) -> tuple[str, ...]:
        return self.mixture.names

    @property
    def counts_all(self) -> bool:
        """Whether every token of every sequence counts as a target."""
        return self.packings is None and not any(shard.marks for array in self.arrays for shard in array.shards)

    def _parts(self, indexes: npt.ArrayLike) -> Iterator[tuple[int, int, TokenArray, int, int]]:
        """(row, column, source, first token, tokens) of every stretch of tokens in these sequences."""
        source, window, _ = self.mixture.identity(indexes)
        for row, (number, place) in enumerate(zip(source.tolist(), window.tolist(), strict=True)):
            if self.packings is None:
                yield row, 0, self.arrays[number], place * self.seq_len, self.seq_len + 1
                continue
            column = 0
            for start, count in self.packings[number].window(place):
                yield row, column, self.arrays[number], start, count
                column += count

    def sequences(self, indexes: npt.ArrayLike) -> Tokens:
        """(len(indexes), seq_len + 1) tokens: inputs and, shifted by one, targets."""
        parts = list(self._parts(indexes))
        # Positions that no document fills are never counted, so any valid token will do.
        out = np.full((np.size(indexes), self.seq_len + 1), self.store.eos or 0, dtype=np.int32)
        # Announce all reads first, so that a slow disk has many requests at a time.
        for _, _, array, start, count in parts:
            array.expect(start, count)
        for row, column, array, start, count in parts:
            array.copy(start, out[row, column : column + count])
        # Also in our own stores, whose manifest has the largest id: a file may have changed since it was written.
        refuse_outside(out, self.vocab, f"a sequence of {self.store.path}")
        return out

    def identity(self, indexes: npt.ArrayLike) -> tuple[Ints, Ints]:
        """(source number, window) of each sequence. The same pair comes again only in another pass over the source."""
        return self.mixture.identity(indexes)[:2]

    def document_ids(self, indexes: npt.ArrayLike) -> Tokens:
        """For each position of each sequence, the number of its document inside the sequence, from 0. The two answers
        of a pair are two documents, and so is what no document fills."""
        out = np.zeros((np.size(indexes), self.seq_len + 1), dtype=np.int32)
        for row, column, array, start, count in self._parts(indexes):
            if self.packings is None:
                out[row, array.borders(start + 1, start + count) - start] = 1
                continue
            out[row, column : column + count][np.diff(array.marks(start, count) & REJECTED, prepend=0) > 0] = 1
            out[row, column + count : column + count + 1] = 1
        return np.cumsum(out, axis=1, dtype=np.int32)

    def marks(self, indexes: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """For each position of each sequence its mark (see `data/conversations.py`): whether the token counts as a
        target."""
        out = np.zeros((np.size(indexes), self.seq_len + 1), dtype=np.uint8)
        for row, column, array, start, count in self._parts(indexes):
            out[row, column : column + count] = array.marks(start, count)
            if self.packings is not None:
                out[row, column] &= REJECTED  # nothing before it in its window
        return out

    def ignored(self, indexes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """(len(indexes), seq_len): which targets do not count."""
        ignored: npt.NDArray[np.bool_] = (self.marks(indexes)[:, 1:] & COUNTED) == 0
        return ignored

    def pairs(self, indexes: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """(len(indexes), seq_len, 3) for each target: its answer (2 x number of the pair in the sequence, + 1 for the
        rejected one; -1 for none), the pair's number over all sources, and the bits of its reference."""
        assert self.packings is not None and self.reference is not None
        out = np.full((np.size(indexes), self.seq_len + 1, 3), -1, dtype=np.int32)
        first = np.cumsum([0, *(len(packing.begins) for packing in self.packings)])
        place, row_before = 0, -1
        for row, column, array, start, count in self._parts(indexes):
            place, row_before = (place + 1 if row == row_before else 0), row
            source = next(number for number, other in enumerate(self.arrays) if other is array)
            document = int(np.searchsorted(self.packings[source].begins, start))
            part = out[row, column : column + count]
            part[:, 0] = 2 * place + (array.marks(start, count) & REJECTED > 0)
            part[:, 1] = first[source] + document
            part[:, 2] = self.reference[source][document].view(np.int32)
        return out[:, 1:]

    def batch(self, indexes: npt.ArrayLike, *, documents: bool) -> SequenceBatch:
        return SequenceBatch(
            self.sequences(indexes),
            self.document_ids(indexes) if documents else None,
            None if self.counts_all else self.ignored(indexes),
            None if self.reference is None else self.pairs(indexes),
        )

    def packing_line(self) -> str:
        """How full the windows are and what was left out, for a log; empty without packing."""
        if not self.packings:
            return ""
        windows, tokens = sum(p.windows for p in self.packings), sum(p.tokens for p in self.packings)
        line = f"packing: {sum(len(p.lengths) for p in self.packings):,} documents in {windows:,} sequences, "
        line += f"{print_share(tokens / max(1, windows * (self.seq_len + 1)))} filled"
        for text, count in (
            ("left out", sum(p.left_out for p in self.packings)),
            ("cut", sum(p.cut for p in self.packings)),
        ):
            line += f"; {count:,} longer than data.seq_len {text}" if count else ""
        return line

    def epochs(self, tokens: int) -> list[SourcePasses]:
        return source_passes(self.mixture, self.config, tokens, self.seq_len, [len(array) for array in self.arrays])

    def check(self, tokens: int) -> None:
        """An error when a source would be repeated beyond its limit."""
        refuse_repeats(self.epochs(tokens))


class SyntheticStream:
    """Random tokens, for benchmarks: the same interface, no store, never twice the same sequence."""

    store: Store | None = None
    ledger_hash: str | None = None
    sources = ("synthetic",)

    def __init__(self, config: DataConfig, *, seed: int, vocab: int) -> None:
        self.seq_len, self.vocab = config.seq_len, vocab
        self._key = np.uint64(key_of(seed, 0x73796E))

    def sequences(self, indexes: npt.ArrayLike) -> Tokens:
        numbers = np.asarray(indexes, dtype=np.uint64)
        places = numbers[:, None] * np.uint64(self.seq_len + 1) + np.arange(self.seq_len + 1, dtype=np.uint64)[None, :]
        return (mix64(places ^ self._key) % np.uint64(self.vocab)).astype(np.int32)

    def identity(self, indexes: npt.ArrayLike) -> tuple[Ints, Ints]:
        numbers = np.asarray(indexes, dtype=np.int64)
        return np.zeros_like(numbers), numbers

    counts_all = True

    def batch(self, indexes: npt.ArrayLike, *, documents: bool) -> SequenceBatch:
        return SequenceBatch(self.sequences(indexes), self.document_ids(indexes) if documents else None)

    def packing_line(self) -> str:
        return ""

    def document_ids(self, indexes: npt.ArrayLike) -> Tokens:
        return np.zeros((np.asarray(indexes).size, self.seq_len + 1), dtype=np.int32)

    def epochs(self, tokens: int) -> list[SourcePasses]:
        return []

    def check(self, tokens: int) -> None: ...


Stream = StoreStream | SyntheticStream


def pair_count(pairs: npt.NDArray[np.int32]) -> int:
    """How many preference pairs the sequences of `StoreStream.pairs` hold."""
    return int((pairs[..., 0].max(axis=1, initial=-1) // 2 + 1).sum())


def open_stream(config: DataConfig, *, seed: int, split: str = "train", vocab: int | None = None) -> Stream:
    """The stream of a recipe's `[data]` table; refuses what does not fit before any token is read."""
    if config.store is None:
        if vocab is None:
            raise ConfigError(
                "data.vocabulary-missing",
                "synthetic tokens need a vocabulary size",
                hint="set data.store or model.vocab",
            )
        return SyntheticStream(config, seed=seed, vocab=vocab)
    stream = StoreStream(usable_store(config, vocab), config, seed=seed, split=split, vocab=vocab)
    if config.tokens is not None and split == "train":
        stream.check(config.tokens)
    return stream


def usable_store(config: DataConfig, vocab: int | None) -> Store:
    """The token store of a `[data]` table that has one; refuses what its manifest already shows to be wrong."""
    assert config.store is not None
    path = Path(config.store)
    try:
        store = open_store(path)
    except DataError as error:
        if error.code != "data.store-missing":
            raise
        stores = [p.parent.name for p in path.parent.glob(f"*/{MANIFEST}")] if path.parent.is_dir() else []
        near = [str(path.parent / name) for name in get_close_matches(path.name, stores)]
        fix = f"set data.store to {' or '.join(near)}" if near else "write it with `windlass tokenize DATA.toml`"
        hint = f"{fix}, or correct data.store: {error.hint}"
        raise DataError(error.code, error.message, hint=hint) from None
    if config.policy == "lawful":
        refuse_unlawful(store.sources, str(store.path))
    max_token = store.max_token if store.max_token is not None else (store.vocab_size or 0) - 1
    if vocab is not None and max_token >= vocab:
        raise DataError(
            "data.vocabulary-too-small",
            f"{store.path} holds token {max_token:,}, but model.vocab is {vocab:,}",
            hint=f"set model.vocab to at least {max(max_token + 1, store.vocab_size or 0):,}, or tokenize with the model's tokenizer",
        )
    return store


class Loader(contextlib.AbstractContextManager["Loader"], Iterator[SequenceBatch]):
    """Yields `stream.batch(indexes)` for each batch of indexes, in order, read ahead by one thread.

    `batches` is an iterator of index arrays, or a function from a count (0, 1, 2, ...) to one; None or the end of the
    iterator ends it. With `pin` tokens and documents lie in page-locked memory, so that copies to the device can
    overlap; without a GPU it changes nothing.
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
        # Time that all calls of `next`, and the last one, have waited.
        self.wait_seconds = self.last_wait_seconds = 0.0
        self._pin = pin
        self._stopped = False
        self._queue: queue.Queue[SequenceBatch | BaseException | None] = queue.Queue(maxsize=max(1, prefetch))
        # A daemon: a read that hangs in the file system must not keep the process from ending.
        self._thread = threading.Thread(target=self._read_ahead, args=(batches,), name="windlass-loader", daemon=True)
        self._thread.start()

    def __next__(self) -> SequenceBatch:
        if self._stopped:
            raise StopIteration
        started = time.perf_counter()
        item = self._queue.get()
        self.last_wait_seconds = time.perf_counter() - started
        self.wait_seconds += self.last_wait_seconds
        if item is None or isinstance(item, BaseException):
            self._stopped = True
            raise StopIteration if item is None else item
        return item

    def _read_ahead(self, batches: Iterable[npt.ArrayLike] | Callable[[int], npt.ArrayLike | None]) -> None:
        """Puts batches into the queue, then None, or the error that `next` raises, where somebody listens."""
        end: BaseException | None = None
        try:
            arrays: Iterable[Any] = map(batches, itertools.count()) if callable(batches) else batches
            for indexes in itertools.takewhile(lambda indexes: indexes is not None, arrays):
                batch = self.stream.batch(indexes, documents=self.documents)
                if self._pin:
                    documents = None if batch.documents is None else pinned(batch.documents)
                    batch = replace(batch, tokens=pinned(batch.tokens), documents=documents)
                self._queue.put(batch)
                if self._stopped:
                    return
        except BaseException as error:
            end = error
        self._queue.put(end)

    def close(self) -> None:
        """Stop reading ahead; safe to call twice and from a `finally`. A read that hangs is left behind after 5 s."""
        self._stopped = True
        deadline = time.monotonic() + 5
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):  # make room for a thread that waits to put
                self._queue.get(timeout=0.02)

    def __exit__(self, *_: object) -> None:
        self.close()


def pinned(array: Tokens) -> Tokens:
    """The same numbers in page-locked memory; `torch.from_numpy` of it is a pinned tensor. Unchanged without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return array
    view: Tokens = torch.empty(array.shape, dtype=torch.int32, pin_memory=True).numpy()
    view[...] = array
    return view
