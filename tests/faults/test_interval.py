"""The save interval, worked by hand."""

from __future__ import annotations

import math

import pytest

from windlass.config.save import SaveConfig
from windlass.train.interval import SaveTimer, choose_interval


def test_five_start_ups_without_failures() -> None:
    choice = choose_interval(60, 0.3, 5, failures_per_day=0)
    assert choice.seconds == 300
    assert "5 min" in choice.reason and "1 min" in choice.reason


def test_the_optimum_bounds_it() -> None:
    # Young and Daly: sqrt(2 x 0.5 s x 86400 s / 0.5) = 415.7 s, shorter than 5 x 600 s.
    choice = choose_interval(600, 0.5, 20, failures_per_day=0.5)
    assert choice.seconds == pytest.approx(math.sqrt(2 * 0.5 * 172800)) == pytest.approx(415.69, abs=0.01)
    assert "6 min 56 s" in choice.reason


def test_saving_takes_at_most_two_per_cent_of_the_time() -> None:
    choice = choose_interval(10, 5.0, 8, failures_per_day=100)
    assert choice.seconds == 250 and "2 %" in choice.reason


def test_an_interval_leaves_time_to_write() -> None:
    choice = choose_interval(10, 0.01, 120, failures_per_day=0)
    assert choice.seconds == 240 and "2 min" in choice.reason


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_counted_in_multiples_whatever_the_start() -> None:
    interval = SaveTimer(SaveConfig(every=10))
    interval.restart(7, 0)
    assert [s for s in range(8, 31) if interval.due_by_count(s, 0) and not interval.restart(s, 0)] == [10, 20, 30]
    assert not interval.due_by_clock(99)


def test_tokens() -> None:
    interval = SaveTimer(SaveConfig(every="1k tokens"))
    assert [s for s in range(1, 10) if interval.due_by_count(s, s * 300) and not interval.restart(s, s * 300)] == [4, 7]


def test_minutes_by_a_clock_that_cannot_jump() -> None:
    clock = Clock()
    interval = SaveTimer(SaveConfig(every="2m"), clock=clock)
    clock.now += 119
    assert not interval.due_by_clock(5)
    clock.now += 1
    assert interval.due_by_clock(5) and not interval.due_by_count(5, 5)
    interval.restart(5, 5)
    assert not interval.due_by_clock(6)


def test_auto_waits_for_measurements_and_speaks_only_when_it_changes() -> None:
    clock = Clock()
    interval = SaveTimer(SaveConfig(every="auto", failures_per_day=0), clock=clock)
    clock.now += 1e6
    assert not interval.due_by_clock(9)  # start-up not measured yet
    assert interval.measured(startup_seconds=20).seconds == 100
    assert interval.due_by_clock(9)
    assert interval.measured(stall_seconds=0.1, write_seconds=1) is None
    assert interval.measured(stall_seconds=0.1, write_seconds=90).seconds == 180  # of two the higher
    assert interval.measured(stall_seconds=0.1, write_seconds=1).seconds == 100  # one slow save was an exception


def test_a_given_interval_is_not_changed_by_measurements() -> None:
    assert SaveTimer(SaveConfig(every=5)).measured(startup_seconds=20) is None
