"""Nested tables as the text of a TOML file."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def to_toml(raw: Mapping[str, Any], comment: str = "") -> str:
    """Nested tables as text that our own loader reads back: plain values first, then one `[table]` after the other.

    None is left out.
    """
    head = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*head, *_lines(raw, "")]).rstrip() + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    if prefix and (plain or not table):
        yield f"\n[{prefix}]"
    yield from (f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}.{_key(key)}" if prefix else _key(key))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    # JSON's escapes are TOML's too, apart from surrogate pairs, which ensure_ascii=False avoids.
    return json.dumps(value if isinstance(value, bool) else str(value), ensure_ascii=False)
