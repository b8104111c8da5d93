"""What does a cell of a table of runs say? Numbers with separators and suffixes, yes and no, blanks: in the ways that people write them.

What cannot be read with certainty ("8-16", "3.7" layers) is None: a missing number is reported, a wrong one is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

Row = Mapping[str, str]

YES, NO = ("y", "yes", "true", "1", "1.0", "on"), ("n", "no", "none", "false", "0", "0.0", "off", "-")
BLANK = ("", "nan", "n/a", "na", "#n/a", "null", "?", "--", "unknown", "unk", "not stated", "tbd")
"""Ways to leave a cell empty."""

_DIGITS = r"[-+]?(?:\d+(?:[.,'_\u00a0\u202f ]\d+)*)"
_NUMBER = re.compile(rf"[~\u2248]?\s*({_DIGITS})(e[-+]?\d+)?\s*(.*)", re.I | re.S)
_GOES_ON = re.compile(r"(?:[-\u2013/:*\u00d7]|x(?![a-z]))\s*\d|\.\.")
"""A range, a quotient or a product: not one number."""
_SUFFIX = re.compile(r"(k|m|b|g|t)(i)?(?![a-z0-9])", re.I)
_SCALE = {"k": 1, "m": 2, "b": 3, "g": 3, "t": 4}
_BYTES = re.compile(r"(k|m|g|t)(i)?b(?:ytes)?(?![a-z])", re.I)


def text_of(row: Row, key: str) -> str:
    """What a cell says; "" where it is blank in one of the ways that tables know."""
    text = (row.get(key) or "").strip()
    return "" if text.lower() in BLANK else text


def word(row: Row, key: str) -> str:
    return text_of(row, key).lower()


def flag(row: Row, key: str) -> bool | None:
    """Yes or no in the ways that tables write it; None: blank or something else."""
    text = word(row, key)
    return True if text in YES else False if text in NO else None


def number(row: Row, key: str, *, kilo: int = 1000) -> float | None:
    """The value of a column: "1 (5)" is 1, "8k" 8,000 (or 8 x `kilo`), "4Mi" 4 x 2^20. None when blank or not one number."""
    read = _parts(text_of(row, key))
    if read is None:
        return None
    value, rest = read
    suffix = _SUFFIX.match(rest)
    if suffix is None:
        return value
    return value * float(1024 if suffix.group(2) else kilo) ** _SCALE[suffix.group(1).lower()]


def whole(row: Row, key: str, *, kilo: int = 1000) -> int | None:
    """A count; None also of what is not whole ("3.7" layers)."""
    value = number(row, key, kilo=kilo)
    return None if value is None or abs(value - round(value)) > 0.01 else round(value)


def positive(row: Row, key: str, *, kilo: int = 1000) -> int | None:
    """A count: None when blank, not a number, or less than one."""
    value = whole(row, key, kilo=kilo)
    return value if value is not None and value >= 1 else None


def product(row: Row, key: str) -> int | None:
    """A count that may be written as nodes times devices ("16x8")."""
    found = re.fullmatch(r"(\d+)\s*(?:x|\*|\u00d7)\s*(\d+)", word(row, key))
    return positive(row, key) if found is None else int(found.group(1)) * int(found.group(2)) or None


def gibibytes(row: Row, key: str) -> float | None:
    """A size in GiB; a unit in the cell ("52.3 GB", "53,555 MiB") stands above that of the column."""
    read = _parts(text_of(row, key))
    if read is None or read[0] <= 0:
        return None
    value, rest = read
    unit = _BYTES.match(rest)
    if unit is None:
        return value
    return float(value * (1024.0 if unit.group(2) else 1000.0) ** _SCALE[unit.group(1).lower()] / 2**30)


@lru_cache(maxsize=65536)
def _parts(text: str) -> tuple[float, str] | None:
    """The number at the start, and what follows it. Remembered: a table says the same few things in every row."""
    found = _NUMBER.match(text)
    if found is None or _GOES_ON.match(found.group(3)):
        return None
    digits = _plain(found.group(1))
    value = math.inf if digits is None else float(digits + (found.group(2) or ""))
    return (value, found.group(3)) if math.isfinite(value) else None


def _plain(digits: str) -> str | None:
    """Without separators: thousands in groups of three; the last other one is the decimal sign. None: neither."""
    joined = re.sub(r"(?<=\d)['_\u00a0\u202f ](?=\d{3}(?!\d))", "", digits)
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", joined):
        return joined.replace(",", "")
    if re.fullmatch(r"[-+]?\d{1,3}((\.\d{3}){2,}|(\.\d{3})+,\d+)(,\d+)?", joined):
        return joined.replace(".", "").replace(",", ".")
    return joined.replace(",", ".") if re.fullmatch(r"[-+]?\d+([.,]\d+)?", joined) else None
