"""What is in a store or a source? Fertility by source and language, sample documents, and tokenizers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.config.sources import DataFile
from windlass.data import read
from windlass.data.inputs import InputFile, find_files
from windlass.data.permute import key_of, permute
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import DataError


def fertility(store: Store) -> dict[str, dict[str, float | None]]:
    """Source -> tokens per word (on the sampled documents) and per byte; None where it was not measured."""
    entries = store.manifest.get("sources", {})
    return {
        name: _fit(info.tokens, info.bytes, info.documents, entries.get(name, {}))
        for name, info in store.sources.items()
    }


def _fit(tokens: int, size: int | None, documents: int | None, entry: Mapping[str, Any]) -> dict[str, float | None]:
    words, counted = entry.get("sample_words"), entry.get("sample_tokens")
    return {
        "tokens_per_word": counted / words if words and counted else None,
        "tokens_per_byte": tokens / size if size else None,
    }


def by_language(store: Store) -> dict[str, dict[str, Any]]:
    """Language -> documents, tokens, bytes and fertility over its sources."""
    found: dict[str, dict[str, Any]] = {}
    entries = store.manifest.get("sources", {})
    for name, info in store.sources.items():
        row = found.setdefault(
            info.language or "unknown", {"documents": 0, "tokens": 0, "bytes": 0, "sample_words": 0, "sample_tokens": 0}
        )
        row["tokens"] += info.tokens
        for key, value in (
            ("documents", info.documents),
            ("bytes", info.bytes),
            ("sample_words", entries.get(name, {}).get("sample_words")),
            ("sample_tokens", entries.get(name, {}).get("sample_tokens")),
        ):
            row[key] = None if value is None or row[key] is None else row[key] + value
    return {
        language: {**row, **_fit(row["tokens"], row["bytes"], row["documents"], row)} for language, row in found.items()
    }


def samples(store: Store, count: int, *, chars: int = 600) -> list[dict[str, Any]]:
    """`count` documents of each source, spread over it, as text; the same ones each time."""
    if store.tokenizer_file is None:
        raise DataError(
            "data.does-say-tokenizer-made",
            f"{store.path} does not say which tokenizer it was made with",
            hint="samples can be decoded only for stores written by `windlass tokenize`",
        )
    tokenizer = load_tokenizer(store.tokenizer_file)
    found = []
    for name in store.sources:
        array = store.tokens(name, "train")
        total = sum(shard.documents or 0 for shard in array.shards)
        for number in permute(range(min(count, total)), total, key_of(total, count)).tolist():
            start, stop = array.document(number)
            text = tokenizer.decode(array[start : min(stop, start + chars)].tolist())
            found.append({"source": name, "document": number, "tokens": stop - start, "text": text[:chars]})
    return found


def source_texts(file: DataFile, max_bytes: int) -> Iterator[tuple[str, str]]:
    """(language, text) from every source, each source's share of `max_bytes` by its size, taken evenly from its files."""
    found = {name: find_files(name, source) for name, source in file.sources.items()}
    total = sum(f.weight for files in found.values() for f in files) or 1
    for name, files in found.items():
        for one in files:
            room = int(max_bytes * one.weight / total) + 1
            for text in file_texts(one, file, name):
                yield file.sources[name].language or name, text
                room -= len(text)
                if room <= 0:
                    break


def file_texts(one: InputFile, file: DataFile, name: str) -> Iterator[str]:
    """The texts of one file; what cannot be read is passed over, for `windlass tokenize` reports it."""
    source = file.sources[name]
    if one.format in ("parquet", "arrow"):
        records: Iterator[list[read.Record]] = read.rows(one, source, "replace", 0, None)
    elif one.format == "text" and source.document == "file":
        records = iter([[read.whole_text(one, "replace", file.max_document)]])
    else:
        parse = read.line_parser(source, one.format, "replace", file.max_document)
        records = ([parse(line) for line in part] for part in read.Lines(one, file.max_document).until(None))
    for part in records:
        yield from (record for record in part if isinstance(record, str))


def compare_tokenizers(
    file: DataFile, tokenizers: Mapping[str, Tokenizer], max_bytes: int = 4_000_000
) -> list[dict[str, Any]]:
    """Tokens per word and byte of each tokenizer for each language, on the same texts."""
    texts: dict[str, list[str]] = {}
    for language, text in source_texts(file, max_bytes):
        texts.setdefault(language, []).append(text)
    rows = []
    for language, found in texts.items():
        words, size = sum(len(t.split()) for t in found), sum(len(t.encode()) for t in found)
        for name, tokenizer in tokenizers.items():
            tokens = sum(len(tokenizer.encode(t)) for t in found)
            rows.append(
                {
                    "language": language,
                    "tokenizer": name,
                    "vocab_size": tokenizer.vocab_size,
                    "tokens_per_word": tokens / words if words else None,
                    "tokens_per_byte": tokens / size if size else None,
                    "bytes": size,
                }
            )
    return rows
