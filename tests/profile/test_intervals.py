"""Interval arithmetic against values worked by hand and against counting microseconds one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from windlass.profile.intervals import NO_SPANS, Spans, gaps, intersect, running_sum, subtract, union

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), max_size=12)


def spans(*edges: tuple[float, float]) -> Spans:
    array = np.array(edges, dtype=np.float64).reshape(-1, 2)
    return union(array[:, 0], array[:, 1])


def cells(result: Spans) -> set[int]:
    return {t for a, b in zip(result.start, result.end, strict=True) for t in range(int(a), int(b))}


def spans_of(drawn: list[tuple[int, int]]) -> Spans:
    return spans(*((a, a + n) for a, n in drawn))


def test_a_union_joins_touching_and_nested_spans():
    result = spans((10, 20), (0, 5), (5, 7), (12, 15), (30, 30))
    assert list(zip(result.start, result.end, strict=True)) == [(0, 7), (10, 20)]


def test_within_counts_what_a_window_covers():
    result = spans((0, 7), (10, 20))
    assert result.within(np.array([5.0, 7.0, 0.0, 25.0]), np.array([12.0, 10.0, 30.0, 30.0])).tolist() == [4, 0, 17, 0]
    assert NO_SPANS.within(np.array([0.0]), np.array([9.0])).tolist() == [0]


def test_gaps_are_what_is_left_between_the_edges():
    result = gaps(spans((3, 5), (8, 20)), 0, 10)
    assert list(zip(result.start, result.end, strict=True)) == [(0, 3), (5, 8)]


def test_levels_add_up_running_values():
    start, end, total = running_sum(np.array([0.0, 5.0]), np.array([10.0, 15.0]), np.array([0.4, 0.8]))
    assert list(zip(start, end, strict=True)) == [(0, 5), (5, 10), (10, 15)]
    assert np.allclose(total, [0.4, 1.2, 0.8])


@given(pairs, pairs)
def test_set_operations_agree_with_counting(a, b):
    left, right = spans_of(a), spans_of(b)
    assert cells(left) == {t for s, n in a for t in range(s, s + n)}
    assert cells(intersect(left, right)) == cells(left) & cells(right)
    assert cells(subtract(left, right)) == cells(left) - cells(right)


@given(pairs, st.integers(0, 40), st.integers(0, 40))
def test_a_window_agrees_with_counting(a, start, length):
    result = spans_of(a)
    window = set(range(start, start + length))
    assert result.within(np.array([float(start)]), np.array([float(start + length)]))[0] == len(cells(result) & window)
