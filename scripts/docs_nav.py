"""A hook of mkdocs: pages that the navigation does not list are added to the section of their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECTIONS = {
    "guides": "Guides", "concepts": "Concepts", "clusters": "Clusters", "reference": "Reference", "decisions": "Decisions",
}  # fmt: skip


def on_config(config: Any) -> Any:
    docs = Path(config["docs_dir"])
    config["nav"] = complete(config["nav"], sorted(p.relative_to(docs).as_posix() for p in docs.glob("*/*.md")))
    return config


def complete(nav: list[dict[str, Any]], pages: list[str]) -> list[dict[str, Any]]:
    """The navigation with every page of the folders in SECTIONS."""
    named = set(_paths(nav))
    sections = [dict(entry) for entry in nav]
    for folder, title in SECTIONS.items():
        missing = [p for p in pages if p.startswith(f"{folder}/") and p not in named]
        section = next((entry for entry in sections if title in entry), None)
        if section is not None:
            section[title] = [*section[title], *missing]
        elif missing:
            sections.append({title: missing})
    return sections


def _paths(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return [path for part in inner for path in _paths(part)]
