"""How does a folder become a report? Collect, lay out, write: HTML that opens from disk, Markdown, or JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import windlass
from windlass.figures import Chart, Heat, Section, page, save_page, save_picture
from windlass.report.collect import RunSummary, collect
from windlass.report.columns import Columns
from windlass.report.content import counted, joined, sections, together
from windlass.report.redact import publishable, redact
from windlass.report.sweeps import SweepView
from windlass.report.text import markdown
from windlass.report.words import when
from windlass.runs.folder import Run
from windlass.units import print_text


def gather(run: Run) -> tuple[RunSummary, Columns]:
    columns = Columns(run.metrics_file)
    columns.refresh()
    return collect(run, columns=columns), columns


def report_sections(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> tuple[str, str, list[Section]]:
    """(title, subtitle, sections); several runs get a common table first, and a sweep its own rows and charts before that."""
    found = [gather(run) for run in runs]
    if len(found) == 1 and not sweeps:
        summary, columns = found[0]
        return summary.name, _subtitle(summary), publishable(sections(summary, columns))
    labels = folder_labels(runs)
    parts = [part for sweep in sweeps for part in _swept(sweep)]
    parts += joined([s for s, _ in found], labels) if found else []
    for index, ((summary, columns), label) in enumerate(zip(found, labels, strict=True)):
        own = sections(summary, columns)
        parts += [
            Section(f"{label}: {s.title}" if s.title else label, s.items, id=f"run{index}-{s.id}")
            for s in own
            if s.id != "conventions"
        ]
    title = ", ".join(s.title for s in sweeps) or f"{len(found)} runs"
    subtitle = (
        f"a joint report of {counted(len(found), 'run')}"
        if found
        else "a sweep of commands: its points are no runs of windlass"
    )
    return title, subtitle, publishable(parts)


def _swept(sweep: SweepView) -> list[Section]:
    return [
        Section(f"{sweep.name}: {s.title or sweep.progress}", s.items, id=f"sweep-{sweep.id}-{s.id}")
        for s in sweep.sections()
    ]


def folder_labels(runs: Sequence[Run]) -> list[str]:
    """What tells the runs apart: their folders, below the one that holds them all."""
    if not runs:
        return []
    paths = [run.path.resolve() for run in runs]
    top = Path(os.path.commonpath([p.parent for p in paths]))
    return [print_text(p.relative_to(top).as_posix()) for p in paths]


def _subtitle(summary: RunSummary) -> str:
    return f"{summary.model}, on {summary.cluster}; {when(summary.started_at)} to {when(summary.updated_at)}"


def html_report(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> str:
    title, subtitle, parts = report_sections(runs, sweeps)
    return page(
        title, parts, subtitle=subtitle, footer=f"Written by windlass {windlass.__version__} from the run folder alone."
    )


def markdown_report(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> str:
    title, subtitle, parts = report_sections(runs, sweeps)
    return markdown(title, parts, subtitle=subtitle)


def json_report(runs: Sequence[Run], sweeps: Sequence[SweepView] = ()) -> dict[str, Any]:
    """Each run as it is; of several also the sums; of a sweep its rows."""
    found = [collect(run) for run in runs]
    sums = {"together": together(found)} if len(found) > 1 else {}
    swept = [
        {"name": s.name, "title": s.title, "rank_by": s.rank_by, "progress": s.progress, "rows": redact(s.rows)}
        for s in sweeps
    ]
    return {"runs": [redact(s.as_dict()) for s in found], **sums, **({"sweeps": swept} if swept else {})}


def write_figures(runs: Sequence[Run], folder: Path, kind: str = "svg", sweeps: Sequence[SweepView] = ()) -> list[Path]:
    """Every chart of the report as a picture of its own, named after its section and title."""
    made: list[Path] = []
    for section in report_sections(runs, sweeps)[2]:
        for item in section.items:
            if isinstance(item, (Chart, Heat)):
                words = re.sub(r"[^a-z0-9]+", "-", f"{section.id} {item.title}".lower()).strip("-")[:80]
                made.append(save_picture(item, folder / f"{words}.{kind}"))
    return made


def write_report(run: Run, path: Path | None = None) -> Path:
    """The HTML report of one run, by default as report.html in its folder."""
    return save_page(path or run.report_file, html_report([run]))
