"""The model card and the public summary of training content, filled from the run; gaps are named.

The summary follows the European Commission's template (24 July 2025, to Article 53(1)(d) of Regulation (EU) 2024/1689):
general information, list of data sources, data processing. What a run folder cannot know (the provider, the date of
release, opt-out handling) is left to be written by the provider.
"""

import json
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from windlass.config.secret import redact_text
from windlass.energy.totals import print_energy
from windlass.figures import DataTable, Item, Note, Section
from windlass.report.collect import RunSummary
from windlass.report.tables import figure, progress, when
from windlass.runs.events import known_float
from windlass.units import print_share, print_tokens

Source = dict[str, Any]
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
# Heading of a source without `kind`: the template has no other place for it, and a guess would be a statement.
UNSTATED = "2.6 Other sources of data (kind not stated)"
COLLECTED = ("collected", "retrieved", "date", "accessed")
LANGUAGES, LICENCES = ("languages", "language"), ("licence", "license")
NOT_STATED = "not stated"
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
    "synthetic": (("2.5 Models that generated the data", ("generator", "model")),),
}
TOKEN_RANGES = ((1e9, "less than 1 billion tokens"), (1e13, "1 billion to 10 trillion tokens"))
# 2024-06-30, 2024-06, 2024, and 06/2024 as the template writes it.
_DATE = re.compile(
    r"(?<![\d-])((?:19|20)\d\d(?:-(?:0[1-9]|1[0-2])(?:-[0-3]\d)?)?|(?:0?[1-9]|1[0-2])/(?:19|20)\d\d)(?![\d/])"
)


def data_sources(summary: RunSummary) -> list[Source]:
    """The ledger's sources in one form, whether they are kept as a list or by name."""
    ledger = summary.data.get("ledger")
    raw = summary.data.get("sources", ledger.get("sources") if isinstance(ledger, dict) else None)
    if isinstance(raw, dict):
        raw = [{"name": name, **value} if isinstance(value, dict) else {"name": name} for name, value in raw.items()]
    return [s if isinstance(s, dict) else {"name": str(s)} for s in raw] if isinstance(raw, list) else []


def field(source: Source, *names: str, unknown: str = NOT_STATED) -> str:
    """The first of these keys that has a value."""
    value = next((v for name in names if (v := source.get(name)) not in (None, "", [], {})), unknown)
    return redact_text(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def stated(sources: Iterable[Source], *names: str) -> list[str]:
    """What the sources state under these keys, each value once."""
    return sorted({field(x, *names) for x in sources} - {NOT_STATED})


def store_name(path: str) -> str:
    """The store's own name: the card is published, and a site's paths are not."""
    return PurePath(path).name or path


def data_section(summary: RunSummary) -> Section:
    data = summary.recipe.get("data", {})
    mix = data.get("mix") or {}
    keys = (("name",), ("kind",), LICENCES, ("origin", "url"), ("consent", "basis"), LANGUAGES)
    rows = []
    for source in data_sources(summary):
        documents, weight = source.get("documents"), source.get("weight", mix.get(field(source, "name")))
        rows.append(
            (
                *(field(source, *names) for names in keys),
                print_tokens(known_float(source.get("tokens"))),
                f"{documents:,}" if isinstance(documents, int) else "unknown",
                print_share(known_float(weight), "by size"),
            )
        )
    if not rows:
        store = summary.data.get("store") or data.get("store")
        name = store_name(redact_text(str(store)))
        unreached = f"No data ledger: the manifest has none, and the token store {name} cannot be reached from here."
        synthetic = "Synthetic tokens: the run had no token store, so there is no ledger."
        unknown = "Unknown: the recipe of this run cannot be read."
        return Section("Data", (Note(unreached if store else synthetic if data else unknown),), id="data")
    columns = ("source", "kind", "licence", "origin", "basis of use", "languages", "tokens", "documents", "weight")
    store = store_name(field(summary.data, "store", "path", unknown="unknown"))
    note = f"Token store {store}; ledger {field(summary.data, 'ledger_hash', 'hash', unknown='without hash')}."
    return Section("Data", (DataTable(columns, rows, right=(6, 7, 8)), Note(note)), id="data")


def model_card(s: RunSummary) -> Section:
    m, sources = s.manifest, data_sources(s)
    packages: dict[str, Any] = m["packages"] if isinstance(m.get("packages"), dict) else {}
    used, basis = print_energy(s.energy)
    software = f"windlass {m.get('windlass', 'unknown')} at {m.get('commit') or 'unknown commit'}"
    rows = [
        ("name", s.name),
        ("kind", f"causal language model ({s.model})"),
        ("parameters", figure(s, "parameters")),
        ("context length", f"{s.recipe.get('data', {}).get('seq_len', 'unknown')} tokens"),
        ("trained on", f"{progress(s)} tokens planned" if s.target_tokens else f"{progress(s)} tokens"),
        ("training data", ", ".join(field(x, "name") for x in sources) or "no ledger"),
        ("languages", ", ".join(stated(sources, *LANGUAGES)) or NOT_STATED),
        ("licences of the data", ", ".join(stated(sources, *LICENCES)) or NOT_STATED),
        ("final training loss", figure(s, "training loss")),
        ("validation loss", figure(s, "validation loss")),
        ("evaluation", f"{len(s.evaluations)} records in eval.jsonl" if s.evaluations else "none recorded"),
        ("hardware", f"{s.world_size or 'unknown number of'} x {s.device or 'unknown device'} on {s.cluster}"),
        ("throughput", figure(s, "throughput")),
        ("compute", figure(s, "node-hours")),
        ("energy", f"{used} ({basis})"),
        ("CO2e, location-based", figure(s, "CO2e, location-based")),
        ("software", f"{software}, torch {packages.get('torch', 'unknown')}"),
        ("trained between", f"{when(s.started_at)} and {when(s.updated_at)}"),
        ("intended use, limits, risks", ASK),
        ("licence of the weights", _project(s, "licence") or ASK),
        ("contact", ASK),
    ]
    return Section("Model card", (DataTable(("", ""), rows),), id="model-card")


# What a model is fine-tuned for -> (pipeline_tag of the Hub, class that transformers loads).
HUB_TASKS = {
    "classify": ("text-classification", "AutoModelForSequenceClassification"),
    "multi_label": ("text-classification", "AutoModelForSequenceClassification"),
    "regress": ("text-classification", "AutoModelForSequenceClassification"),
    "tag": ("token-classification", "AutoModelForTokenClassification"),
    "masked": ("fill-mask", "AutoModelForMaskedLM"),
}
HUB_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code")
HUB_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_DATASET = re.compile(r"(?:huggingface\.co/datasets/|hf://datasets/)([\w.-]+/[\w.-]+)")


def front_matter(s: RunSummary, library: str) -> str:
    """The YAML that the Hugging Face Hub reads at the head of a README; what is not known is left out."""
    sources, licence = data_sources(s), _project(s, "licence").lower()
    languages = ", ".join(stated(sources, *LANGUAGES)).split(", ")
    is_id = bool(HUB_LICENCE.fullmatch(licence))
    values = {
        "license": licence if is_id else "other" if licence else "",
        "license_name": "" if is_id else _project(s, "licence"),
        "language": sorted({name for name in languages if HUB_LANGUAGE.fullmatch(name)}),
        "base_model": base if HUB_NAME.fullmatch(base := _project(s, "base_model")) else "",
        "datasets": sorted({name for x in sources for name in HUB_DATASET.findall(field(x, "origin", "url"))}),
        "library_name": library,
        "pipeline_tag": _hub_task(s)[0],
        "tags": ["windlass", *filter(None, [_recipe_value(s, "model", "family")])],
    }
    # JSON texts and lists are YAML too, and no name in them can become a key.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value]
    return "\n".join(["---", *lines, "---", "", ""])


def usage(s: RunSummary, library: str) -> str:
    """How the exported folder is loaded, as Markdown."""
    if library != "transformers":
        return "## Usage\n\n```console\n$ windlass generate FOLDER --prompt TEXT\n```\n"
    name = _hub_task(s)[1]
    lines = [
        f"from transformers import AutoTokenizer, {name}",
        "",
        'folder = "."  # this folder, or its name on the Hub',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"model = {name}.from_pretrained(folder)",
        'inputs = tokenizer("Text", return_tensors="pt")',
    ]
    is_causal = name == "AutoModelForCausalLM"
    lines.append(
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"
        if is_causal
        else "print(model(**inputs).logits)"
    )
    return "\n".join(["## Usage", "", "```python", *lines, "```", ""])


def _hub_task(s: RunSummary) -> tuple[str, str]:
    return HUB_TASKS.get(_recipe_value(s, "tune", "task"), ("text-generation", "AutoModelForCausalLM"))


def _recipe_value(s: RunSummary, table: str, key: str) -> str:
    value = (s.recipe.get(table) or {}).get(key)
    return redact_text(str(value)) if value else ""


def _project(s: RunSummary, key: str) -> str:
    return _recipe_value(s, "project", key)


def base_model(s: RunSummary) -> str:
    """What training began from, as the recipe names it; "": from random weights, or not known."""
    return _project(s, "base_model") or _recipe_value(s, "save", "load")


def content_summary(summary: RunSummary) -> Section:
    sources, tokens = data_sources(summary), summary.tokens
    base = base_model(summary)
    size, in_ledger = "unknown", f"{NOT_STATED} in the ledger"
    if tokens is not None:
        name = next((text for limit, text in TOKEN_RANGES if tokens < limit), "more than 10 trillion tokens")
        size = f"{name} ({print_tokens(tokens)} trained on)"
    general = [
        ("1.1 Provider: name and contact", ASK),
        ("1.1 Authorised representative in the Union, where there is one", ASK),
        ("1.2 Model and its version", summary.name),
        ("1.2 Models it depends on",
         f"starts from the weights of {base}" if base else "trained from random weights"),
        ("1.2 Date of placing on the Union market", ASK),
        ("1.3 Modality", "text"),
        ("1.3 Size of the training data", size),
        ("1.3 Types of content", ", ".join(stated(sources, *CONTENT)) or in_ledger),
        ("1.3 Latest date of acquisition", _latest_date(sources) or in_ledger),
        ("1.3 Trained further on newer data after that date", ASK),
        ("1.3 Languages", ", ".join(stated(sources, *LANGUAGES)) or in_ledger),
        ("1.3 Other characteristics of the data", ASK),
    ]  # fmt: skip
    steps = stated(sources, "filters", "processing", "filtering")
    settings = summary.data.get("settings")
    if isinstance(settings, dict) and "dedup" in settings:
        steps.append("exact duplicates removed" if settings["dedup"] == "exact" else "duplicates not checked")
    if isinstance(settings, dict) and isinstance(settings.get("validation"), (int, float)):
        steps.append(f"{100 * settings['validation']:.3g} % of documents held out for validation")
    steps += [f"{field(x, 'name')}: {field(x, 'notes')}" for x in sources if x.get("notes")]
    processing = [
        ("3.1 Signatory of the Code of Practice for general-purpose AI", ASK),
        ("3.1 Reservation of rights (text and data mining opt-outs)", _answers(sources, ("opt_out", "tdm", "robots"))),
        ("3.2 Removal of illegal content", _answers(sources, ("illegal_content", "moderation"))),
        ("3.3 Other processing", "; ".join(steps) or in_ledger),
    ]
    # The template's further questions, for the headings that have a source.
    by_kind = {kind: [x for x in sources if x.get("kind") == kind] for kind in ASKED}
    questions = [(q, _answers(by_kind[kind], names)) for kind, qs in ASKED.items() if by_kind[kind] for q, names in qs]
    origin = (
        "Follows the European Commission's template for the public summary of training content (AI Act, Article "
        "53(1)(d)), filled from the data ledger."
    )
    items: list[Item] = [Note(origin), DataTable(("1. General information", ""), general), *source_list(sources)]
    items += [DataTable(("Further questions of the template on these sources", ""), questions)] if questions else []
    items.append(DataTable(("3. Data processing", ""), processing))
    return Section("Summary of training content", tuple(items), id="training-content")


def source_list(sources: list[Source]) -> list[Item]:
    """Part 2 of the template: every heading in its order, also those without a source."""
    other = KINDS["other"]
    groups: dict[str, list[tuple[str, ...]]] = {title: [] for title in KINDS.values()}
    for source in sources:
        kind = field(source, "kind", unknown="")
        title = KINDS.get(kind, f"{other} (kind: {kind})" if kind else UNSTATED)
        row = (
            field(source, "name"),
            print_tokens(known_float(source.get("tokens"))),
            field(source, *LICENCES),
            field(source, "origin", "url"),
        )
        groups.setdefault(title, []).append(row)
    if any(title.startswith(f"{other} (") for title in groups) and not groups[other]:
        del groups[other]
    nothing = ("none in the ledger" if sources else "no ledger", "", "", "")
    rows = [(title, *row) for title in sorted(groups) for row in groups[title] or [nothing]]
    table = DataTable(("2. List of data sources", "name", "tokens", "licence", "origin"), rows, right=(2,))
    unstated = len(groups.get(UNSTATED, ()))
    text = (
        f"The kind of {unstated} of {len(sources)} sources is not stated: they are listed under 2.6 until `kind` in "
        f"the data file is one of {', '.join(KINDS)}."
    )
    return [table, Note(text, "warning")] if unstated else [table]


def _latest_date(sources: list[Source]) -> str:
    """The newest date in what the sources state about their collection, and how many state nothing."""
    stated = [text for x in sources if (text := field(x, *COLLECTED)) != NOT_STATED]
    pairs = [date.rpartition("/")[::2] for text in stated for date in _DATE.findall(text)]
    if not pairs:
        return "; ".join(sorted(set(stated)))
    latest, silent = (
        max(f"{year}-{int(month):02}" if month else year for month, year in pairs),
        len(sources) - len(stated),
    )
    return latest + (f" (not stated for {silent} of {len(sources)} sources)" if silent else "")


def _answers(sources: list[Source], names: tuple[str, ...]) -> str:
    """What each source states, by name: an answer of one is no answer of the others."""
    answers = [(field(x, "name"), field(x, *names)) for x in sources]
    silent = [name for name, text in answers if text == NOT_STATED]
    if len(silent) == len(answers):
        return f"{NOT_STATED} in the ledger; {ASK}"
    lines = [f"{name}: {text}" for name, text in answers if text != NOT_STATED]
    return "; ".join([*lines, *([f"not stated for {', '.join(silent)}"] if silent else [])])
