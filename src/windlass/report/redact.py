"""Removal of secrets and local paths from reports and pages.

A value is hidden by the name it stands under or by its form. A report is published, so it names no path of the site.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from windlass.config.launch import looks_secret
from windlass.figures import Card, Cards, DataTable, Html, Note, Section

HIDDEN = "(hidden)"
_OURS = {"tokens", "keys"}
_FORM = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[baprs]-[A-Za-z0-9-]{10,}"
    r"|wandb_v1_[A-Za-z0-9_]{20,}|eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
)
_PAIR = re.compile(
    r"(?i)\b([A-Z0-9_]*(?:API_?KEY|SECRET|PASSWORD|PASSWD|ACCESS_?KEY|_TOKEN)[A-Z0-9_]*)"
    r"(\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|\S+)"
)


def redact(value: Any, name: str = "") -> Any:
    """The same value with secrets replaced; numbers and lists of numbers pass untouched."""
    if isinstance(value, dict):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact(inner, name) for inner in value) if not hasattr(value, "_fields") else value
    if isinstance(value, str):
        return HIDDEN if value and name.lower() not in _OURS and looks_secret(name) else redact_text(value)
    return value


def redact_text(text: str) -> str:
    """Secrets inside a text: `WANDB_API_KEY=abc` and well-known key forms."""
    return _FORM.sub(HIDDEN, _PAIR.sub(lambda m: f"{m[1]}{m[2]}{HIDDEN}", text))


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
