"""Token stores: one folder, memory-mapped. Opening it reads a small manifest and nothing else.

manifest.json        counts per source and shard, tokenizer, ledger hash
ledger.json          where each source comes from and on what terms
checksums.json       CRC-32 of every stretch of tokens (SHA-256 in stores of earlier releases), SHA-256 of other files
files.jsonl          documents in = out + rejected + filtered, for each input file
rejects.jsonl        rejected documents: file, line, reason, the line itself
tokenizer...         the tokenizer's own file
SOURCE-SPLIT-00000.bin and .idx    Megatron's indexed dataset
SOURCE-SPLIT-00000.marks           of conversations: one byte per token, whether its loss counts
"""

import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from windlass.config.sources import DataSource
from windlass.data.shards import (
    Shard,
    TokenArray,
    open_datatrove_shard,
    open_megatron_shard,
    open_olmo_shard,
    read_header,
)
from windlass.errors import DataError
from windlass.files import read_json
from windlass.units import print_share

logger = logging.getLogger(__name__)
KIND = "windlass-store"
MANIFEST, LEDGER, CHECKSUMS = "manifest.json", "ledger.json", "checksums.json"
FILES, REJECTS = "files.jsonl", "rejects.jsonl"
# Keys of a source that change no token: they can be corrected in a finished store.
TERMS = ("language", "licence", "origin", "consent", "kind", "collected", "crawler", "opt_out", "notes")


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """One source of a store; None is unknown."""

    name: str
    tokens: int  # of all splits
    documents: int | None
    bytes: int | None = None  # of text, in UTF-8
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
class StoreProblem:
    file: str
    problem: str


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

    def form(self, source: str) -> str:
        """How the source was read: text, conversations (messages, sharegpt, alpaca, chat) or preference pairs."""
        return str(self.manifest.get("sources", {}).get(source, {}).get("form", "text"))

    def tokens(self, source: str, split: str = "train") -> TokenArray:
        if source not in self.shards:
            raise DataError(
                "data.source-missing",
                f"{self.path} has no source {source!r}",
                hint=f"use one of its sources: {', '.join(self.shards)}",
            )
        return TokenArray(list(self.shards[source].get(split, [])))

    def ledger(self) -> dict[str, Any]:
        return read_json(self.path / LEDGER) or {}

    def verify(self) -> list[StoreProblem]:
        """Check every size, index and checksum; an empty list means the store is complete and undamaged."""
        shards = [shard for by_split in self.shards.values() for split in by_split.values() for shard in split]
        if self.kind != "windlass":
            needed = {s.file: s.offset + s.tokens * s.dtype.itemsize for s in shards}
            return [
                StoreProblem(str(file), f"is missing or shorter than {size:,} bytes")
                for file, size in needed.items()
                if not file.is_file() or file.stat().st_size < size
            ]
        problems = []
        if self.ledger_hash != hash_json(self.ledger()):
            problems.append(StoreProblem(LEDGER, "does not match the manifest"))
        if self.tokenizer_file is None or hash_file(self.tokenizer_file) != self.tokenizer_hash:
            problem = "the tokenizer is missing or not the one the tokens were made with"
            problems.append(StoreProblem(str(self.tokenizer_file), problem))
        try:
            checksums = TypeAdapter(_Checksums).validate_python((read_json(self.path / CHECKSUMS) or {}).get("files"))
        except ValidationError:
            return [*problems, StoreProblem(CHECKSUMS, "is missing or damaged: nothing can be checked")]
        damages = [p for name, stretches in checksums.items() for p in check_file(self.path / name, stretches)]
        if damages:
            return problems + damages
        # Compare the numbers of the manifest with the files, whose checksums are right.
        faults = []
        for shard in shards:
            files = (shard.file, shard.index, *([shard.marks] if shard.marks else []))
            if any(file is None or file.name not in checksums for file in files) or shard.index is None:
                faults.append(f"lists {shard.file.name}, which has no checksum")
                continue
            tokens, documents = shard.file.stat().st_size // shard.dtype.itemsize, read_header(shard.index)[1]
            if (tokens, documents) != (shard.tokens, shard.documents):
                listed = f"lists {shard.tokens:,} tokens in {shard.documents:,} documents of {shard.file.name}"
                faults.append(f"{listed}, which has {tokens:,} in {documents:,}")
        for key in ("tokens", "documents"):
            total, by_source = self.manifest[key], sum(source[key] for source in self.manifest["sources"].values())
            by_shard = sum(getattr(shard, key) for shard in shards)
            if not total == by_source == by_shard:
                faults.append(f"lists {total:,} {key}, {by_source:,} in its sources, {by_shard:,} in its shards")
        return problems + [StoreProblem(MANIFEST, fault) for fault in faults]


# What readers of a manifest rely on. Other keys are only shown.
_FileName = Annotated[str, Field(pattern=r"^[^/\x00]+$", max_length=255)]
_Counts = dict[str, NonNegativeInt]
_Checksums = dict[_FileName, list[tuple[NonNegativeInt, str]]]


class _ShardEntry(TypedDict):
    file: _FileName
    tokens: NonNegativeInt
    documents: NonNegativeInt


class _Terms(TypedDict, total=False):
    language: str | None
    licence: str | None
    origin: str | None
    consent: str | None
    kind: str | None
    collected: str | None
    crawler: str | None
    opt_out: str | None
    notes: str | None


class _SourceEntry(_Terms):
    tokens: NonNegativeInt
    documents: NonNegativeInt
    documents_in: NonNegativeInt
    bytes: NonNegativeInt | None
    rejected: _Counts
    filtered: _Counts
    shards: dict[str, list[_ShardEntry]]


class _TokenizerEntry(TypedDict):
    file: _FileName
    hash: str
    vocab_size: Annotated[int, Field(gt=0, le=2**31)]
    eos: Annotated[int, Field(ge=0, lt=2**31)] | None


class _Settings(TypedDict):
    special_tokens: str
    dedup: str
    validation: Annotated[float, Field(ge=0, lt=1)]


class _Manifest(TypedDict):
    kind: Literal["windlass-store"]
    dtype: Literal["<u2", "<i4"]
    max_token: Annotated[int, Field(ge=-1, lt=2**31)]
    ledger_hash: str
    tokens: NonNegativeInt
    documents: NonNegativeInt
    tokenizer: _TokenizerEntry
    settings: NotRequired[_Settings]
    sources: dict[str, _SourceEntry]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a windlass store, as written; DataError where a value that readers rely on cannot be right."""
    manifest = read_json(path / MANIFEST)
    try:
        TypeAdapter(_Manifest).validate_python(manifest, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" if manifest else "not a JSON object"
        raise DataError(
            "data.store-damaged",
            f"{path / MANIFEST} is damaged, or does not belong to a windlass store ({reason})",
            hint="copy the store again, or delete the folder and run `windlass tokenize` again",
        ) from None
    assert manifest is not None
    return manifest


def open_store(path: Path | str) -> Store:
    """A store of windlass, Megatron, OLMo or datatrove."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        if (path / "work").is_dir():
            raise DataError(
                "data.store-unfinished",
                f"{path} is not finished",
                hint="run the same `windlass tokenize` again, which processes only the missing parts",
            )
        return open_foreign(path)
    logger.info("token store: %s", path.absolute())
    manifest = read_manifest(path)
    dtype, tokenizer = np.dtype(manifest["dtype"]), manifest["tokenizer"]
    sources = {
        name: SourceInfo(
            name=name,
            tokens=value["tokens"],
            documents=value["documents"],
            splits={split: sum(entry["tokens"] for entry in entries) for split, entries in value["shards"].items()},
            **{key: value.get(key) for key in ("bytes", *TERMS)},
        )
        for name, value in manifest["sources"].items()
    }

    def shard(entry: Mapping[str, Any], marked: bool) -> Shard:
        file = path / entry["file"]
        marks = file.with_suffix(".marks") if marked else None
        return Shard(file, entry["tokens"], dtype, entry["documents"], file.with_suffix(".idx"), marks=marks)

    shards = {
        name: {
            split: [shard(entry, "form" in value) for entry in entries] for split, entries in value["shards"].items()
        }
        for name, value in manifest["sources"].items()
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


def open_foreign(path: Path) -> Store:
    """The store in a folder, or behind a Megatron prefix; one source per folder or prefix."""
    prefix = path.parent / f"{path.name}.idx"
    for kind, suffix, read_shard in (
        ("megatron", ".idx", open_megatron_shard),
        ("datatrove", ".ds", open_datatrove_shard),
        ("olmo", ".npy", open_olmo_shard),
    ):
        files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else []
        if kind == "megatron" and prefix.is_file():
            files = [prefix]
        shards: dict[str, list[Shard]] = {}
        for file in files:
            if kind == "megatron":
                place = file.relative_to(path).with_suffix("") if path.is_dir() else Path(file.stem)
            else:
                place = file.parent.relative_to(path) if file.parent != path else Path(path.resolve().name)
            shards.setdefault(str(place).replace("/", "."), []).append(read_shard(file))
        if shards:
            sources = {}
            for name, parts in shards.items():
                tokens, counts = sum(shard.tokens for shard in parts), [shard.documents for shard in parts]
                documents = None if None in counts else sum(count or 0 for count in counts)
                sources[name] = SourceInfo(name=name, tokens=tokens, documents=documents, splits={"train": tokens})
            return Store(path=path, kind=kind, sources=sources, shards={n: {"train": s} for n, s in shards.items()})
    raise DataError(
        "data.store-missing",
        f"{path} {'is not a token store' if path.exists() else 'does not exist'}",
        hint="a store is a folder written by `windlass tokenize`, or one with Megatron .bin/.idx, OLMo .npy "
        "or datatrove .ds files",
    )


def check_file(path: Path, stretches: list[tuple[int, str]]) -> Iterator[StoreProblem]:
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


# -- provenance ----------------------------------------------------------------------------------------------------


def refuse_unlawful(sources: Mapping[str, DataSource] | Mapping[str, SourceInfo], place: str) -> None:
    """policy = "lawful": every source has a licence and an origin, or the error lists what is missing."""
    gaps = {name: [key for key in ("licence", "origin") if not getattr(s, key)] for name, s in sources.items()}
    lines = [f"{name}: {' and '.join(missing)} missing" for name, missing in gaps.items() if missing]
    if lines:
        raise DataError(
            "data.source-unlawful",
            f'{place}: policy = "lawful" refuses {len(lines)} of {len(gaps)} sources:\n  ' + "\n  ".join(lines),
            hint="add the licence and origin to the source's table in the data file, or remove the source",
        )


def summary(store: Store) -> str:
    """The summary of training content in Markdown, for the model card and for anyone who asks about the training
    data."""
    sources = list(store.sources.values())
    total = sum(source.tokens for source in sources) or 1
    languages: Counter[str] = Counter()
    source_rows = []
    for source in sources:
        languages[source.language or "not stated"] += source.tokens
        texts = [source.name, source.language or "not stated", source.licence or "**missing**"]
        texts += [source.origin or "**missing**", source.consent or "not stated", source.kind or "not stated"]
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in texts]
        documents = "unknown" if source.documents is None else f"{source.documents:,}"
        cells += [documents, f"{source.tokens:,}", f"{print_share(source.tokens / total)}"]
        source_rows.append(f"| {' | '.join(cells)} |")
    processing = ["unknown: the store was written by another tool"]
    if settings := store.manifest.get("settings"):
        entries = store.manifest["sources"].values()
        rejected, filtered = (sum(sum(entry[kind].values()) for entry in entries) for kind in ("rejected", "filtered"))
        special = "kept as text" if settings["special_tokens"] == "text" else "turned into that token"
        processing = [
            f"documents read: {sum(entry['documents_in'] for entry in entries):,}; rejected as unreadable: {rejected:,}; filtered out: {filtered:,}",
            f"exact duplicates: {'removed' if settings['dedup'] == 'exact' else 'not checked'}",
            f"held out for validation: {print_share(settings['validation'], digits=3)} of documents, by hash of their text",
            f"texts were neither stripped nor normalised; text that looks like a special token was {special}",
        ]
    hashes = f"Ledger sha256 `{store.ledger_hash or 'none'}`, tokenizer sha256 `{store.tokenizer_hash or 'unknown'}`."
    lines = [
        "# Summary of training content",
        "",
        f"Token store `{store.path.resolve().name}`: {total:,} tokens from {len(sources)} sources. {hashes}",
        "",
        "## Sources",
        "",
        "| source | language | licence | origin | basis of use | kind | documents | tokens | share |",
        "|---|---|---|---|---|---|---:|---:|---:|",
        *source_rows,
        "",
        "## Languages",
        "",
        "| language | tokens | share |",
        "|---|---:|---:|",
        *(f"| {name} | {tokens:,} | {print_share(tokens / total)} |" for name, tokens in languages.most_common()),
        "",
        "## Processing",
        "",
        *(f"- {line}" for line in processing),
        "",
    ]
    for title, key in (
        ("Period of collection", "collected"),
        ("Crawlers", "crawler"),
        ("Reservations of rights (opt-outs)", "opt_out"),
        ("Notes", "notes"),
    ):
        entries = [f"- {source.name}: {text}" for source in sources if (text := getattr(source, key))]
        lines += [f"## {title}", "", *entries, ""] if entries else []
    return "\n".join(lines)
