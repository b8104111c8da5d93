"""How do sections travel to the browser? As plain JSON that the page draws with text nodes only, so no name can become markup."""

from __future__ import annotations

from html import escape
from typing import Any

from windlass.figures import Cards, Chart, Heat, Html, Item, Note, Section, Table
from windlass.figures.interactive import spec


def section_json(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "id": section.id,
        "items": [item_json(i) for i in section.items if not isinstance(i, Html)],
    }


def item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, Table):
        rows = [["" if c is None else str(c) for c in row] for row in item.rows]
        return {
            "kind": "table",
            "columns": list(item.columns),
            "rows": rows,
            "right": list(item.right),
            "strong": list(item.strong),
            "caption": item.caption,
        }
    if isinstance(item, Cards):
        return {"kind": "cards", "cards": [{"value": c.value, "label": c.label, "note": c.note} for c in item.cards]}
    if isinstance(item, Note):
        return {"kind": "note", "text": item.text, "warning": item.kind == "warning"}
    assert isinstance(item, (Chart, Heat))
    return {
        "kind": "figure",
        "figure": plain(spec(item)),
        "height": item.height,
        "caption": item.caption,
        "title": item.title,
    }


# Plotly reads <b> and <a href> in the texts it draws: names from files are escaped for it.
_TEXTS = {"name", "text", "hovertext", "title", "x", "y"}


def plain(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: plain(v, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, key) for v in value]
    return escape(value, quote=False) if isinstance(value, str) and key in _TEXTS else value
