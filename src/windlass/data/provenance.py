"""Where the text of a store comes from and on what terms: the "lawful" policy and the summary of training content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from windlass.config.sources import DataSource
from windlass.errors import DataError

if TYPE_CHECKING:
    from windlass.data.store import SourceInfo, Store


def refuse_unlawful(sources: Mapping[str, DataSource] | Mapping[str, SourceInfo], place: str) -> None:
    """policy = "lawful": every source has a licence and an origin, or the error lists what is missing."""
    gaps = {name: [key for key in ("licence", "origin") if not getattr(s, key)] for name, s in sources.items()}
    lines = [f"{name}: {' and '.join(missing)} missing" for name, missing in gaps.items() if missing]
    if lines:
        raise DataError(
            "data.source-unlawful",
            f'{place}: policy = "lawful" refuses {len(lines)} of {len(gaps)} sources:\n  ' + "\n  ".join(lines),
            hint="write licence and origin into the source's table of the data file, or leave the source out",
        )


def summary(store: Store) -> str:
    """The summary of training content in Markdown, for the model card and for anyone who asks about the training
    data."""
    sources = list(store.sources.values())
    total = sum(source.tokens for source in sources) or 1
    languages: Counter[str] = Counter()
    for source in sources:
        languages[source.language or "not stated"] += source.tokens
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
        *(_source_row(source, total) for source in sources),
        "",
        "## Languages",
        "",
        "| language | tokens | share |",
        "|---|---:|---:|",
        *(f"| {name} | {tokens:,} | {tokens / total:.1%} |" for name, tokens in languages.most_common()),
        "",
        "## Processing",
        "",
        *(f"- {line}" for line in _processing(store)),
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


def _source_row(source: SourceInfo, total: int) -> str:
    texts = [
        source.name,
        source.language or "not stated",
        source.licence or "**missing**",
        source.origin or "**missing**",
        source.consent or "not stated",
        source.kind or "not stated",
    ]
    documents = "unknown" if source.documents is None else f"{source.documents:,}"
    numbers = [documents, f"{source.tokens:,}", f"{source.tokens / total:.1%}"]
    cells = [*(text.replace("|", "\\|").replace("\n", " ") for text in texts), *numbers]
    return f"| {' | '.join(cells)} |"


def _processing(store: Store) -> list[str]:
    settings, entries = store.manifest.get("settings", {}), store.manifest.get("sources", {}).values()
    if not settings:
        return ["unknown: the store was written by another tool"]
    rejected = sum(sum(entry["rejected"].values()) for entry in entries)
    filtered = sum(sum(entry["filtered"].values()) for entry in entries)
    documents = sum(entry["documents_in"] for entry in entries)
    special = "kept as text" if settings["special_tokens"] == "text" else "turned into that token"
    return [
        f"documents read: {documents:,}; rejected as unreadable: {rejected:,}; filtered out: {filtered:,}",
        f"exact duplicates: {'removed' if settings['dedup'] == 'exact' else 'not looked for'}",
        f"held out for validation: {settings['validation']:.3%} of documents, by hash of their text",
        f"texts were neither stripped nor normalised; text that looks like a special token was {special}",
    ]
