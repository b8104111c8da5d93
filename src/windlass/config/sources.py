"""The data file of `windlass tokenize`: sources with their terms of use, tokenizer, filters and output."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from windlass.config.base import Bytes, Table, Tokens
from windlass.config.load import apply_override, parse_override, read_toml, validate


class DataSource(Table):
    """One `[sources.NAME]` table. Relative paths start in the current folder, as in a recipe."""

    paths: list[str] = Field(min_length=1)
    """Files, folders (all files of a known format below them) and globs (`**` too)."""
    format: Literal["auto", "jsonl", "parquet", "text", "arrow"] = "auto"
    """auto: by file name. jsonl and text files may be .gz or .zst; arrow is a Hugging Face `save_to_disk` folder."""
    field: str = "text"
    """Key or column that holds the text; `a.b` reaches into an inner object of JSON."""
    form: Literal["text", "chat", "messages", "sharegpt", "alpaca", "pairs"] = "text"
    """text: `field` holds a text. The other forms are conversations: the chat template renders them, and only the
    answers are learned. messages: role, content. sharegpt: conversations with from, value. alpaca: instruction, input,
    output. chat: any of these three, recognised for each record. pairs: prompt, chosen, rejected, for [tune] task =
    "prefer"."""
    max_tokens: PositiveInt | None = None
    """Conversations with more tokens are filtered out (and counted)."""
    document: Literal["file", "line"] = "file"
    """Text files: whether each file or each line is one document."""
    language: str | None = None
    """Language code ("nl"), for tables by language."""
    licence: str | None = None
    """SPDX identifier if there is one ("CC-BY-4.0"), else the terms as text."""
    origin: str | None = None
    """Where it came from: publisher, address, date."""
    consent: str | None = None
    """Basis on which it may be used: licence, contract, opt-in, public domain, ..."""
    kind: Literal["public-dataset", "licensed", "private", "web", "user", "synthetic", "other"] | None = None
    """Heading in the EU's public summary of training content: publicly available dataset, licensed by its
    rightsholders, private from another third party, crawled from the web, data of users, synthetic, or other. If
    omitted: not stated."""
    collected: str | None = None
    """When it was collected or crawled ("2019-03 to 2024-06"): the summary asks for the period and the latest date."""
    crawler: str | None = None
    """Who crawled it with which crawler, and how the crawler treats robots.txt, captchas and paywalls."""
    opt_out: str | None = None
    """How reservations of rights (opt-outs from text and data mining) were respected: protocols, lists, dates."""
    notes: str | None = None
    """Notes for the ledger."""
    min_chars: NonNegativeInt | None = None
    """Overrides the file's `min_chars` for this source."""
    max_chars: PositiveInt | None = None
    """Overrides the file's `max_chars` for this source."""
    validation: float | None = Field(default=None, ge=0, lt=1)
    """Overrides the file's `validation` for this source."""


class DataFile(Table):
    output: str
    """Folder of the token store; it must neither be inside a source folder nor contain one."""
    tokenizer: str
    """Tokenizer file or folder: tokenizers JSON, tiktoken ranks, tekken JSON or SentencePiece model."""
    template: str | None = None
    """Jinja file with the chat template for conversations (default: the tokenizer's own)."""
    eos: str | int | None = None
    """Token that ends a document (default: the tokenizer's own)."""
    add_eos: bool = True
    """End every document with the end token."""
    special_tokens: Literal["text", "parse"] = "text"
    """text: a text that looks like a special token stays text. parse: it becomes the special token."""
    engine: Literal["auto", "fastokens", "gigatoken", "tiktoken", "tokenizers", "sentencepiece"] = "auto"
    """auto: the fastest engine that is installed and gives exactly the reference's ids on a sample."""
    dedup: Literal["none", "exact"] = "none"
    """exact: keep only the first of several documents with the same text, over all sources."""
    utf8: Literal["reject", "replace"] = "reject"
    """Invalid UTF-8: reject the document, or replace the invalid bytes by U+FFFD."""
    min_chars: NonNegativeInt = 1
    """Shorter documents are filtered out (and counted). 1: only empty ones."""
    max_chars: PositiveInt | None = None
    """Longer documents are filtered out (and counted)."""
    max_document: Bytes = 64 * 2**20
    """A line or file longer than this is rejected without reading it, which limits memory."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share of documents, chosen by the hash of their text, that go to the validation split."""
    max_rejects: NonNegativeInt = 0
    """Number of documents that may be rejected (not JSON, no text, invalid UTF-8, ...) before the command fails."""
    allow_damaged: bool = False
    """Use the readable part of a truncated .gz or .zst file instead of failing."""
    workers: PositiveInt | None = None
    """Number of worker processes (default: one per CPU core that this job may use)."""
    chunk: Bytes = Field(default=32 * 2**20, gt=0)
    """Maximum size of a chunk of (decompressed) input; files with fewer than 32 chunks are divided into smaller ones,
    down to 8 MiB. A killed job repeats at most one chunk per worker."""
    shard_tokens: Tokens = Field(default=2**30, gt=0)
    """Approximate maximum number of tokens in a shard of the store."""
    document_marks: bool = False
    """Also write Megatron's mark for the beginning of each document, 8 bytes per document. Only Megatron's BERT and T5
    data sets read them; for a language model every sequence is a document."""
    policy: Literal["any", "lawful"] = "any"
    """lawful: refuse sources that do not state both a licence and an origin."""
    sources: dict[str, DataSource] = Field(min_length=1)

    @field_validator("sources")
    @classmethod
    def _plain_names(cls, value: dict[str, DataSource]) -> dict[str, DataSource]:
        for name in value:
            if not name or not all(c.isalnum() or c in "._-" for c in name) or name[0] in ".-":
                raise ValueError(
                    f"source name {name!r}: use letters, digits, dot, dash and underscore; it becomes a file name"
                )
        return value

    @field_validator("chunk")
    @classmethod
    def _chunk_size(cls, value: int) -> int:
        if not 4096 <= value <= 64 * 2**20:
            raise ValueError(f"{value:,} bytes: use 4 KiB to 64 MiB, so that a killed job repeats little work")
        return value


def load_data_file(path: Path | str, overrides: Sequence[str] = ()) -> DataFile:
    """Read, override (`key=value`) and check a data file; one ConfigError lists every problem."""
    raw, _ = read_toml(Path(path))
    for override in overrides:
        apply_override(raw, *parse_override(override))
    return validate(DataFile, raw, str(path))
