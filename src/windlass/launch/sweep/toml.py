"""How does a recipe go back into a file? Nested tables as TOML text that our own loader reads to the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def to_toml(raw: Mapping[str, Any], comment: str = "") -> str:
    """Plain values first, then one `[table]` after the other; None is left out."""
    head = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*head, *_lines(raw, "")]).rstrip() + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    plain = {k: v for k, v in table.items() if not _is_table(v) and v is not None}
    if prefix and (plain or not table):
        yield f"\n[{prefix}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {value_text(value)}"
    for key, value in table.items():
        if _is_table(value):
            yield from _lines(value, f"{prefix}.{_key(key)}" if prefix else _key(key))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {value_text(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(v) for v in value) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    # JSON's escapes of a text are TOML's too, apart from surrogate pairs, which ensure_ascii=False avoids.
    return json.dumps(str(value), ensure_ascii=False)
