"""Damage to a file, the same for every format: cut, flipped bytes, repeated and lost parts, values that cannot be right."""

from __future__ import annotations

import re

from hypothesis import strategies as st

# A value after `:` or `=`, or in a list, of JSON, TOML and YAML; and a line, or a member of an object on one line.
VALUE = re.compile(rb"(?<=[:=\[,])[ \t]*(\"(?:[^\"\\\n]|\\.)*\"|[-\w.+]+|\[[^\[\]\n]*\]|\{[^{}\n]*\})")
PART = re.compile(rb"[^\n]*\n|\"[^\"\n]*\": ?[^,{}\[\]\n]*,? ?")
HOSTILE = (
    b"-3", b"0", b"-1", b"1", b"3.5", b"-0.5", b"1e400", b"-1e400", b"1e308", b"NaN", b"nan", b"Infinity", b"-inf", b".inf",
    b"9" * 19, b"9" * 400, b"9" * 5000, b"-" + b"9" * 5000, b"0x" + b"f" * 5000, b"1970-01-01", b"null", b"true", b"~",
    b'""', b'"x"', b'"-3"', b'"\\ud800"', b'"\\u0000"', b'"../../etc/passwd"', b'"' + b"y" * 5000 + b'"', b"[]", b"{}",
    b"[null]", b"[1, [2]]", b'{"a": 1}', b"{a = 1}", b"[" * 70 + b"]" * 70, b"[" * 20_000 + b"]" * 20_000,
    b'{"a":' * 300 + b"1" + b"}" * 300, b"{a=" * 20_000 + b"1" + b"}" * 20_000, b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"",
)  # fmt: skip
OPERATIONS = ("value", "value", "value", "value", "cut", "flip", "insert", "delete part", "repeat part", "swap values")

damages = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**20), st.sampled_from(HOSTILE)), min_size=1, max_size=3
)


def apply(raw: bytes, steps: list[tuple[str, int, bytes]]) -> bytes:
    for operation, number, hostile in steps:
        values, parts = list(VALUE.finditer(raw)), list(PART.finditer(raw))
        at = number % (len(raw) + 1)
        if operation == "value" and values:
            start, end = values[number % len(values)].span(1)
            raw = raw[:start] + hostile + raw[end:]
        elif operation == "swap values" and len(values) > 1:
            one, other = sorted((number % len(values), number // 7 % len(values)))
            (a, b), (c, d) = values[one].span(1), values[other].span(1)
            raw = raw if b > c else raw[:a] + raw[c:d] + raw[b:c] + raw[a:b] + raw[d:]
        elif operation in ("delete part", "repeat part") and parts:
            start, end = parts[number % len(parts)].span()
            raw = raw[:start] + (raw[start:end] * 2 if operation == "repeat part" else b"") + raw[end:]
        elif operation == "flip" and raw:
            at %= len(raw)
            raw = raw[:at] + bytes([raw[at] ^ (1 << number % 8)]) + raw[at + 1 :]
        elif operation == "insert":
            raw = raw[:at] + hostile + raw[at:]
        else:
            raw = raw[:at]
    return raw
