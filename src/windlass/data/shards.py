"""Token files: flat arrays of ids with an index of their documents, memory-mapped on first use.

Megatron's indexed datasets, which windlass writes too: `.bin` is the array of tokens, `.idx` the lengths of sequences
and documents.

9 bytes  "MMIDIDX" and two zeros     8 bytes  version 1     1 byte  number type
8 bytes  sequences                   8 bytes  document marks (documents + 1)
int32 lengths, int64 byte positions, int64 document marks

In a windlass store every document is one sequence. A mark for each would repeat that in 8 bytes; readers for language
models go by sequences, so a shard has two marks, its beginning and its end, unless the data file asks for all.
OLMo's .npy and datatrove's .ds files are read without conversion.
"""

import gzip
import mmap
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.errors import DataError

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in ((1, "<u1"), (2, "<i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
DTYPE_CODES = {dtype: code for code, dtype in TYPES.items()}


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Two bytes per token if they suffice, else int32: Megatron has no uint32; ids below 2^31 have the same bytes."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<i4")


def map_array(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> npt.NDArray[Any]:
    """A file as a plain array (numpy's memmap class is slow to slice); the file is closed, the mapping stays."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""  # no empty file is mapped
    except OSError as error:
        raise DataError(
            "data.store-incomplete",
            f"{path} cannot be read: {error.strerror}",
            hint="the store is incomplete: run `windlass tokenize` again, or copy it again",
        ) from None
    needed = offset + count * dtype.itemsize
    if len(mapped) < needed:
        raise DataError(
            "data.store-file-cut",
            f"{path} has {len(mapped):,} bytes, fewer than the {needed:,} of its {count:,} tokens",
            hint="the file is truncated: copy the store again, or run `windlass tokenize` again",
        )
    return np.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


@dataclass(frozen=True)
class MegatronIndex:
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]  # tokens of each sequence
    pointers: npt.NDArray[np.int64]  # byte position of each sequence in the .bin
    marks: npt.NDArray[np.int64]  # number of the first sequence of each document, and the number of sequences

    @property
    def tokens(self) -> int:
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1]) if len(self.lengths) else 0

    @property
    def by_sequence(self) -> bool:
        """Whether every sequence is a document: either each has a mark, or only beginning and end have."""
        return len(self.marks) in (2, len(self.lengths) + 1)

    @property
    def documents(self) -> int:
        return len(self.lengths) if self.by_sequence else max(0, len(self.marks) - 1)

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Token position after the last token of each document."""
        sequence_ends = self.pointers // self.dtype.itemsize + self.lengths
        return sequence_ends if self.by_sequence else np.concatenate([[0], sequence_ends])[self.marks[1:]]


def index_parts(
    lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], *, marks: bool = True, step: int = 1 << 18
) -> Iterator[bytes]:
    """The bytes of an .idx in which every document is one sequence, in small parts. `marks`: one for each of them."""
    count = len(lengths)
    marks = marks or count == 0
    yield INDEX_HEADER.pack(MAGIC, 1, DTYPE_CODES[dtype], count, count + 1 if marks else 2)
    yield lengths.astype("<i4", copy=False).tobytes()
    position = 0
    for begin in range(0, count, step):
        part = lengths[begin : begin + step].astype(np.int64)
        ends = np.cumsum(part) + position
        yield ((ends - part) * dtype.itemsize).astype("<i8").tobytes()
        position = int(ends[-1])
    if not marks:
        yield np.array([0, count], dtype="<i8").tobytes()
    for begin in range(0, count + 1, step) if marks else ():
        yield np.arange(begin, min(begin + step, count + 1), dtype="<i8").tobytes()


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(type, sequences, marks) without reading the rest."""
    with path.open("rb") as file:
        raw = file.read(INDEX_HEADER.size)
    if len(raw) < INDEX_HEADER.size or raw[:9] != MAGIC:
        raise DataError(
            "data.megatron-index-invalid",
            f"{path} is not a Megatron index",
            hint="it must begin with MMIDIDX: check that the file is complete and has this format",
        )
    _, version, code, sequences, marks = INDEX_HEADER.unpack(raw)
    if version != 1 or code not in TYPES:
        raise DataError(
            "data.megatron-index-invalid",
            f"{path}: version {version} with number type {code} is not supported",
            hint="windlass reads version 1 with integer tokens",
        )
    return TYPES[code], sequences, marks


def read_index(path: Path) -> MegatronIndex:
    dtype, sequences, marks = read_header(path)
    needed = INDEX_HEADER.size + 12 * sequences + 8 * marks
    if path.stat().st_size < needed:
        raise DataError(
            "data.store-file-cut",
            f"{path} has {path.stat().st_size:,} bytes, fewer than the {needed:,} of {sequences:,} sequences",
            hint="the file is truncated: copy it again",
        )
    raw = map_array(path, np.dtype(np.uint8), needed)
    lengths, pointers, mark_part, _ = np.split(
        raw[INDEX_HEADER.size :], np.cumsum([4 * sequences, 8 * sequences, 8 * marks])
    )
    return MegatronIndex(dtype, lengths.view("<i4"), pointers.view("<i8"), mark_part.view("<i8"))


# -- shards --------------------------------------------------------------------------------------------------------

_WILLNEED, _PAGE_MASK = getattr(mmap, "MADV_WILLNEED", 0), -mmap.PAGESIZE


@dataclass(frozen=True)
class Shard:
    """One flat file of tokens and its index of documents, if it has one. Both are mapped on first use."""

    file: Path
    tokens: int
    dtype: np.dtype[Any]
    documents: int | None
    index: Path | None = None  # Megatron .idx, or a file of 8-byte document ends
    offset: int = 0  # bytes before the first token
    marks: Path | None = None  # one byte per token, see `data/conversations.py`; None: every token counts

    @cached_property
    def mark_array(self) -> Array | None:
        return None if self.marks is None else map_array(self.marks, np.dtype(np.uint8), self.tokens)

    @cached_property
    def array(self) -> Array:
        return map_array(self.file, self.dtype, self.tokens, self.offset)

    @cached_property
    def advise(self) -> Any:
        """The mapping's madvise, where the system has it."""
        base = self.array.base
        return getattr(getattr(base, "obj", base), "madvise", lambda *_: None)

    @cached_property
    def document_ends(self) -> Ints:
        if self.index is None:
            raise DataError(
                "data.document-index-missing",
                f"{self.file} has no index of its documents",
                hint="set data.mask_documents = false, or use a store with an index of its documents",
            )
        ends: Ints | None = None
        if self.index.suffix != ".idx":
            ends = map_array(self.index, np.dtype(np.int64), self.index.stat().st_size // 8)
        elif (index := read_index(self.index)).by_sequence or 0 <= index.marks.min() <= index.marks.max() <= len(
            index.lengths
        ):
            ends = index.ends
        if ends is None or (
            len(ends) and not (ends[0] >= 0 and ends[-1] <= self.tokens and (np.diff(ends) >= 0).all())
        ):
            raise DataError(
                "data.document-index-damaged",
                f"{self.index} is damaged: its documents do not follow one another in {self.tokens:,} tokens",
                hint="copy the file again; `windlass data STORE --verify` finds every changed file",
            )
        return ends


def refuse_outside(tokens: Array, vocab: int | None, place: str) -> None:
    """An error for an id that the model does not have: on a GPU the look-up would end the process without a message.
    `vocab` None: below 2^31, the largest that windlass reads."""
    limit = 2**31 if vocab is None else vocab
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    if low < 0 or high >= limit:
        raise DataError(
            "data.token-outside-vocabulary",
            f"{place} holds token {low if low < 0 else high:,}, but the vocabulary has {limit:,}",
            hint="find changed files with `windlass data STORE --verify`; if there are none, set model.vocab to at "
            "least "
            f"{high + 1:,}, or tokenize with the model's tokenizer",
        )


class TokenArray:
    """The tokens of one source and split, shard after shard, as one array."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.concatenate([[0], np.cumsum([shard.tokens for shard in shards], dtype=np.int64)])
        self._begins: list[int] = self.starts.tolist()  # plain integers are faster to look up one by one

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, where: slice) -> Array:
        start, stop, step = where.indices(len(self))
        out = np.empty(max(0, stop - start), dtype=np.int32)
        self.copy(start, out)
        return out[::step]

    def expect(self, start: int, count: int) -> None:
        """Announce a read, so that the system fetches exactly these tokens at once.

        Without it the system takes a jump for the beginning of a long read, and fetches megabytes for kilobytes.
        """
        number = bisect_right(self._begins, start) - 1
        shard = self.shards[number]
        size = shard.dtype.itemsize
        begin = shard.offset + (start - self._begins[number]) * size
        page = begin & _PAGE_MASK
        try:  # once per sequence: contextlib.suppress would cost as much as the advice
            shard.advise(_WILLNEED, page, begin + count * size - page)
        except OSError:  # only advice; tokens in the next shard are left to the system
            pass

    def copy(self, start: int, out: npt.NDArray[np.int32]) -> None:
        """Fill `out` with the tokens from `start` on."""
        number = bisect_right(self._begins, start) - 1
        first, done = start - self._begins[number], 0
        while done < len(out):  # a second round only for a sequence that continues in the next shard
            part = self.shards[number].array[first : first + len(out) - done]
            if part.dtype.itemsize > 4:  # else a large id would silently become another one
                refuse_outside(part, None, str(self.shards[number].file))
            out[done : done + len(part)] = part
            number, first, done = number + 1, 0, done + len(part)

    def marks(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """The marks of the tokens from `start` on; 1 (counted) where a shard has none."""
        out, number, done = np.ones(count, dtype=np.uint8), bisect_right(self._begins, start) - 1, 0
        first = start - self._begins[number]
        while done < count:
            size = min(count - done, self.shards[number].tokens - first)
            if (marks := self.shards[number].mark_array) is not None:
                out[done : done + size] = marks[first : first + size]
            number, first, done = number + 1, 0, done + size
        return out

    def borders(self, start: int, stop: int) -> Ints:
        """Positions in [start, stop) at which a document begins."""
        borders: list[Ints] = [np.empty(0, dtype=np.int64)]
        number = bisect_right(self._begins, start) - 1
        while number < len(self.shards) and self._begins[number] < stop:
            base, ends = self._begins[number], self.shards[number].document_ends
            low, high = np.searchsorted(ends, (start - base, stop - base), side="left")
            inside = ends[low:high] + base
            borders += [np.array([base])] if start <= base else []
            borders.append(inside[inside < min(stop, self._begins[number + 1])])
            number += 1
        return np.concatenate(borders)

    def document_ends(self) -> Ints:
        """Token position after each document."""
        bases = zip(self.shards, self._begins, strict=False)
        return np.concatenate([np.empty(0, dtype=np.int64), *(shard.document_ends + base for shard, base in bases)])

    def documents(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every document, in stored order."""
        for shard, base in zip(self.shards, self._begins, strict=False):
            begin = base
            for end in shard.document_ends:
                yield begin, base + int(end)
                begin = base + int(end)

    def document(self, number: int) -> tuple[int, int]:
        for shard, base in zip(self.shards, self._begins, strict=False):
            ends = shard.document_ends
            if number < len(ends):
                return base + (int(ends[number - 1]) if number else 0), base + int(ends[number])
            number -= len(ends)
        raise DataError("data.document-missing", f"there is no document {number}: it is beyond the last one")


# -- shards of other tools -----------------------------------------------------------------------------------------


def open_megatron_shard(file: Path) -> Shard:
    binary, index = file.with_suffix(".bin"), read_index(file)
    if not binary.is_file():
        raise DataError(
            "data.store-incomplete",
            f"{file} has no .bin file next to it",
            hint="copy both files; a killed Megatron job leaves one without the other",
        )
    size = index.tokens * index.dtype.itemsize
    if binary.stat().st_size != size:
        raise DataError(
            "data.store-file-cut",
            f"{binary} has {binary.stat().st_size:,} bytes, its index says {size:,}",
            hint="copy both files again: they do not belong together, or one is truncated",
        )
    return Shard(binary, index.tokens, index.dtype, index.documents, file)


def open_datatrove_shard(file: Path) -> Shard:
    """The metadata's first line is `tokenizer|bytes per token`; without it the last document end gives the width."""
    index, metadata = file.with_name(file.name + ".index"), file.with_name(file.name + ".metadata")
    documents = index.stat().st_size // 8 if index.is_file() else None
    width = metadata.read_text().split("\n", 1)[0].rpartition("|")[2].strip() if metadata.is_file() else ""
    if width in ("2", "4"):
        dtype = np.dtype(f"<u{width}")
    elif documents:
        dtype = _dtype_by_size(file, int(np.fromfile(index, dtype="<u8", offset=8 * (documents - 1))[0]))
    else:
        raise DataError(
            "data.token-width-unknown",
            f"{file}: the number of bytes per token is unknown",
            hint="put the .ds.metadata or .ds.index file next to it",
        )
    return Shard(file, file.stat().st_size // dtype.itemsize, dtype, documents, None if documents is None else index)


def _dtype_by_size(file: Path, tokens: int) -> np.dtype[Any]:
    size = file.stat().st_size
    if size not in (2 * tokens, 4 * tokens):
        raise DataError(
            "data.store-file-cut",
            f"{file} has {size:,} bytes, which is neither 2 nor 4 for each of its {tokens:,} tokens",
            hint="copy both files again: the file is truncated, or its index belongs to another file",
        )
    return np.dtype("<u2" if size == 2 * tokens else "<u4")


def open_olmo_shard(file: Path) -> Shard:
    """OLMo's .npy has no header: the .csv.gz beside it (start, end, ...) gives the number of tokens, so their width."""
    with file.open("rb") as opened:
        has_header = opened.read(6) == b"\x93NUMPY"
    if has_header:
        try:
            array: Any = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OverflowError) as error:
            raise DataError(
                "data.token-array-invalid", f"{file} is damaged: {error}", hint="copy the file again"
            ) from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                "data.token-array-invalid",
                f"{file} holds {array.dtype} of shape {array.shape}, not one row of token ids",
            )
        return Shard(file, array.shape[0], array.dtype, None, offset=array.offset)
    listing = file.with_suffix(".csv.gz")
    if not listing.is_file():
        raise DataError(
            "data.token-width-unknown",
            f"{file} has no header and no {listing.name} next to it",
            hint="OLMo's metadata file gives the number of bytes per token: copy it too",
        )
    tokens = documents = 0
    try:
        with gzip.open(listing, "rt") as lines:
            for line in lines:
                tokens, documents = int(line.split(",", 2)[1]), documents + 1
    except (ValueError, IndexError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError("data.store-file-cut", f"{listing} is damaged: {error}", hint="copy the file again") from None
    return Shard(file, tokens, _dtype_by_size(file, tokens), documents)
