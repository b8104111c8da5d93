"""How does a sweep end? With one page that a person would put on a slide: winner, heat map, bars, scaling, energy, every point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.figures import Chart, Heat, Section, page, save_page, save_picture
from windlass.figures.sweep import sweep_sections

if TYPE_CHECKING:
    from windlass.launch.sweep.local import Work

Row = dict[str, Any]


def write_page(work: Work, rows: Sequence[Row], rank_by: str) -> Path:
    """report.html, and its heat map and bars as pictures where matplotlib is there."""
    sections = page_sections(work, rows, rank_by)
    title = work.sweep.title or work.sweep.name
    html = page(title, sections, subtitle=work.sweep.notes, footer=f"windlass sweep {work.loaded.path.name}")
    save_page(work.folder.page, html)
    _pictures(work, sections)
    return work.folder.page


def _pictures(work: Work, sections: Sequence[Section]) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    for section in sections:
        drawn = [item for item in section.items if isinstance(item, (Chart, Heat))]
        for index, item in enumerate(drawn):
            work.folder.pictures.mkdir(exist_ok=True)
            save_picture(item, work.folder.pictures / f"{section.id}{index or ''}.png")


def page_sections(work: Work, rows: Sequence[Row], rank_by: str) -> list[Section]:
    return sweep_sections(work.sweep, rows, rank_by, {point.name for point in work.points if point.in_grid})
