"""The save interval, worked by hand."""

from __future__ import annotations

import math

import pytest

from windlass.config.save import SaveConfig
from windlass.train.interval import Interval, choose


def test_between_three_and_five_start_ups_without_failures() -> None:
    found = choose(60, 0.3, 5, failures_per_day=0)
    assert found.seconds == 300
    assert "start-up took 1 min, so 3 min to 5 min" in found.reason


def test_the_optimum_bounds_it() -> None:
    # Young and Daly: sqrt(2 x 0.5 s x 86400 s / 0.5) = 415.7 s, shorter than 5 x 600 s.
    found = choose(600, 0.5, 20, failures_per_day=0.5)
    assert found.seconds == pytest.approx(math.sqrt(2 * 0.5 * 172800)) == pytest.approx(415.69, abs=0.01)
    assert "0.5 failures a day is 6 min 56 s" in found.reason


def test_saving_takes_at_most_two_per_cent_of_the_time() -> None:
    found = choose(10, 5.0, 8, failures_per_day=100)
    assert found.seconds == 250 and "at most 2%" in found.reason


def test_an_interval_leaves_time_to_write() -> None:
    found = choose(10, 0.01, 120, failures_per_day=0)
    assert found.seconds == 240 and "twice the 2 min that writing takes" in found.reason


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_counted_in_multiples_whatever_the_start() -> None:
    interval = Interval(SaveConfig(every=10))
    interval.began(7, 0)
    assert [s for s in range(8, 31) if interval.due_by_count(s, 0) and not interval.saved(s, 0)] == [10, 20, 30]
    assert not interval.due_by_clock(99)


def test_tokens() -> None:
    interval = Interval(SaveConfig(every="1k tokens"))
    assert [s for s in range(1, 10) if interval.due_by_count(s, s * 300) and not interval.saved(s, s * 300)] == [4, 7]


def test_minutes_by_a_clock_that_cannot_jump() -> None:
    clock = Clock()
    interval = Interval(SaveConfig(every="2m"), clock=clock)
    clock.now += 119
    assert not interval.due_by_clock(5)
    clock.now += 1
    assert interval.due_by_clock(5) and not interval.due_by_count(5, 5)
    interval.saved(5, 5)
    assert not interval.due_by_clock(6)


def test_auto_waits_for_measurements_and_speaks_only_when_it_changes() -> None:
    clock = Clock()
    interval = Interval(SaveConfig(every="auto", failures_per_day=0), clock=clock)
    clock.now += 1e6
    assert not interval.due_by_clock(9)  # start-up not measured yet
    assert interval.measured(startup_seconds=20).seconds == 100
    assert interval.due_by_clock(9)
    assert interval.measured(stall_seconds=0.1, write_seconds=1) is None
    assert interval.measured(stall_seconds=0.1, write_seconds=90).seconds == 180  # of two the higher
    assert interval.measured(stall_seconds=0.1, write_seconds=1).seconds == 100  # one slow save was an exception


def test_a_given_interval_is_not_changed_by_measurements() -> None:
    assert Interval(SaveConfig(every=5)).measured(startup_seconds=20) is None
