"""How do sections travel to the browser? As plain JSON that the page draws with text nodes only, so no name can become markup."""

from __future__ import annotations

from typing import Any

from windlass.figures import Cards, Chart, DataTable, Heat, Html, Item, Note, Section
from windlass.figures.html import spec


def section_json(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "id": section.id,
        "items": [item_json(i) for i in section.items if not isinstance(i, Html)],
    }


def item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, DataTable):
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
        "figure": spec(item),
        "height": item.height,
        "caption": item.caption,
        "title": item.title,
    }
