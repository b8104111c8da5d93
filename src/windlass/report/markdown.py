"""Sections as Markdown; what came from a run is shown as text, never as markup."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.figures import Cards, Chart, DataTable, Heat, Item, Note, Section

_SPECIAL = str.maketrans({
    "\\": "\\\\", "*": "\\*", "|": "\\|", "<": "&lt;", ">": "&gt;", "\n": " ", "\r": " ", "`": "'", "[": "\\[", "]": "\\]",
})  # fmt: skip


def markdown(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    parts = [f"# {_plain(title)}", *([_plain(subtitle)] if subtitle else [])]
    for section in sections:
        if section.title:
            parts.append(f"## {_plain(section.title)}")
        parts += [text for item in section.items if (text := _item(item))]
    return "\n\n".join(parts) + "\n"


def _item(item: Item) -> str:
    if isinstance(item, DataTable):
        head = [
            [_plain(c) or " " for c in item.columns],
            ["---:" if i in item.right else "---" for i in range(len(item.columns))],
        ]
        rows = [[_plain(cell) for cell in row] for row in item.texts()]
        caption = f"\n\n{_plain(item.caption)}" if item.caption else ""
        return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *rows)) + caption
    if isinstance(item, Cards):
        return "\n".join(
            f"- **{_plain(c.label)}**: {_plain(c.value)}" + (f" ({_plain(c.note)})" if c.note else "")
            for c in item.cards
        )
    if isinstance(item, Note):
        return ("> " if item.kind == "warning" else "") + _plain(item.text)
    if isinstance(item, (Chart, Heat)):
        return f"*Figure: {_plain(item.title)} (in the HTML form)*"
    return ""  # HTML has no place in Markdown


def _plain(text: str) -> str:
    return text.translate(_SPECIAL).strip()
