"""Cells of a table of runs: numbers with separators and suffixes, yes and no, and blanks in their usual spellings.

A cell that cannot be read with certainty ("8-16", "3.7" layers) is None: a missing number is reported, a wrong one would not be noticed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

Row = Mapping[str, str]

YES, NO = ("y", "yes", "true", "1", "1.0", "on"), ("n", "no", "none", "false", "0", "0.0", "off", "-")
BLANK = (
    "", "nan", "n/a", "na", "n.a.", "#n/a", "\\n", "null", "?", "--", "\u2013", "\u2014", "unknown", "unk", "auto", "tbd", "not stated",
    "not reported", "not given",
)  # fmt: skip
"""Ways to leave a cell empty."""

_DIGITS = r"[-+]?(?:\d+(?:[.,'_\u00a0\u202f ]\d+)*)"
_NUMBER = re.compile(rf"[~\u2248]?\s*({_DIGITS})(e[-+]?\d+)?\s*(.*)", re.I | re.S)
_CONTINUES = re.compile(r"(?:[-\u2013/:*\u00d7]|x(?![a-z]))\s*\d|\.\.")
"""A range, a quotient or a product: not one number."""
_SUFFIX = re.compile(r"(k|m|b|g|t)(i)?(?![a-z0-9])", re.I)
_SCALE = {"k": 1, "m": 2, "b": 3, "g": 3, "t": 4}
_BYTES = re.compile(r"(k|m|g|t)(i)?b(?:ytes)?(?![a-z])", re.I)


def text_of(row: Row, key: str) -> str:
    """The cell without surrounding spaces; "" if it is blank in any of the usual spellings."""
    text = (row.get(key) or "").strip()
    return "" if text.lower() in BLANK else text


def lower_text(row: Row, key: str) -> str:
    return text_of(row, key).lower()


def flag(row: Row, key: str) -> bool | None:
    """Yes or no; None: blank or something else."""
    text = lower_text(row, key)
    return True if text in YES else False if text in NO else None


def number(row: Row, key: str, *, kilo: int = 1000) -> float | None:
    """The value of a column: "1 (5)" is 1, "8k" 8,000 (or 8 x `kilo`), "4Mi" 4 x 2^20. None when blank or not one number."""
    parsed = _parts(text_of(row, key))
    if parsed is None:
        return None
    value, suffix_text = parsed
    suffix = _SUFFIX.match(suffix_text)
    if suffix is None:
        return value
    return value * float(1024 if suffix.group(2) else kilo) ** _SCALE[suffix.group(1).lower()]


def positive(row: Row, key: str, *, kilo: int = 1000) -> int | None:
    """A count; None if blank, not an integer ("3.7" layers), less than one or more than 10^15."""
    value = number(row, key, kilo=kilo)
    return round(value) if value is not None and 0.99 <= value <= 1e15 and abs(value - round(value)) <= 0.01 else None


def product(row: Row, key: str) -> int | None:
    """A count that may be written as nodes times devices ("16x8")."""
    match = re.fullmatch(r"(\d+)\s*(?:x|\*|\u00d7)\s*(\d+)", lower_text(row, key))
    return positive(row, key) if match is None else int(match.group(1)) * int(match.group(2)) or None


def gibibytes(row: Row, key: str) -> float | None:
    """A size in GiB; a unit in the cell ("52.3 GB", "53,555 MiB") overrides that of the column. None: also a share."""
    parsed = _parts(text_of(row, key))
    if parsed is None or parsed[0] <= 0 or parsed[1].startswith("%"):
        return None
    value, suffix_text = parsed
    unit = _BYTES.match(suffix_text)
    if unit is None:
        return value
    return float(value * (1024.0 if unit.group(2) else 1000.0) ** _SCALE[unit.group(1).lower()] / 2**30)


@lru_cache(maxsize=65536)
def _parts(text: str) -> tuple[float, str] | None:
    """The number at the start and the text after it. Cached because a table repeats the same few cells in every row."""
    match = _NUMBER.match(text)
    if match is None or _CONTINUES.match(match.group(3)):
        return None
    digits = _without_separators(match.group(1))
    value = math.inf if digits is None else float(digits + (match.group(2) or ""))
    return (value, match.group(3)) if math.isfinite(value) else None


def _without_separators(digits: str) -> str | None:
    """Digits without thousands separators and with a decimal point; None if the separators are neither."""
    joined = re.sub(r"(?<=\d)['_\u00a0\u202f ](?=\d{3}(?!\d))", "", digits)
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", joined):
        return joined.replace(",", "")
    if re.fullmatch(r"[-+]?\d{1,3}((\.\d{3}){2,}|(\.\d{3})+,\d+)(,\d+)?", joined):
        return joined.replace(".", "").replace(",", ".")
    return joined.replace(",", ".") if re.fullmatch(r"[-+]?\d+([.,]\d+)?", joined) else None
