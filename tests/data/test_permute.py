"""The computed order is a permutation and looks random."""

from __future__ import annotations

import numpy as np
import pytest

from windlass.data.mix import key_of, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 65_537])
def test_every_position_is_hit_once(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key_of(1, size))), np.arange(size))


def test_keys_give_different_orders_and_the_same_key_the_same() -> None:
    a, b = permute(np.arange(1000), 1000, 1), permute(np.arange(1000), 1000, 2)
    assert not np.array_equal(a, b)
    assert np.array_equal(a, permute(np.arange(1000), 1000, 1))


def test_a_position_is_the_same_alone_and_among_others() -> None:
    order = permute(np.arange(10_000), 10_000, 7)
    assert permute([1234], 10_000, 7)[0] == order[1234]


def test_the_order_is_fixed_for_ever() -> None:
    # A changed value here means that every run resumed after an upgrade sees other data than it should.
    assert permute(np.arange(8), 8, 42).tolist() == [7, 3, 0, 1, 2, 4, 5, 6]
    assert permute(np.arange(3), 10**12, 7).tolist() == [968204017335, 110605323961, 434981190666]


def test_neighbours_are_scattered() -> None:
    size = 100_000
    steps = np.abs(np.diff(permute(np.arange(size), size, 3)))
    assert abs(steps.mean() - size / 3) < size / 50  # the mean distance of two random positions is a third of the size


def test_trillions_cost_no_memory() -> None:
    size = 5 * 10**12
    places = permute(np.arange(10_000), size, 9)
    assert len(np.unique(places)) == 10_000
    assert places.min() >= 0
    assert places.max() < size
    assert places.max() > size * 0.99
