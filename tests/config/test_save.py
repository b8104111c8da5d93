"""The `[save]` table: which intervals and metrics there are, and what is said of others."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from windlass.config.save import SaveConfig, parse_interval


@pytest.mark.parametrize(
    ("value", "meaning"),
    [(500, ("steps", 500.0)), ("12", ("steps", 12.0)), ("2k steps", ("steps", 2000.0)), ("2B tokens", ("tokens", 2e9)), (" 30m ", ("seconds", 1800.0))],
)  # fmt: skip
def test_intervals(value, meaning) -> None:
    assert parse_interval(SaveConfig(every=value).every) == meaning


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("every", 0, "must be more than 0"),
        ("every", "0 tokens", "must be more than 0"),
        ("every", "0s", "must be more than 0"),
        ("every", 0.5, "0.5 is not an interval; write steps (500)"),
        ("every", True, "True is not an interval"),
        ("every", "often", "'often' is not a duration"),
        ("keep_every", "30m", "'30m' is a time; write steps (1000) or tokens"),
        ("keep_every", "auto", "write steps (1000) or tokens"),
        ("keep_every", "-4 tokens", "is negative"),
        ("lead", -5, "a duration of -5 s is not possible"),
        ("lead", "soon", "'soon' is not a duration"),
        ("metric", "val_los", "'val_los'"),
    ],
)
def test_what_cannot_be_is_one_problem_in_words(key, value, words) -> None:
    with pytest.raises(ValidationError) as caught:
        SaveConfig(**{key: value})
    [problem] = caught.value.errors()
    assert problem["loc"] == (key,) and words in problem["msg"]


def test_what_can_be() -> None:
    made = SaveConfig(every="auto", lead="auto", keep_every="50B tokens", metric="val_loss/dutch")
    assert (made.every, made.lead, made.metric) == ("auto", "auto", "val_loss/dutch")
    assert SaveConfig(lead="2m").lead == 120.0
