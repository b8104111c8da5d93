"""How does Megatron keep tokens? `.bin` is the flat array; `.idx` says how long each sequence is and where each document begins.

9 bytes  "MMIDIDX" and two zeros     8 bytes  version 1     1 byte  number type
8 bytes  sequences                   8 bytes  document marks (documents + 1)
int32 lengths, int64 byte positions, int64 document marks

In a store of ours every document is one sequence. A mark for each would say the same again in 8 bytes; readers of text for language
models go by sequences, so a shard has two marks, its beginning and its end, unless the data file asks for all.
"""

from __future__ import annotations

import io
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
    1: np.dtype("<u1"), 2: np.dtype("<i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2"),
}  # fmt: skip
CODES = {dtype: code for code, dtype in TYPES.items()}


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Two bytes per token where they are enough. Megatron knows no unsigned 32-bit type; ids stay below 2^31, so int32 has the same bytes."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<i4")


@dataclass(frozen=True)
class Index:
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    """Tokens of each sequence."""
    pointers: npt.NDArray[np.int64]
    """Byte position of each sequence in the .bin."""
    marks: npt.NDArray[np.int64]
    """Number of the first sequence of each document, and the number of sequences."""

    @property
    def tokens(self) -> int:
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1]) if len(self.lengths) else 0

    @property
    def by_sequence(self) -> bool:
        """Every sequence is a document: so they are marked, or not marked at all."""
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
        last = self.marks[1:] - 1
        return (
            np.where(last >= 0, sequence_ends[np.maximum(last, 0)], 0)
            if len(sequence_ends)
            else np.zeros(0, dtype=np.int64)
        )


def index_parts(
    lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], *, marks: bool = True, step: int = 1 << 18
) -> Iterator[bytes]:
    """The bytes of an .idx in which every document is one sequence, in parts small enough to stream. `marks`: one for each of them."""
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
        return
    for begin in range(0, count + 1, step):
        yield np.arange(begin, min(begin + step, count + 1), dtype="<i8").tobytes()


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(type, sequences, marks) without reading the rest."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size or raw[:9] != MAGIC:
        raise DataError(
            "data.megatron-index",
            f"{path} is not a Megatron index",
            hint="it should begin with MMIDIDX; was the file cut or is it of another format?",
        )
    _, version, code, sequences, marks = HEADER.unpack(raw)
    if version != 1 or code not in TYPES:
        raise DataError(
            "data.version-number-type-known",
            f"{path}: version {version} with number type {code} is not known",
            hint="windlass reads version 1 with integer tokens",
        )
    return TYPES[code], sequences, marks


def read_index(path: Path) -> Index:
    """The mapped index of one .idx file."""
    from windlass.data.store import map_array

    dtype, sequences, marks = read_header(path)
    needed = HEADER.size + 12 * sequences + 8 * marks
    if path.stat().st_size < needed:
        raise DataError(
            "data.bytes-fewer-sequences",
            f"{path} has {path.stat().st_size:,} bytes, fewer than the {needed:,} of {sequences:,} sequences",
            hint="the file was cut",
        )
    raw = map_array(path, np.dtype(np.uint8), needed)
    first, second = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
    return Index(
        dtype, raw[HEADER.size : first].view("<i4"), raw[first:second].view("<i8"), raw[second:needed].view("<i8")
    )


def index_bytes(lengths: npt.NDArray[np.int32], dtype: np.dtype[Any], *, marks: bool = True) -> bytes:
    buffer = io.BytesIO()
    for part in index_parts(lengths, dtype, marks=marks):
        buffer.write(part)
    return buffer.getvalue()
