"""Reports of run folders and sweeps as HTML, Markdown, JSON or pictures."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import windlass
from windlass.figures import Cards, Chart, DataTable, Heat, Note, Section, page, save_page, save_picture
from windlass.report.collect import RunSummary, collect
from windlass.report.columns import Columns
from windlass.report.model_card import content_summary, data_section, front_matter, model_card, usage
from windlass.report.redact import publishable, redact
from windlass.report.sections import evaluation, joined, sections, together
from windlass.report.sweeps import SweepView
from windlass.report.tables import period
from windlass.runs.folder import Run
from windlass.units import counted, print_text

# What came from a run is shown as text, never as markup.
_SPECIAL = str.maketrans({
    "\\": "\\\\", "*": "\\*", "|": "\\|", "<": "&lt;", ">": "&gt;", "\n": " ", "\r": " ",
    "`": "'", "[": "\\[", "]": "\\]",
})  # fmt: skip


def report_sections(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> tuple[str, str, list[Section]]:
    """(title, subtitle, sections); several runs get a common table first, and a sweep its own page before that."""
    columns = [Columns(run.metrics_file) for run in runs]
    for one in columns:
        one.refresh()
    summaries = [collect(run, columns=one) for run, one in zip(runs, columns, strict=True)]
    if len(runs) == 1 and not sweeps:
        s = summaries[0]
        return s.name, f"{s.model}, on {s.cluster}; {period(s)}", publishable(sections(s, columns[0]))
    # The runs' folders, relative to the one that holds them all.
    paths = [run.path.resolve() for run in runs]
    top = Path(os.path.commonpath([p.parent for p in paths])) if paths else Path()
    labels = [print_text(p.relative_to(top).as_posix()) for p in paths]
    parts = [
        Section(f"{sweep.name}: {s.title or sweep.progress}", s.items, id=f"sweep-{sweep.id}-{s.id}")
        for sweep in sweeps
        for s in sweep.sections()
    ]
    parts += joined(summaries, labels) if summaries else []
    for index, (summary, one, label) in enumerate(zip(summaries, columns, labels, strict=True)):
        parts += [
            Section(f"{label}: {s.title}" if s.title else label, s.items, id=f"run{index}-{s.id}")
            for s in sections(summary, one)
            if s.id != "conventions"
        ]
    title = ", ".join(s.title for s in sweeps) or f"{len(runs)} runs"
    joint = f"joint report of {counted(len(runs), 'run')}"
    return title, joint if runs else "a sweep of commands, whose points have no run folder", publishable(parts)


def html_report(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> str:
    title, subtitle, parts = report_sections(runs, sweeps)
    footer = f"Written by windlass {windlass.__version__} from the run folder alone."
    return page(title, parts, subtitle=subtitle, footer=footer)


def markdown_report(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> str:
    title, subtitle, parts = report_sections(runs, sweeps)
    return markdown(title, parts, subtitle=subtitle)


def json_report(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> dict[str, Any]:
    """Each run; of several also the sums; of a sweep its rows."""
    summaries = [collect(run) for run in runs]
    value: dict[str, Any] = {"runs": [redact(s.as_dict()) for s in summaries]}
    if len(summaries) > 1:
        value["together"] = together(summaries)
    if sweeps:
        keys = ("name", "title", "rank_by", "progress", "rows")
        value["sweeps"] = [{key: redact(getattr(s, key)) for key in keys} for s in sweeps]
    return value


def write_figures(runs: Sequence[Run], folder: Path, kind: str = "svg", sweeps: Sequence[SweepView] = ()) -> list[Path]:
    """Every chart of the report as a picture of its own, named after its section and title."""
    sections = report_sections(runs, sweeps)[2]
    paths: dict[Path, Chart | Heat] = {}
    for id_, item in ((s.id, item) for s in sections for item in s.items if isinstance(item, (Chart, Heat))):
        name = re.sub(r"[^a-z0-9]+", "-", f"{id_} {item.title}".lower()).strip("-")[:80]
        path = folder / f"{name}.{kind}"
        # Two long titles may differ only at their ends.
        paths[folder / f"{name}-{len(paths)}.{kind}" if path in paths else path] = item
    return [save_picture(item, path) for path, item in paths.items()]


def write_report(run: Run, path: Path | None = None) -> Path:
    return save_page(path or run.report_file, html_report([run]))


def hub_readme(summary: RunSummary, library: str) -> str:
    """README.md of an exported folder: what the Hugging Face Hub reads, then usage, model card and training data."""
    chapters = [model_card(summary), data_section(summary), evaluation(summary), content_summary(summary)]
    title, _, card = markdown(summary.name, publishable(chapters)).partition("\n\n")
    return f"{front_matter(summary, library)}{title}\n\n{usage(summary, library)}\n{card}"


def markdown(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    parts = [f"# {_plain(title)}", _plain(subtitle)]
    for section in sections:
        parts.append(f"## {_plain(section.title)}" if section.title else "")
        for item in section.items:  # HTML has no place in Markdown
            if isinstance(item, DataTable):
                head = [_plain(c) or " " for c in item.columns]
                rules = ["---:" if i in item.right else "---" for i in range(len(head))]
                rows = [head, rules, *([_plain(cell) for cell in row] for row in item.texts())]
                parts += ["\n".join(f"| {' | '.join(row)} |" for row in rows), _plain(item.caption)]
            elif isinstance(item, Cards):
                cards = [
                    (_plain(c.label), _plain(c.value), f" ({_plain(c.note)})" if c.note else "") for c in item.cards
                ]
                parts.append("\n".join(f"- **{label}**: {value}{note}" for label, value, note in cards))
            elif isinstance(item, Note):
                parts.append(("> " if item.kind == "warning" else "") + _plain(item.text))
            elif isinstance(item, (Chart, Heat)):
                parts.append(f"*Figure: {_plain(item.title)} (in the HTML form)*")
    return "\n\n".join(filter(None, parts)) + "\n"


def _plain(text: str) -> str:
    return text.translate(_SPECIAL).strip()
