"""The published laws, by hand."""

import pytest

from windlass.planner.laws import BESIROGLU, HOFFMANN, effective_tokens, expected_loss


def test_chinchilla_itself():
    # 70B on 1.4T: 1.69 + 406.4 / 70e9^0.34 + 410.7 / 1.4e12^0.28 = 1.69 + 0.0833 + 0.1632
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.936, abs=0.002)


def test_the_corrected_fit_recommends_about_twenty_tokens_per_parameter():
    flops = 5.76e23  # Gopher's budget
    size = BESIROGLU.best_parameters(flops)
    assert 15 < flops / 6 / size / size < 30
    for other in (0.5 * size, 2 * size):
        assert BESIROGLU.loss(other, flops / 6 / other) > BESIROGLU.loss(size, flops / 6 / size)


def test_range_spans_both_laws_and_says_when_it_extrapolates():
    inside = expected_loss(7e9, 300e9)
    assert not inside.extrapolated
    assert inside.low < min(inside.by_law.values()) < max(inside.by_law.values()) < inside.high
    assert expected_loss(70e9, 300e9).extrapolated and expected_loss(7e9, 15e12).extrapolated


def test_repeated_data_is_worth_less():
    assert effective_tokens(450e9, 450e9) == 450e9
    assert effective_tokens(100e9, None) == 100e9
    four = effective_tokens(4 * 450e9, 450e9)
    assert 0.9 < four / (4 * 450e9) < 1.0  # up to four passes are almost as good as new
    assert effective_tokens(100 * 450e9, 450e9) < 17 * 450e9
