"""Where do the tokens lie, and what do we know of them? One folder, memory-mapped: opening it reads a small manifest, nothing else.

manifest.json        counts per source and shard, tokenizer, ledger hash
ledger.json          where each source comes from and on what terms
checksums.json       CRC-32 of every stretch of tokens (SHA-256 in stores of earlier releases), SHA-256 of every other file
files.jsonl          documents in = out + rejected + filtered, for each input file
rejects.jsonl        what was not taken: file, line, reason, the line itself
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
from windlass.errors import DataError
from windlass.files import read_json

KIND = "windlass-store"
MANIFEST, LEDGER, CHECKSUMS, FILES, REJECTS = (
    "manifest.json",
    "ledger.json",
    "checksums.json",
    "files.jsonl",
    "rejects.jsonl",
)
Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """What is known of one source; None is unknown."""

    name: str
    tokens: int
    """All splits together."""
    documents: int | None
    bytes: int | None = None
    """UTF-8 bytes of text."""
    words: int | None = None
    language: str | None = None
    licence: str | None = None
    origin: str | None = None
    consent: str | None = None
    kind: str | None = None
    """Part of the EU's summary of training content: public-dataset, licensed, private, web, user, synthetic or other."""
    collected: str | None = None
    crawler: str | None = None
    opt_out: str | None = None
    notes: str | None = None
    splits: Mapping[str, int] = field(default_factory=dict)
    """Split -> tokens."""


@dataclass(frozen=True)
class Shard:
    """One flat file of tokens and, where there is one, its index of documents."""

    file: Path
    tokens: int
    dtype: np.dtype[Any]
    documents: int | None
    index: Path | None = None
    """Megatron .idx, or a file of 8-byte document ends."""
    offset: int = 0
    """Bytes before the first token."""


_SOON, _PAGE = getattr(mmap, "MADV_WILLNEED", 0), -mmap.PAGESIZE
_Advice = tuple[Callable[..., None], int, int]
"""How to tell the system about a shard, the bytes before its first token, and the bytes of a token."""


class TokenArray:
    """The tokens of one source and split, shard after shard, as if they were one array. Shards are mapped on first touch."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.concatenate([[0], np.cumsum([shard.tokens for shard in shards], dtype=np.int64)])
        self._begins: list[int] = self.starts.tolist()
        """The same numbers as plain integers, which are faster to look up one by one."""
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
        """Say that these tokens will be read soon, so that the system fetches them at once and no more than them.

        Left to itself it takes a jump to a far place for the beginning of a long read, and fetches megabytes for kilobytes.
        """
        number = bisect_right(self._begins, start) - 1
        advise, offset, size = self._advice[number] or self._ask(number)
        begin = offset + (start - self._begins[number]) * size
        page = begin & _PAGE
        try:  # once a sequence: contextlib.suppress would cost as much as the advice
            advise(_SOON, page, begin + count * size - page)
        except OSError:  # only advice; and what lies in the next shard is left to the system
            pass

    def _ask(self, number: int) -> _Advice:
        base, shard = self._array(number).base, self.shards[number]
        mapped = base.obj if isinstance(base, memoryview) else base
        made = self._advice[number] = (getattr(mapped, "madvise", lambda *_: None), shard.offset, shard.dtype.itemsize)
        return made

    def copy(self, start: int, out: npt.NDArray[np.int32]) -> None:
        """Fill `out` with the tokens from `start` on."""
        number = bisect_right(self._begins, start) - 1
        first, need = start - self._begins[number], len(out)
        part = self._array(number)[first : first + need]
        out[: len(part)] = part
        done = len(part)
        while done < need:  # rare: a sequence that crosses into the next shard
            number += 1
            part = self._array(number)[: need - done]
            out[done : done + len(part)] = part
            done += len(part)

    def borders(self, start: int, stop: int) -> Ints:
        """Positions in [start, stop) at which a document begins."""
        found: list[Ints] = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while number < len(self.shards) and int(self.starts[number]) < stop:
            base, ends = int(self.starts[number]), self._document_ends(number)
            low, high = np.searchsorted(ends, (start - base, stop - base), side="left")
            inside = ends[low:high] + base
            if start <= base:
                inside = np.concatenate([[base], inside])
            found.append(inside[inside < min(stop, int(self.starts[number + 1]))])
            number += 1
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def documents(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every document, in stored order."""
        for number in range(len(self.shards)):
            base, begin = int(self.starts[number]), 0
            for end in self._document_ends(number):
                yield base + begin, base + int(end)
                begin = int(end)

    def document(self, number: int) -> tuple[int, int]:
        """(start, stop) of the document with this number."""
        for shard in range(len(self.shards)):
            ends = self._document_ends(shard)
            if number < len(ends):
                base = int(self.starts[shard])
                return base + (int(ends[number - 1]) if number else 0), base + int(ends[number])
            number -= len(ends)
        raise DataError("data.document-beyond-last-one", f"there is no document {number} beyond the last one")

    def _array(self, number: int) -> Array:
        array = self._arrays[number]
        if array is None:
            shard = self.shards[number]
            array = self._arrays[number] = map_array(shard.file, shard.dtype, shard.tokens, shard.offset)
        return array

    def _document_ends(self, number: int) -> Ints:
        ends = self._ends[number]
        if ends is None:
            ends = self._ends[number] = _read_ends(self.shards[number])
        return ends


def _read_ends(shard: Shard) -> Ints:
    if shard.index is None:
        raise DataError(
            "data.index-documents",
            f"{shard.file} has no index of its documents",
            hint="data.mask_documents needs a store whose documents are indexed",
        )
    if shard.index.suffix == ".idx":
        return megatron.read_index(shard.index).ends
    return map_array(shard.index, np.dtype(np.int64), shard.index.stat().st_size // 8)


def map_array(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> Array:
    """A file as a plain array (numpy's own memmap class is slow to slice); the file is closed at once, the mapping stays."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            "data.missing",
            f"{path} is missing",
            hint="the store is incomplete: run `windlass tokenize` again, or copy it again",
        ) from None
    if len(mapped) < offset + count * dtype.itemsize:
        raise DataError(
            "data.bytes-fewer-tokens",
            f"{path} has {len(mapped):,} bytes, fewer than the {offset + count * dtype.itemsize:,} of its {count:,} tokens",
            hint="the file was cut: copy the store again, or run `windlass tokenize` again",
        )
    return np.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


@dataclass(frozen=True)
class Problem:
    file: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Store:
    """An open token store. `tokens` maps lazily; nothing is indexed or scanned at opening."""

    path: Path
    kind: str
    """windlass, megatron, olmo or datatrove."""
    sources: Mapping[str, SourceInfo]
    shards: Mapping[str, Mapping[str, list[Shard]]]
    """Source -> split -> shards."""
    vocab_size: int | None = None
    eos: int | None = None
    max_token: int | None = None
    """The largest id in the store; None: not known without reading it all."""
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
                "data.source", f"{self.path} has no source {source!r}", hint=f"it has {', '.join(self.shards)}"
            )
        return TokenArray(list(self.shards[source].get(split, [])))

    def ledger(self) -> dict[str, Any]:
        return read_json(self.path / LEDGER) or {}

    def verify(self) -> list[Problem]:
        """Every size, index and checksum; an empty list means the store is whole."""
        return list(_verify(self))


def open_store(path: Path | str) -> Store:
    """A store of ours, of Megatron, of OLMo or of datatrove."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return _open_ours(path)
    if (path / "work").is_dir():
        raise DataError(
            "data.finished",
            f"{path} is not finished",
            hint="run the same `windlass tokenize` again: it does only what is missing",
        )
    from windlass.data.foreign import open_foreign

    return open_foreign(path)


def _open_ours(path: Path) -> Store:
    manifest = read_json(path / MANIFEST)
    if manifest is None or manifest.get("kind") != KIND:
        raise DataError(
            "data.damaged-windlass-store",
            f"{path / MANIFEST} is damaged or not a windlass store",
            hint="copy the store again, or run `windlass tokenize` again",
        )
    dtype = np.dtype(manifest["dtype"])
    shards = {
        name: {split: [_shard(path, entry, dtype) for entry in entries] for split, entries in source["shards"].items()}
        for name, source in manifest["sources"].items()
    }
    tokenizer = manifest["tokenizer"]
    return Store(
        path=path, kind="windlass", shards=shards, sources={name: _info(name, value) for name, value in manifest["sources"].items()},
        vocab_size=tokenizer["vocab_size"], eos=tokenizer["eos"], max_token=manifest["max_token"], tokenizer_file=path / tokenizer["file"],
        tokenizer_hash=tokenizer["hash"], ledger_hash=manifest["ledger_hash"], manifest=manifest,
    )  # fmt: skip


def _shard(path: Path, entry: Mapping[str, Any], dtype: np.dtype[Any]) -> Shard:
    file = path / entry["file"]
    return Shard(file, entry["tokens"], dtype, entry["documents"], file.with_suffix(".idx"))


def _info(name: str, value: Mapping[str, Any]) -> SourceInfo:
    splits = {split: sum(entry["tokens"] for entry in entries) for split, entries in value["shards"].items()}
    facts = ("bytes", "words", "language", "licence", "origin", "consent", "kind", "collected", "crawler", "opt_out", "notes")  # fmt: skip
    return SourceInfo(
        name=name,
        tokens=value["tokens"],
        documents=value["documents"],
        splits=splits,
        **{key: value.get(key) for key in facts},
    )


def _verify(store: Store) -> Iterator[Problem]:
    if store.kind != "windlass":
        yield from (problem for shard in _all_shards(store) for problem in _size_problems(shard))
        return
    if store.ledger_hash != hash_json(store.ledger()):
        yield Problem(LEDGER, "is not the ledger the manifest was written with")
    if store.tokenizer_file is None or hash_path(store.tokenizer_file) != store.tokenizer_hash:
        yield Problem(str(store.tokenizer_file), "the tokenizer is missing or not the one the tokens were made with")
    checksums = read_json(store.path / CHECKSUMS)
    if checksums is None:
        yield Problem(CHECKSUMS, "is missing or damaged: nothing can be checked")
        return
    found = [p for name, sums in checksums["files"].items() for p in _stretch_problems(store.path / name, sums)]
    yield from found or _count_problems(store, checksums["files"])


def _count_problems(store: Store, sums: Mapping[str, Any]) -> Iterator[Problem]:
    """What the manifest says of files that are all as they were written."""
    for shard in _all_shards(store):
        if shard.file.name not in sums or shard.index is None or shard.index.name not in sums:
            yield Problem(MANIFEST, f"names {shard.file.name}, which has no checksum")
        elif (there := (shard.file.stat().st_size // shard.dtype.itemsize, megatron.read_header(shard.index)[1])) != (
            shard.tokens,
            shard.documents,
        ):
            said = f"{shard.tokens:,} tokens in {shard.documents:,} documents"
            yield Problem(MANIFEST, f"says {said} of {shard.file.name}, which has {there[0]:,} in {there[1]:,}")
    for what in ("tokens", "documents"):
        whole, by_source = store.manifest[what], [source[what] for source in store.manifest["sources"].values()]
        by_shard = sum(getattr(shard, what) for shard in _all_shards(store))
        if not whole == sum(by_source) == by_shard:
            yield Problem(
                MANIFEST, f"says {whole:,} {what}, {sum(by_source):,} in its sources, {by_shard:,} in its shards"
            )


def _all_shards(store: Store) -> Iterator[Shard]:
    for by_split in store.shards.values():
        for shards in by_split.values():
            yield from shards


def _size_problems(shard: Shard) -> Iterator[Problem]:
    needed = shard.offset + shard.tokens * shard.dtype.itemsize
    if not shard.file.is_file() or shard.file.stat().st_size < needed:
        yield Problem(str(shard.file), f"is missing or shorter than {needed:,} bytes")


def _stretch_problems(path: Path, stretches: list[list[Any]]) -> Iterator[Problem]:
    """`stretches` is a list of [bytes, checksum], one after the other, that cover the whole file."""
    if not path.is_file():
        yield Problem(path.name, "is missing")
        return
    size, wanted = path.stat().st_size, sum(length for length, _ in stretches)
    if size != wanted:
        yield Problem(path.name, f"has {size:,} bytes instead of {wanted:,}")
        return
    with path.open("rb") as file:
        offset = 0
        for length, digest in stretches:
            if _sum_next(file, length, crc=len(digest) == 8) != digest:
                yield Problem(path.name, f"bytes {offset:,} to {offset + length:,} are not what was written")
            offset += length


def _sum_next(file: Any, length: int, *, crc: bool) -> str:
    digest, number = hashlib.sha256(), 0
    while length > 0 and (part := file.read(min(length, 1 << 20))):
        if crc:  # finds every flipped bit at twice the speed (docs/decisions/007); nothing here is protected from an attacker
            number = zlib.crc32(part, number)
        else:
            digest.update(part)
        length -= len(part)
    return f"{number:08x}" if crc else digest.hexdigest()


def hash_path(path: Path) -> str | None:
    """sha256 of a file; None when it is not there."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """The same value has the same hash, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
