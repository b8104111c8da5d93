"""Where does the text come from, and on what terms? The ledger of a store, its policy, and the summary of training content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from windlass.errors import DataError

if TYPE_CHECKING:
    from windlass.data.store import SourceInfo, Store


class Provenance(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def licence(self) -> str | None: ...
    @property
    def origin(self) -> str | None: ...


def refuse_unlawful(sources: Iterable[Provenance], where: str) -> None:
    """policy = "lawful": every source has a licence and an origin, or the message lists what is missing."""
    gaps = {s.name: [key for key in ("licence", "origin") if not getattr(s, key)] for s in sources}
    lines = [f"{name}: {' and '.join(missing)} missing" for name, missing in gaps.items() if missing]
    if lines:
        raise DataError(
            "data.policy-lawful-refuses-sources",
            f'{where}: policy = "lawful" refuses {len(lines)} of {len(gaps)} sources:\n  ' + "\n  ".join(lines),
            hint="write licence and origin into the source's table of the data file, or leave the source out",
        )


def summary(store: Store) -> str:
    """The summary of training content: a page for the model card and for those who ask what the model was trained on."""
    sources = list(store.sources.values())
    total = sum(source.tokens for source in sources) or 1
    languages: dict[str, int] = {}
    for source in sources:
        languages[source.language or "not stated"] = languages.get(source.language or "not stated", 0) + source.tokens
    lines = [
        "# Summary of training content", "",
        f"Token store `{store.path.resolve().name}`: {total:,} tokens from {len(sources)} sources. Ledger sha256 `{store.ledger_hash or 'none'}`, tokenizer sha256 `{store.tokenizer_hash or 'unknown'}`.", "",
        "## Sources", "", "| source | language | licence | origin | basis of use | kind | documents | tokens | share |", "|---|---|---|---|---|---|---:|---:|---:|",
        *(_source_line(source, total) for source in sources), "",
        "## Languages", "", "| language | tokens | share |", "|---|---:|---:|",
        *(f"| {name} | {tokens:,} | {tokens / total:.1%} |" for name, tokens in sorted(languages.items(), key=lambda pair: -pair[1])), "",
        "## Processing", "", *(f"- {line}" for line in _processing(store)), "",
    ]  # fmt: skip
    return "\n".join([*lines, *(text for title, key in FURTHER.items() for text in _told(title, key, sources))])


FURTHER = {
    "Period of collection": "collected",
    "Crawlers": "crawler",
    "Reservations of rights (opt-outs)": "opt_out",
    "Notes": "notes",
}
"""Heading of the summary -> key of a source; a heading appears when a source has something to say."""


def _told(title: str, key: str, sources: Iterable[SourceInfo]) -> list[str]:
    said = [f"- {source.name}: {text}" for source in sources if (text := getattr(source, key))]
    return [f"## {title}", "", *said, ""] if said else []


def _source_line(source: SourceInfo, total: int) -> str:
    said = [
        source.name,
        source.language or "not stated",
        source.licence or "**missing**",
        source.origin or "**missing**",
        source.consent or "not stated",
        source.kind or "not stated",
    ]
    documents = "unknown" if source.documents is None else f"{source.documents:,}"
    cells = [
        *(text.replace("|", "\\|").replace("\n", " ") for text in said),
        documents,
        f"{source.tokens:,}",
        f"{source.tokens / total:.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _processing(store: Store) -> list[str]:
    settings, entries = store.manifest.get("settings", {}), store.manifest.get("sources", {}).values()
    if not settings:
        return ["not known: the store was written by another tool"]
    rejected = sum(sum(entry["rejected"].values()) for entry in entries)
    filtered = sum(sum(entry["filtered"].values()) for entry in entries)
    return [
        f"documents read: {sum(entry['documents_in'] for entry in entries):,}; rejected as unreadable: {rejected:,}; filtered out: {filtered:,}",
        f"exact duplicates: {'removed' if settings['dedup'] == 'exact' else 'not looked for'}",
        f"held out for validation: {settings['validation']:.3%} of documents, by hash of their text",
        "texts were neither stripped nor normalised; text that looks like a special token was "
        + ("kept as text" if settings["special_tokens"] == "text" else "turned into that token"),
    ]
