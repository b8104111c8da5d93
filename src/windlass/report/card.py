"""What would a funder, a user and a regulator ask? The model card and the training-content summary, filled from the run; gaps are named.

The second follows the parts of the European Commission's template for the public summary of training content (24 July 2025, to
Article 53(1)(d) of Regulation (EU) 2024/1689): general information, list of data sources, data processing. What a run folder
cannot know (the provider, the date of release, opt-out handling) is left to be written, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from windlass.figures import DataTable, Item, Note, Section
from windlass.report.collect import RunSummary
from windlass.report.redact import redact_text
from windlass.report.words import energy_card, number, percent, rate, when
from windlass.units import print_tokens

ASK = "to be written by the provider"
# `kind` of a source in the data file -> the template's heading.
KINDS = {
    "public-dataset": "2.1 Publicly available datasets",
    "licensed": "2.2.1 Private datasets licensed by rightsholders",
    "private": "2.2.2 Private datasets obtained from other third parties",
    "web": "2.3 Data crawled and scraped from online sources",
    "user": "2.4 User data",
    "synthetic": "2.5 Synthetic data",
    "other": "2.6 Other sources of data",
}
UNSTATED = "2.6 Other sources of data (kind not stated)"
"""Where a source without `kind` stands: the template has no other place for it, and a guess would be a statement."""
COLLECTED = ("collected", "retrieved", "date", "accessed")
CONTENT = ("content", "domain", "genre")
# What the template asks of the sources under a heading, and where a ledger may say it.
ASKED: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "web": (
        (
            "2.3 Crawlers: names, who ran them, for what, how they treat robots.txt, captchas, paywalls",
            ("crawler", "crawlers"),
        ),
        ("2.3 Period of collection", COLLECTED),
        ("2.3 Kinds of content and of online sources", CONTENT),
        ("2.3 The most relevant domain names (top 10 % by size; small providers 5 % or 1,000)", ("domains",)),
    ),
    "user": (("2.4 Services and products the data came from", ("service", "services")),),
    "synthetic": (("2.5 Models that made the data", ("generator", "model")),),
}
SIZES = ((1e9, "less than 1 billion tokens"), (1e13, "1 billion to 10 trillion tokens"))


def data_sources(summary: RunSummary) -> list[dict[str, Any]]:
    """The ledger's sources in one form, whether they are kept as a list or by name."""
    raw = summary.data.get("sources")
    ledger = summary.data.get("ledger")
    if raw is None and isinstance(ledger, dict):
        raw = ledger.get("sources")
    if isinstance(raw, dict):
        raw = [{"name": name, **value} if isinstance(value, dict) else {"name": name} for name, value in raw.items()]
    return [s if isinstance(s, dict) else {"name": str(s)} for s in raw] if isinstance(raw, list) else []


def field(source: dict[str, Any], *names: str, unknown: str = "not stated") -> str:
    for name in names:
        value = source.get(name)
        if isinstance(value, (list, tuple)) and value:
            return redact_text(", ".join(str(v) for v in value))
        if value not in (None, "", [], {}):
            return redact_text(str(value))
    return unknown


LEDGER_COLUMNS = ("source", "kind", "licence", "origin", "basis of use", "languages", "tokens", "documents", "weight")


def ledger_rows(summary: RunSummary) -> list[tuple[str, ...]]:
    mix = summary.recipe.get("data", {}).get("mix") or {}
    rows: list[tuple[str, ...]] = []
    for source in data_sources(summary):
        name = field(source, "name")
        weight = source.get("weight", mix.get(name))
        rows.append((
            name, field(source, "kind"), field(source, "licence", "license"), field(source, "origin", "url"), field(source, "consent", "basis"), field(source, "languages", "language"),
            _tokens(source.get("tokens")), _count(source.get("documents")), percent(weight, "by size") if isinstance(weight, (int, float)) else "by size",
        ))  # fmt: skip
    return rows


def _tokens(value: object) -> str:
    return print_tokens(float(value)) if isinstance(value, (int, float)) else "unknown"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"


def data_section(summary: RunSummary) -> Section:
    rows = ledger_rows(summary)
    if not rows:
        return Section("Data", (Note(_no_ledger(summary)),), id="data")
    store = store_name(field(summary.data, "store", "path", unknown="unknown"))
    note = f"Token store {store}; ledger {field(summary.data, 'ledger_hash', 'hash', unknown='without hash')}."
    return Section("Data", (DataTable(LEDGER_COLUMNS, rows, right=(6, 7, 8)), Note(note)), id="data")


def store_name(path: str) -> str:
    """The store's own name: the card is published, and where a site keeps its files is nobody's business."""
    return PurePath(path).name or path


def _no_ledger(summary: RunSummary) -> str:
    store = summary.data.get("store") or summary.recipe.get("data", {}).get("store")
    if not store:
        return "Synthetic tokens: the run had no token store, so there is no ledger."
    return f"Neither the run's manifest nor the token store {store_name(redact_text(str(store)))}, which cannot be reached from here, gives a data ledger."


def model_card(summary: RunSummary) -> Section:
    s, m = summary, summary.manifest
    packages: dict[str, Any] = m["packages"] if isinstance(m.get("packages"), dict) else {}
    trained, basis = energy_card(s.energy)
    rows = [
        ("name", s.name),
        ("kind", f"causal language model ({s.model})"),
        ("parameters", "unknown" if s.parameters is None else f"{s.parameters:,}"),
        ("context length", f"{s.recipe.get('data', {}).get('seq_len', 'unknown')} tokens"),
        (
            "trained on",
            f"{print_tokens(s.tokens)} tokens"
            + (f" of {print_tokens(s.target_tokens)} planned" if s.target_tokens else ""),
        ),
        ("training data", ", ".join(field(x, "name") for x in data_sources(s)) or "no ledger"),
        ("languages", ", ".join(_unique(field(x, "languages", "language") for x in data_sources(s))) or "not stated"),
        (
            "licences of the data",
            ", ".join(_unique(field(x, "licence", "license") for x in data_sources(s))) or "not stated",
        ),
        ("final training loss", number(s.loss)),
        ("validation loss", number(s.val_loss)),
        ("evaluation", f"{len(s.evaluations)} records in eval.jsonl" if s.evaluations else "none recorded"),
        ("hardware", f"{s.world_size or 'unknown number of'} x {s.device or 'unknown device'} on {s.cluster}"),
        ("throughput", rate(s.tokens_per_second)),
        ("energy", f"{trained} ({basis})"),
        (
            "software",
            f"windlass {m.get('windlass', 'unknown')} at {m.get('commit') or 'unknown commit'}, torch {packages.get('torch', 'unknown')}",
        ),
        ("trained between", f"{when(s.started_at)} and {when(s.updated_at)}"),
        ("intended use, limits, risks", ASK),
        ("licence of the weights, contact", ASK),
    ]
    return Section("Model card", (DataTable(("", ""), rows),), id="model-card")


def _unique(values: Iterable[str]) -> list[str]:
    return sorted({v for v in values if v != "not stated"})


def content_summary(summary: RunSummary) -> Section:
    """The template's three parts."""
    sources = data_sources(summary)
    general = [
        ("1.1 Provider: name and contact", ASK),
        ("1.1 Authorised representative in the Union, where there is one", ASK),
        ("1.2 Model and its version", summary.name),
        ("1.2 Models it depends on", _depends(summary)),
        ("1.2 Date of placing on the Union market", ASK),
        ("1.3 Modality", "text"),
        ("1.3 Size of the training data", _size(summary.tokens)),
        ("1.3 Types of content", _listed(sources, CONTENT)),
        ("1.3 Latest date of acquisition", _latest(sources)),
        ("1.3 Trained further on newer data after that date", ASK),
        ("1.3 Languages", _listed(sources, ("languages", "language"))),
        ("1.3 Other characteristics of the data", ASK),
    ]
    filters = [*_unique(field(x, "filters", "processing", "filtering") for x in sources), *_processing(summary.data)]
    filters += [f"{field(x, 'name')}: {field(x, 'notes')}" for x in sources if x.get("notes")]
    processing = [
        ("3.1 Signatory of the Code of Practice for general-purpose AI", ASK),
        ("3.1 Reservation of rights (text and data mining opt-outs)", _said(sources, ("opt_out", "tdm", "robots"))),
        ("3.2 Removal of illegal content", _said(sources, ("illegal_content", "moderation"))),
        ("3.3 Other processing", "; ".join(filters) or "not stated in the ledger"),
    ]
    return Section(
        "Summary of training content",
        (
            Note("In the parts of the European Commission's template for the public summary of training content (AI Act, Article 53(1)(d)), filled from the data ledger."),
            DataTable(("1. General information", ""), general),
            *source_list(sources),
            *_asked(sources),
            DataTable(("3. Data processing", ""), processing),
        ),
        id="training-content",
    )  # fmt: skip


def _processing(data: dict[str, Any]) -> list[str]:
    """What the tokeniser's settings say was done to the text."""
    settings = data.get("settings")
    if not isinstance(settings, dict):
        return []
    said = []
    if "dedup" in settings:
        said.append("exact duplicates removed" if settings["dedup"] == "exact" else "duplicates not looked for")
    if isinstance(settings.get("validation"), (int, float)):
        said.append(f"{100 * settings['validation']:.3g} % of documents held out for validation")
    return said


def heading(source: dict[str, Any]) -> str:
    """Under which of the template's headings a source belongs; a ledger that does not say is not guessed."""
    kind = field(source, "kind", unknown="")
    return KINDS.get(kind, f"{KINDS['other']} (kind: {kind})" if kind else UNSTATED)


def source_list(sources: list[dict[str, Any]]) -> list[Item]:
    """Part 2 of the template: every heading, also those without a source, in its order."""
    groups: dict[str, list[tuple[str, ...]]] = {title: [] for title in KINDS.values()}
    for source in sources:
        row = (_tokens(source.get("tokens")), field(source, "licence", "license"), field(source, "origin", "url"))
        groups.setdefault(heading(source), []).append((field(source, "name"), *row))
    if any(title.startswith(f"{KINDS['other']} (") for title in groups) and not groups[KINDS["other"]]:
        del groups[KINDS["other"]]
    nothing = ("none in the ledger" if sources else "no ledger", "", "", "")
    listed = [(title, *row) for title in sorted(groups) for row in groups[title] or [nothing]]
    table = DataTable(("2. List of data sources", "name", "tokens", "licence", "origin"), listed, right=(2,))
    unstated = len(groups.get(UNSTATED, ()))
    if not unstated:
        return [table]
    said = f"The kind of {unstated} of {len(sources)} sources is not stated: listed under 2.6 until `kind` in the data file says more"
    return [table, Note(f"{said} ({', '.join(KINDS)}).", "warning")]


def _asked(sources: list[dict[str, Any]]) -> list[Item]:
    """The template's further questions, for the headings that have a source."""
    rows = [
        (question, _said([x for x in sources if x.get("kind") == kind], names))
        for kind, questions in ASKED.items()
        for question, names in questions
        if any(x.get("kind") == kind for x in sources)
    ]
    return [DataTable(("What the template asks of these sources", ""), rows)] if rows else []


def _depends(summary: RunSummary) -> str:
    base = summary.recipe.get("save", {}).get("load")
    return f"begins from the weights of {redact_text(str(base))}" if base else "trained from random weights"


def _size(tokens: float | None) -> str:
    if tokens is None:
        return "unknown"
    name = next((text for limit, text in SIZES if tokens < limit), "more than 10 trillion tokens")
    return f"{name} ({print_tokens(tokens)} trained on)"


def _listed(sources: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    return ", ".join(_unique(field(x, *names) for x in sources)) or "not stated in the ledger"


# 2024-06-30, 2024-06, 2024, and 06/2024 as the template writes it.
_DATE = re.compile(
    r"(?<![\d-])((?:19|20)\d\d(?:-(?:0[1-9]|1[0-2])(?:-[0-3]\d)?)?|(?:0?[1-9]|1[0-2])/(?:19|20)\d\d)(?![\d/])"
)


def _latest(sources: list[dict[str, Any]]) -> str:
    """The newest date in what the sources say of their collection, a period's end included; how many say nothing."""
    said = [text for x in sources if (text := field(x, *COLLECTED)) != "not stated"]
    dates = [_year_first(d) for text in said for d in _DATE.findall(text)]
    if not dates:
        return "; ".join(_unique(said)) or "not stated in the ledger"
    silent = len(sources) - len(said)
    return max(dates) + (f" (not stated for {silent} of {len(sources)} sources)" if silent else "")


def _year_first(date: str) -> str:
    month, _, year = date.rpartition("/") if "/" in date else ("", "", date)
    return f"{year}-{int(month):02}" if month else date


def _said(sources: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """What each source says, by name: an answer for one of them is none for the others."""
    told = [(field(x, "name"), field(x, *names)) for x in sources]
    silent = [name for name, text in told if text == "not stated"]
    if len(silent) == len(told):
        return f"not stated in the ledger; {ASK}"
    lines = [f"{name}: {text}" for name, text in told if text != "not stated"]
    return "; ".join([*lines, *([f"not stated for {', '.join(silent)}"] if silent else [])])
