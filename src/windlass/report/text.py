"""How does a report read without a browser? The same sections as Markdown; what came from a run is shown as text, never as markup."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.figures import Cards, Chart, DataTable, Heat, Html, Item, Note, Section

_SPECIAL = str.maketrans(
    {
        "\\": "\\\\",
        "*": "\\*",
        "|": "\\|",
        "<": "&lt;",
        ">": "&gt;",
        "\n": " ",
        "\r": " ",
        "`": "'",
        "[": "\\[",
        "]": "\\]",
    }
)


def markdown(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    parts = [f"# {_plain(title)}", *([_plain(subtitle)] if subtitle else [])]
    for section in sections:
        if section.title:
            parts.append(f"## {_plain(section.title)}")
        parts += [text for item in section.items if (text := _item(item))]
    return "\n\n".join(parts) + "\n"


def _item(item: Item) -> str:
    if isinstance(item, DataTable):
        return _table(item)
    if isinstance(item, Cards):
        return "\n".join(
            f"- **{_plain(c.label)}**: {_plain(c.value)}" + (f" ({_plain(c.note)})" if c.note else "")
            for c in item.cards
        )
    if isinstance(item, Note):
        return ("> " if item.kind == "warning" else "") + _plain(item.text)
    if isinstance(item, (Chart, Heat)):
        return f"*Figure: {_plain(item.title)} (in the HTML form)*"
    assert isinstance(item, Html)
    return ""


def _table(table: DataTable) -> str:
    head = "| " + " | ".join(_plain(c) or " " for c in table.columns) + " |"
    rule = "|" + "|".join("---:" if i in table.right else "---" for i in range(len(table.columns))) + "|"
    rows = ["| " + " | ".join(_plain("" if cell is None else str(cell)) for cell in row) + " |" for row in table.rows]
    caption = f"\n\n{_plain(table.caption)}" if table.caption else ""
    return "\n".join([head, rule, *rows]) + caption


def _plain(text: str) -> str:
    return text.translate(_SPECIAL).strip()
