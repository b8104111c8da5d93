"""Goodput and losses of run histories worked by hand."""

from __future__ import annotations

import pytest

from windlass.runs.events import parse_event
from windlass.runs.history import read_history
from windlass.runs.measured import columns_of
from windlass.runs.metrics import MetricsLine


def metric(step: int, time: float) -> MetricsLine:
    return MetricsLine(step=step, tokens=step * 100, step_seconds=1.0, time=time)


def history(events: list[dict], lines: list[MetricsLine]):
    return read_history([parse_event(event) for event in events], columns_of(lines))


def test_a_run_that_was_killed_once() -> None:
    events = [
        {"time": 0.0, "event": "started", "world_size": 2},
        {"time": 5.0, "event": "compiled", "seconds": 5.0},
        {"time": 9.0, "event": "saved", "step": 4, "stall_seconds": 0.5, "bytes": 1000, "write_seconds": 2.0},
        # killed after step 6 at time 11 without a word; resumed at 20 from step 4
        {"time": 20.0, "event": "resumed", "step": 4, "world_size": 2, "lost_steps": 2},
        {"time": 30.0, "event": "finished", "step": 10, "loss": 2.0},
    ]
    metrics = [metric(s, 5.0 + s) for s in range(1, 7)] + [metric(s, 20.0 + s) for s in range(5, 11)]
    result = history(events, metrics)
    first, second = result.segments
    assert (first.end, first.last_step, first.kept_step, first.lost_steps, first.ended_at) == ("cut off", 6, 4, 2, 11.0)
    assert (first.startup_seconds, first.train_seconds, first.lost_seconds, first.stall_seconds) == (5.0, 6.0, 2.0, 0.5)
    assert (second.end, second.first_step, second.last_step, second.lost_steps) == ("finished", 4, 10, 0)
    # 30 s of wall time, 11 + 10 with processes, 6 - 2 + 6 = 10 s of steps that stayed.
    assert (result.wall_seconds, result.active_seconds, result.useful_seconds) == (30.0, 21.0, 10.0)
    assert result.goodput == pytest.approx(10 / 30) and result.goodput_active == pytest.approx(10 / 21)
    assert (result.lost_steps, result.lost_tokens, result.faults, result.resumes, result.saves) == (2, 200, 1, 1, 1)


def test_a_part_begins_with_its_processes_not_with_their_first_line() -> None:
    """As on the H200: 27.7 s to the first step, of which 10 passed before anything was written."""
    events = [
        {"time": 100.0, "event": "started"},
        {"time": 117.3, "event": "compiled", "seconds": 27.7},
        {"time": 130.2, "event": "stopped", "step": 10},
        {"time": 144.6, "event": "resumed", "step": 10},
        {
            "time": 151.1,
            "event": "compiled",
            "seconds": 30.0,
        },  # longer than there was time since the stop: another clock
        {"time": 167.0, "event": "finished", "step": 20},
    ]
    result = history(
        events, [metric(s, 117.3 + s) for s in range(1, 11)] + [metric(s, 141.1 + s) for s in range(11, 21)]
    )
    first, second = result.segments
    assert (first.began_at, second.began_at) == (pytest.approx(89.6), 130.2)
    assert first.ended_at - first.began_at >= first.startup_seconds + first.train_seconds
    assert result.wall_seconds == pytest.approx(167.0 - 89.6)


def test_a_rollback_loses_its_steps_too() -> None:
    events = [
        {"time": 0.0, "event": "started"},
        {"time": 6.5, "event": "rollback", "step": 6, "to_step": 4, "skipped_tokens": 200},
        {"time": 11.0, "event": "finished", "step": 8},
    ]
    result = history(events, [metric(s, float(s)) for s in range(1, 7)] + [metric(s, 2.0 + s) for s in range(5, 9)])
    assert (result.lost_steps, result.segments[0].train_seconds, result.useful_seconds) == (2, 10.0, 8.0)


def test_a_clean_run_loses_nothing() -> None:
    events = [{"time": 0.0, "event": "started"}, {"time": 12.0, "event": "finished", "step": 10}]
    result = history(events, [metric(s, 2.0 + s) for s in range(1, 11)])
    assert (result.lost_steps, result.lost_tokens, result.faults) == (0, 0, 0)
    assert result.goodput == pytest.approx(10 / 12)


def test_a_clock_that_went_back_makes_times_unknown_and_keeps_the_counts() -> None:
    day = 86_400.0
    events = [
        {"time": day, "event": "started"},
        {"time": day + 5, "event": "saved", "step": 4, "stall_seconds": 0.5},
        {"time": 20.0, "event": "resumed", "step": 4, "lost_steps": 2},  # the new node's clock is a day behind
        {"time": 30.0, "event": "finished", "step": 10},
    ]
    metrics = [metric(s, day + s) for s in range(1, 7)] + [metric(s, 20.0 + s) for s in range(5, 11)]
    result = history(events, metrics)
    assert (result.goodput, result.wall_seconds, result.active_seconds, result.useful_seconds) == (None,) * 4
    assert (result.lost_steps, result.lost_tokens, result.resumes, result.saves, result.stall_seconds) == (
        2,
        200,
        1,
        1,
        0.5,
    )
    assert result.clock_jumped_at == 20.0
    # Two hosts whose clocks differ a little are no jump.
    near = [{**e, "time": e["time"] + day - 40 if e["time"] < day else e["time"]} for e in events]
    assert history(near, []).wall_seconds is not None


def test_a_run_that_still_goes_and_logs_every_fifth_step() -> None:
    result = history([{"time": 0.0, "event": "started"}], [metric(5, 6.0), metric(10, 11.0)])
    assert result.segments[0].end == "running" and result.useful_seconds == 10.0 and result.wall_seconds == 11.0


def test_nothing_is_unknown_not_zero() -> None:
    result = history([], [])
    assert result.goodput is None and result.wall_seconds is None and result.segments == []
