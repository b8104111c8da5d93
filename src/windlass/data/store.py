"""Token stores: one folder, memory-mapped. Opening it reads a small manifest and nothing else.

manifest.json        counts per source and shard, tokenizer, ledger hash
ledger.json          where each source comes from and on what terms
checksums.json       CRC-32 of every stretch of tokens (SHA-256 in stores of earlier releases), SHA-256 of other files
files.jsonl          documents in = out + rejected + filtered, for each input file
rejects.jsonl        rejected documents: file, line, reason, the line itself
tokenizer...         the tokenizer's own file
SOURCE-SPLIT-00000.bin and .idx    Megatron's indexed dataset
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data import megatron
from windlass.data.megatron import map_array
from windlass.errors import DataError
from windlass.files import read_json

KIND = "windlass-store"
MANIFEST, LEDGER, CHECKSUMS = "manifest.json", "ledger.json", "checksums.json"
FILES, REJECTS = "files.jsonl", "rejects.jsonl"
# Keys of a source that change no token: they can be corrected in a finished store.
TERMS = ("language", "licence", "origin", "consent", "kind", "collected", "crawler", "opt_out", "notes")
Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """One source of a store; None is unknown."""

    name: str
    tokens: int  # of all splits
    documents: int | None
    bytes: int | None = None  # of text, in UTF-8
    words: int | None = None
    language: str | None = None
    licence: str | None = None
    origin: str | None = None
    consent: str | None = None
    kind: str | None = None  # heading in the EU's summary of training content, see DataSource.kind
    collected: str | None = None
    crawler: str | None = None
    opt_out: str | None = None
    notes: str | None = None
    splits: Mapping[str, int] = field(default_factory=dict)  # split -> tokens


@dataclass(frozen=True)
class Shard:
    """One flat file of tokens and its index of documents, if it has one."""

    file: Path
    tokens: int
    dtype: np.dtype[Any]
    documents: int | None
    index: Path | None = None  # Megatron .idx, or a file of 8-byte document ends
    offset: int = 0  # bytes before the first token


_WILLNEED, _PAGE_MASK = getattr(mmap, "MADV_WILLNEED", 0), -mmap.PAGESIZE
_Advice = tuple[Callable[..., None], int, int]  # a shard's madvise, bytes before its first token, bytes per token


class TokenArray:
    """The tokens of one source and split, shard after shard, as one array. Shards are mapped on first use."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.concatenate([[0], np.cumsum([shard.tokens for shard in shards], dtype=np.int64)])
        self._begins: list[int] = self.starts.tolist()  # plain integers are faster to look up one by one
        self._arrays: list[Array | None] = [None] * len(shards)
        self._advice: list[_Advice | None] = [None] * len(shards)
        self._ends: list[Ints | None] = [None] * len(shards)

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
        if self._advice[number] is None:
            self._array(number)
        advise, offset, size = self._advice[number]  # type: ignore[misc]
        begin = offset + (start - self._begins[number]) * size
        page = begin & _PAGE_MASK
        try:  # once per sequence: contextlib.suppress would cost as much as the advice
            advise(_WILLNEED, page, begin + count * size - page)
        except OSError:  # only advice; tokens in the next shard are left to the system
            pass

    def copy(self, start: int, out: npt.NDArray[np.int32]) -> None:
        """Fill `out` with the tokens from `start` on."""
        number = bisect_right(self._begins, start) - 1
        first, need = start - self._begins[number], len(out)
        part = self._array(number)[first : first + need]
        out[: len(part)] = part
        done = len(part)
        while done < need:  # rare: a sequence that continues in the next shard
            number += 1
            part = self._array(number)[: need - done]
            out[done : done + len(part)] = part
            done += len(part)

    def borders(self, start: int, stop: int) -> Ints:
        """Positions in [start, stop) at which a document begins."""
        borders: list[Ints] = [np.empty(0, dtype=np.int64)]
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while number < len(self.shards) and int(self.starts[number]) < stop:
            base, ends = int(self.starts[number]), self._document_ends(number)
            low, high = np.searchsorted(ends, (start - base, stop - base), side="left")
            inside = ends[low:high] + base
            borders += [np.array([base])] if start <= base else []
            borders.append(inside[inside < min(stop, int(self.starts[number + 1]))])
            number += 1
        return np.concatenate(borders)

    def documents(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every document, in stored order."""
        for number, base in enumerate(self._begins[:-1]):
            begin = base
            for end in self._document_ends(number):
                yield begin, base + int(end)
                begin = base + int(end)

    def document(self, number: int) -> tuple[int, int]:
        """(start, stop) of the document with this number."""
        for shard, base in enumerate(self._begins[:-1]):
            ends = self._document_ends(shard)
            if number < len(ends):
                return base + (int(ends[number - 1]) if number else 0), base + int(ends[number])
            number -= len(ends)
        raise DataError("data.document-missing", f"there is no document {number} beyond the last one")

    def _array(self, number: int) -> Array:
        array = self._arrays[number]
        if array is None:
            shard = self.shards[number]
            array = self._arrays[number] = map_array(shard.file, shard.dtype, shard.tokens, shard.offset)
            mapped = array.base.obj if isinstance(array.base, memoryview) else array.base
            advise = getattr(mapped, "madvise", lambda *_: None)
            self._advice[number] = (advise, shard.offset, shard.dtype.itemsize)
        return array

    def _document_ends(self, number: int) -> Ints:
        ends = self._ends[number]
        if ends is None:
            shard = self.shards[number]
            if shard.index is None:
                raise DataError(
                    "data.document-index-missing",
                    f"{shard.file} has no index of its documents",
                    hint="data.mask_documents needs a store whose documents are indexed",
                )
            if shard.index.suffix == ".idx":
                ends = megatron.read_index(shard.index).ends
            else:
                ends = map_array(shard.index, np.dtype(np.int64), shard.index.stat().st_size // 8)
            self._ends[number] = ends
        return ends


@dataclass(frozen=True)
class StoreProblem:
    file: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Store:
    """An open token store. Tokens are mapped on first use; nothing is indexed or scanned at opening."""

    path: Path
    kind: str  # windlass, megatron, olmo or datatrove
    sources: Mapping[str, SourceInfo]
    shards: Mapping[str, Mapping[str, list[Shard]]]  # source -> split -> shards
    vocab_size: int | None = None
    eos: int | None = None
    max_token: int | None = None  # the largest id in the store; None: unknown without reading it all
    tokenizer_file: Path | None = None
    tokenizer_hash: str | None = None
    ledger_hash: str | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(sorted({split for by_split in self.shards.values() for split in by_split}))

    def tokens(self, source: str, split: str = "train") -> TokenArray:
        if source not in self.shards:
            raise DataError(
                "data.source-missing", f"{self.path} has no source {source!r}", hint=f"it has {', '.join(self.shards)}"
            )
        return TokenArray(list(self.shards[source].get(split, [])))

    def ledger(self) -> dict[str, Any]:
        return read_json(self.path / LEDGER) or {}

    def verify(self) -> list[StoreProblem]:
        """Check every size, index and checksum; an empty list means the store is complete and undamaged."""
        return list(_verify(self))


def open_store(path: Path | str) -> Store:
    """A store of windlass, Megatron, OLMo or datatrove."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        if (path / "work").is_dir():
            raise DataError(
                "data.store-unfinished",
                f"{path} is not finished",
                hint="run the same `windlass tokenize` again: it does only what is missing",
            )
        from windlass.data.foreign import open_foreign

        return open_foreign(path)
    manifest = read_json(path / MANIFEST)
    if manifest is None or manifest.get("kind") != KIND:
        raise DataError(
            "data.store-damaged",
            f"{path / MANIFEST} is damaged or not of a windlass store",
            hint="copy the store again, or run `windlass tokenize` again",
        )
    dtype, tokenizer = np.dtype(manifest["dtype"]), manifest["tokenizer"]
    sources: dict[str, SourceInfo] = {}
    shards: dict[str, dict[str, list[Shard]]] = {}
    for name, value in manifest["sources"].items():
        splits = {split: sum(entry["tokens"] for entry in entries) for split, entries in value["shards"].items()}
        optional = {key: value.get(key) for key in ("bytes", "words", *TERMS)}
        sources[name] = SourceInfo(
            name=name, tokens=value["tokens"], documents=value["documents"], splits=splits, **optional
        )
        shards[name] = {
            split: [
                Shard(file, entry["tokens"], dtype, entry["documents"], file.with_suffix(".idx"))
                for entry in entries
                for file in [path / entry["file"]]
            ]
            for split, entries in value["shards"].items()
        }
    return Store(
        path=path,
        kind="windlass",
        sources=sources,
        shards=shards,
        vocab_size=tokenizer["vocab_size"],
        eos=tokenizer["eos"],
        max_token=manifest["max_token"],
        tokenizer_file=path / tokenizer["file"],
        tokenizer_hash=tokenizer["hash"],
        ledger_hash=manifest["ledger_hash"],
        manifest=manifest,
    )


# -- verification --------------------------------------------------------------------------------------------------


def _verify(store: Store) -> Iterator[StoreProblem]:
    shards = [shard for by_split in store.shards.values() for split in by_split.values() for shard in split]
    if store.kind != "windlass":
        for shard in shards:
            needed = shard.offset + shard.tokens * shard.dtype.itemsize
            if not shard.file.is_file() or shard.file.stat().st_size < needed:
                yield StoreProblem(str(shard.file), f"is missing or shorter than {needed:,} bytes")
        return
    if store.ledger_hash != hash_json(store.ledger()):
        yield StoreProblem(LEDGER, "is not the ledger that the manifest was written with")
    if store.tokenizer_file is None or hash_file(store.tokenizer_file) != store.tokenizer_hash:
        yield StoreProblem(
            str(store.tokenizer_file), "the tokenizer is missing or not the one the tokens were made with"
        )
    checksums = (read_json(store.path / CHECKSUMS) or {}).get("files")
    if checksums is None:
        yield StoreProblem(CHECKSUMS, "is missing or damaged: nothing can be checked")
        return
    problems = [p for name, stretches in checksums.items() for p in _check_file(store.path / name, stretches)]
    yield from problems or _check_counts(store, shards, checksums)


def _check_counts(store: Store, shards: list[Shard], checksums: Mapping[str, Any]) -> Iterator[StoreProblem]:
    """The numbers of the manifest against files whose checksums are right."""
    for shard in shards:
        if shard.file.name not in checksums or shard.index is None or shard.index.name not in checksums:
            yield StoreProblem(MANIFEST, f"lists {shard.file.name}, which has no checksum")
            continue
        tokens = shard.file.stat().st_size // shard.dtype.itemsize
        documents = megatron.read_header(shard.index)[1]
        if (tokens, documents) != (shard.tokens, shard.documents):
            listed = f"{shard.tokens:,} tokens in {shard.documents:,} documents"
            yield StoreProblem(MANIFEST, f"lists {listed} of {shard.file.name}, which has {tokens:,} in {documents:,}")
    for key in ("tokens", "documents"):
        total, by_source = store.manifest[key], sum(source[key] for source in store.manifest["sources"].values())
        by_shard = sum(getattr(shard, key) for shard in shards)
        if not total == by_source == by_shard:
            yield StoreProblem(
                MANIFEST, f"lists {total:,} {key}, {by_source:,} in its sources, {by_shard:,} in its shards"
            )


def _check_file(path: Path, stretches: list[list[Any]]) -> Iterator[StoreProblem]:
    """`stretches` is a list of [bytes, checksum] that cover the file."""
    if not path.is_file():
        yield StoreProblem(path.name, "is missing")
        return
    size, expected_size = path.stat().st_size, sum(length for length, _ in stretches)
    if size != expected_size:
        yield StoreProblem(path.name, f"has {size:,} bytes instead of {expected_size:,}")
        return
    with path.open("rb") as file:
        offset = 0
        for length, expected in stretches:
            # CRC-32 detects every flipped bit at twice the speed of SHA-256 (docs/decisions/007).
            sha256, crc32, left = hashlib.sha256(), 0, length
            is_crc32 = len(expected) == 8
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                left -= len(part)
                if is_crc32:
                    crc32 = zlib.crc32(part, crc32)
                else:
                    sha256.update(part)
            if (f"{crc32:08x}" if is_crc32 else sha256.hexdigest()) != expected:
                yield StoreProblem(
                    path.name, f"bytes {offset:,} to {offset + length:,} have changed since they were written"
                )
            offset += length


def hash_file(path: Path) -> str | None:
    """SHA-256 of a file; None when it is missing."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """A hash that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
