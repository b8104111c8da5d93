"""Sections as JSON for the browser, which draws them with text nodes only, so that no name can become markup."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from windlass.figures import Cards, Chart, DataTable, Heat, Html, Item, Note, Section
from windlass.figures.html import spec


def section_json(section: Section) -> dict[str, Any]:
    items = [_item(item) for item in section.items if not isinstance(item, Html)]
    return {"title": section.title, "id": section.id, "items": items}


def _item(item: Item) -> dict[str, Any]:
    if isinstance(item, DataTable):
        lists = {"columns": list(item.columns), "right": list(item.right), "strong": list(item.strong)}
        return {"kind": "table", "rows": item.texts(), "caption": item.caption, **lists}
    if isinstance(item, Cards):
        return {"kind": "cards", "cards": [asdict(card) for card in item.cards]}
    if isinstance(item, Note):
        return {"kind": "note", "text": item.text, "warning": item.kind == "warning"}
    assert isinstance(item, (Chart, Heat))
    texts = {"height": item.height, "caption": item.caption, "title": item.title}
    return {"kind": "figure", "figure": spec(item), **texts}
