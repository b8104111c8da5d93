"""Removal of secrets and local paths from reports and pages.

A value is hidden by the name it stands under or by its form. A report is published, so it names no path of the site.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from windlass.config.secret import HIDDEN, looks_secret, redact_text
from windlass.figures import Card, Cards, DataTable, Html, Note, Section

_OURS = {"tokens", "keys"}


def redact(value: Any, name: str = "") -> Any:
    """The same value with secrets replaced; numbers and lists of numbers pass untouched."""
    if isinstance(value, dict):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact(inner, name) for inner in value) if not hasattr(value, "_fields") else value
    if isinstance(value, str):
        return HIDDEN if value and name.lower() not in _OURS and looks_secret(name) else redact_text(value)
    return value


# Two names or more from the root; not within an address (https://...), and not what is the same on every machine.
_PATH = re.compile(r"(?<![\w:/.~$}])/(?!(?:sys|proc|dev|usr|etc)/)(?:[\w.@%+=,-]+/)+([\w.@%+=,-]*)")


def without_paths(text: str) -> str:
    """`no file /home/ann/runs/a/x.json` -> `no file .../x.json`."""
    return _PATH.sub(lambda m: f".../{m[1] or m[0].rstrip('/').rsplit('/', 1)[-1]}", text)


def publishable(sections: Sequence[Section]) -> list[Section]:
    """The same sections without the paths of this machine; charts have none."""
    return [_strip_paths(section) for section in sections]


def _strip_paths(value: Any) -> Any:
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, (list, tuple)):
        return tuple(_strip_paths(inner) for inner in value)
    if isinstance(value, (Section, DataTable, Note, Html, Cards, Card)):
        return replace(value, **{f.name: _strip_paths(getattr(value, f.name)) for f in fields(value)})
    return value
