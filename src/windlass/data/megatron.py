"""Megatron's indexed datasets: `.bin` is the flat array of tokens, `.idx` the lengths of sequences and documents.

9 bytes  "MMIDIDX" and two zeros     8 bytes  version 1     1 byte  number type
8 bytes  sequences                   8 bytes  document marks (documents + 1)
int32 lengths, int64 byte positions, int64 document marks

In a windlass store every document is one sequence. A mark for each would repeat that in 8 bytes; readers for language
models go by sequences, so a shard has two marks, its beginning and its end, unless the data file asks for all.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in ((1, "<u1"), (2, "<i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
CODES = {dtype: code for code, dtype in TYPES.items()}


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Two bytes per token if they suffice, else int32: Megatron has no uint32; ids below 2^31 have the same bytes."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<i4")


def map_array(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> npt.NDArray[Any]:
    """A file as a plain array (numpy's memmap class is slow to slice); the file is closed, the mapping stays."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            "data.store-incomplete",
            f"{path} is missing",
            hint="the store is incomplete: run `windlass tokenize` again, or copy it again",
        ) from None
    needed = offset + count * dtype.itemsize
    if len(mapped) < needed:
        raise DataError(
            "data.store-file-cut",
            f"{path} has {len(mapped):,} bytes, fewer than the {needed:,} of its {count:,} tokens",
            hint="the file was cut: copy the store again, or run `windlass tokenize` again",
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
        if self.by_sequence:
            return sequence_ends
        if not len(sequence_ends):
            return np.zeros(0, dtype=np.int64)
        last = self.marks[1:] - 1
        return np.where(last >= 0, sequence_ends[np.maximum(last, 0)], 0)


def index_parts(
    lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], *, marks: bool = True, step: int = 1 << 18
) -> Iterator[bytes]:
    """The bytes of an .idx in which every document is one sequence, in small parts. `marks`: one for each of them."""
    count = len(lengths)
    marks = marks or count == 0
    yield HEADER.pack(MAGIC, 1, CODES[dtype], count, count + 1 if marks else 2)
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


def index_bytes(lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], *, marks: bool = True) -> bytes:
    return b"".join(index_parts(lengths, dtype, marks=marks))


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(type, sequences, marks) without reading the rest."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size or raw[:9] != MAGIC:
        raise DataError(
            "data.megatron-index-invalid",
            f"{path} is not a Megatron index",
            hint="it should begin with MMIDIDX; was the file cut, or does it have another format?",
        )
    _, version, code, sequences, marks = HEADER.unpack(raw)
    if version != 1 or code not in TYPES:
        raise DataError(
            "data.megatron-index-invalid",
            f"{path}: version {version} with number type {code} is not supported",
            hint="windlass reads version 1 with integer tokens",
        )
    return TYPES[code], sequences, marks


def read_index(path: Path) -> MegatronIndex:
    """The mapped index of one .idx file."""
    dtype, sequences, marks = read_header(path)
    needed = HEADER.size + 12 * sequences + 8 * marks
    if path.stat().st_size < needed:
        raise DataError(
            "data.store-file-cut",
            f"{path} has {path.stat().st_size:,} bytes, fewer than the {needed:,} of {sequences:,} sequences",
            hint="the file was cut: copy it again",
        )
    raw = map_array(path, np.dtype(np.uint8), needed)
    lengths, pointers, mark_part, _ = np.split(raw[HEADER.size :], np.cumsum([4 * sequences, 8 * sequences, 8 * marks]))
    return MegatronIndex(dtype, lengths.view("<i4"), pointers.view("<i8"), mark_part.view("<i8"))
