"""One place parses and prints what people write for sizes, tokens, times and energies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import ConfigError
from windlass.units import (
    parse_bytes,
    parse_joules,
    parse_seconds,
    parse_tokens,
    print_bytes,
    print_figure,
    print_joules,
    print_kwh,
    print_seconds,
    print_slurm_time,
    print_text,
    print_tokens,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("450B", 450_000_000_000), ("4Mi", 4_194_304), ("1.5T", 1_500_000_000_000), ("2k", 2000), ("1_000", 1000), ("1,024", 1024), (512, 512), ("0.5M", 500_000)],
)  # fmt: skip
def test_tokens(text, value):
    assert parse_tokens(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("94 GiB", 94 * 2**30),
        ("64 GB", 64 * 10**9),
        ("494000 MB", 494_000_000_000),
        ("512", 512),
        ("1.5 KiB", 1536),
        ("8B", 8),
    ],
)
def test_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("30m", 1800), ("24h", 86400), ("2d", 172800), ("2-00:00:00", 172800), ("1:30:00", 5400), ("90", 90), ("15:30", 930), ("1-12:00", 129600), (0.5, 0.5)],
)  # fmt: skip
def test_seconds(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("14.2 MWh", 14.2 * 3.6e9), ("250 J", 250), ("1 kWh", 3.6e6), ("2 kJ", 2000)]
)
def test_joules(text, value):
    assert parse_joules(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_tokens, "450Q", "unknown unit 'Q'"),
        (parse_tokens, "-5B", "negative"),
        (parse_tokens, "1.5", "whole number"),
        (parse_tokens, "many", "is not a token count"),
        (parse_tokens, float("inf"), "finite"),
        (parse_bytes, "94 GiBB", "unknown unit 'GiBB'"),
        (parse_seconds, "30 parsecs", "unknown unit 'parsecs'"),
        (parse_seconds, -1.0, "not possible"),
        (parse_joules, "3 kWx", "unknown unit 'kWx'"),
        (parse_joules, -3.0, "not possible"),
    ],
)
def test_a_typo_is_answered_with_a_hint(parse, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse(text)
    assert caught.value.hint is not None or "finite" in said or "whole" in said


def test_the_nearest_unit_is_offered():
    with pytest.raises(ConfigError) as caught:
        parse_bytes("94 GIB")
    assert "GiB" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (print_tokens(450_000_000_000), "450B"),
        (print_tokens(4_194_304), "4.19M"),
        (print_tokens(999), "999"),
        (print_tokens(None), "unknown"),
        (print_bytes(94 * 2**30), "94 GiB"),
        (print_bytes(1023), "1023 B"),
        (print_bytes(None), "not measured"),
        (print_seconds(0.0032), "3.2 ms"),
        (print_seconds(252), "4 min 12 s"),
        (print_seconds(59.99), "1 min"),
        (print_seconds(18180), "5 h 3 min"),
        (print_seconds(34 * 86400), "34 days"),
        (print_seconds(3599.7), "1 h"),
        (print_seconds(13_125.6 * 86400), "13,125.6 days"),
        (print_joules(0.0071299), "7.13 mJ"),
        (print_joules(0.0), "0 J"),
        (print_joules(250), "250 J"),
        (print_joules(2042.96), "0.567 Wh"),
        (print_joules(3599.9), "1 Wh"),
        (print_joules(14.2 * 3.6e9), "14.2 MWh"),
        (print_joules(None), "not measured"),
        (print_kwh(33_117), "33.12 MWh"),
        (print_kwh(0.000112), "0.112 Wh"),
        (print_kwh(None), "unknown"),
        (print_figure(1043.7), "1,044"),
        (print_figure(999.96), "1,000"),
        (print_figure(14.23), "14.2"),
        (print_figure(412_345.6, 4), "412,346"),
        (print_slurm_time(86399), "1-00:00:00"),
        (print_slurm_time(5400), "0-01:30:00"),
    ],
)
def test_printing(text, shown):
    assert text == shown


@given(st.integers(min_value=0, max_value=10**15))
def test_whole_numbers_survive(value):
    assert parse_tokens(str(value)) == value == parse_tokens(value)


@given(st.integers(min_value=0, max_value=10**7))
def test_slurm_times_read_back_and_never_shorten(seconds):
    back = parse_seconds(print_slurm_time(seconds))
    assert seconds <= back < seconds + 60


def test_texts_from_files_cannot_steer_a_terminal():
    assert print_text("a\x1b[2Jb\x07\x9bc\u202ed\ne\tf") == "a\ufffd[2Jb\ufffd\ufffdc\ufffdd e f"
    assert print_text("a\nb\x00", lines=True) == "a\nb\ufffd"
    assert print_text("Käse 東京 👩‍🔬") == "Käse 東京 👩‍🔬"
