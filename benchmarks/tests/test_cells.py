import pytest
from benchmarks.published.cells import flag, gibibytes, number, positive, product, text_of


@pytest.mark.parametrize(
    ("text", "value"),
    [("1 (5)", 1), ("64.0", 64), ("1,024", 1024), ("1,234,567.5", 1234567.5), ("7,5", 7.5), ("1.234,5", 1234.5), ("1.234.567", 1234567), ("1 234", 1234),
     ("12'345", 12345), ("1e6", 1e6), ("~8", 8), ("-1", -1), ("8192 tokens", 8192), ("8k", 8000), ("4M tokens", 4e6), ("4Mi", 2**22), ("12.5k tok/s", 12500),
     ("5 %", 5), ("8xH100", 8)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, value):
    assert number({"a": text}, "a") == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "nan",
        "inf",
        "N/A",
        "?",
        "8-16",
        "8\u201316",
        "2x8",
        "1/2",
        "1..2",
        "<8",
        "1,2,3",
        "1 2",
        "1e400",
        "unknown",
    ],
)
def test_what_is_not_one_number_is_none(text):
    assert number({"a": text}, "a") is None and number({}, "a") is None


def test_counts_are_positive_integers():
    row = {"a": "3.7", "b": "64.0", "c": "0", "d": "-2", "e": "8k", "f": "16x8", "g": "16"}
    assert [positive(row, k) for k in "abcd"] == [None, 64, None, None]
    assert positive(row, "e", kilo=1024) == 8192
    assert [product(row, k) for k in "afg"] == [None, 128, 16]


def test_sizes_have_units():
    row = {"a": "64 GB", "b": "53,555 MiB", "c": "60", "d": "-1", "e": "OOM", "f": "0.05 TiB"}
    assert [gibibytes(row, k) for k in "abcdef"] == [
        pytest.approx(59.6046, abs=1e-4),
        53555 / 1024,
        60,
        None,
        None,
        pytest.approx(51.2),
    ]


def test_blanks_and_flags():
    assert text_of({"a": " NaN "}, "a") == "" and text_of({"a": "none"}, "a") == "none"
    assert [flag({"a": t}, "a") for t in ("Y", "0.0", "maybe", "")] == [True, False, None, None]
