"""The content of a store or data file: fertility by source and language, sample documents, tokenizers compared."""

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.config.sources import DataFile
from windlass.data.inputs import find_files
from windlass.data.mix import key_of, permute
from windlass.data.readers import read_records
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import DataError


def by_source(store: Store) -> dict[str, dict[str, Any]]:
    """Source -> documents, tokens, bytes and fertility: tokens per word (of sampled documents) and per byte.

    None where it was not measured.
    """
    entries = store.manifest.get("sources", {})
    return {
        name: _with_fertility(
            {"documents": info.documents, "tokens": info.tokens, "bytes": info.bytes}
            | {key: entries.get(name, {}).get(key) for key in ("sample_words", "sample_tokens")}
        )
        for name, info in store.sources.items()
    }


def by_language(store: Store) -> dict[str, dict[str, Any]]:
    """Language -> the same numbers over its sources."""
    totals: dict[str, dict[str, Any]] = {}
    for name, row in by_source(store).items():
        language = store.sources[name].language or "unknown"
        total = totals.setdefault(language, dict.fromkeys(row, 0))
        totals[language] = {k: None if total[k] is None or row[k] is None else total[k] + row[k] for k in row}
    return {language: _with_fertility(total) for language, total in totals.items()}


def _with_fertility(row: dict[str, Any]) -> dict[str, Any]:
    per_word = row["sample_tokens"] / row["sample_words"] if row["sample_words"] and row["sample_tokens"] else None
    return {
        **row,
        "tokens_per_word": per_word,
        "tokens_per_byte": row["tokens"] / row["bytes"] if row["bytes"] else None,
    }


def samples(store: Store, count: int, *, chars: int = 600) -> list[dict[str, Any]]:
    """`count` documents of each source, spread over it, as text; the same ones each time."""
    if store.tokenizer_file is None:
        raise DataError(
            "data.tokenizer-unknown",
            f"{store.path} does not record its tokenizer",
            hint="samples can be decoded only for stores written by `windlass tokenize`",
        )
    tokenizer = load_tokenizer(store.tokenizer_file)
    documents = []
    for name in store.sources:
        array = store.tokens(name, "train")
        total = sum(shard.documents or 0 for shard in array.shards)
        for number in permute(range(min(count, total)), total, key_of(total, count)).tolist():
            start, stop = array.document(number)
            text = tokenizer.decode(array[start : min(stop, start + chars)].tolist())
            documents.append({"source": name, "document": number, "tokens": stop - start, "text": text[:chars]})
    return documents


def source_texts(file: DataFile, max_bytes: int) -> Iterator[tuple[str, str]]:
    """(language, text) from every source: a share of `max_bytes` by its size, taken evenly from its files.

    Documents that cannot be read are skipped; `windlass tokenize` reports them.
    """
    files = {name: find_files(name, source) for name, source in file.sources.items()}
    total = sum(one.weight for source_files in files.values() for one in source_files) or 1
    for name, source_files in files.items():
        source = file.sources[name]
        for one in source_files:
            left = int(max_bytes * one.weight / total) + 1
            records = read_records(one, source, "replace", file.max_document)
            for text in (record for part in records for record in part if isinstance(record, str)):
                yield source.language or name, text
                left -= len(text)
                if left <= 0:
                    break


def compare_tokenizers(
    file: DataFile, tokenizers: Mapping[str, Tokenizer], max_bytes: int = 4_000_000
) -> list[dict[str, Any]]:
    """Tokens per word and byte of each tokenizer for each language, on the same texts."""
    texts: dict[str, list[str]] = {}
    for language, text in source_texts(file, max_bytes):
        texts.setdefault(language, []).append(text)
    rows = []
    for language, language_texts in texts.items():
        word_count = sum(len(text.split()) for text in language_texts)
        size = sum(len(text.encode()) for text in language_texts)
        for name, tokenizer in tokenizers.items():
            tokens = sum(len(tokenizer.encode(text)) for text in language_texts)
            rows.append(
                {
                    "language": language,
                    "tokenizer": name,
                    "vocab_size": tokenizer.vocab_size,
                    "tokens_per_word": tokens / word_count if word_count else None,
                    "tokens_per_byte": tokens / size if size else None,
                    "bytes": size,
                }
            )
    return rows
