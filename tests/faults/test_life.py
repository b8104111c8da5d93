"""Goodput and losses of a life that was worked by hand."""

from __future__ import annotations

import pytest

from windlass.runs.life import life, moment


def metric(step: int, time: float) -> dict:
    return {"step": step, "tokens": step * 100, "step_seconds": 1.0, "time": time}


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
    found = life(events, metrics)
    first, second = found.segments
    assert (first.end, first.last_step, first.kept_step, first.lost_steps, first.ended_at) == ("cut off", 6, 4, 2, 11.0)
    assert (first.startup_seconds, first.train_seconds, first.lost_seconds, first.stall_seconds) == (5.0, 6.0, 2.0, 0.5)
    assert (second.end, second.first_step, second.last_step, second.lost_steps) == ("finished", 4, 10, 0)
    # 30 s of wall time, 11 + 10 with processes, 6 - 2 + 6 = 10 s of steps that stayed.
    assert (found.wall_seconds, found.active_seconds, found.useful_seconds) == (30.0, 21.0, 10.0)
    assert found.goodput == pytest.approx(10 / 30) and found.goodput_active == pytest.approx(10 / 21)
    assert (found.lost_steps, found.lost_tokens, found.faults, found.resumes, found.saves) == (2, 200, 1, 1, 1)


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
    found = life(events, [metric(s, 117.3 + s) for s in range(1, 11)] + [metric(s, 141.1 + s) for s in range(11, 21)])
    first, second = found.segments
    assert (first.began_at, second.began_at) == (pytest.approx(89.6), 130.2)
    assert first.ended_at - first.began_at >= first.startup_seconds + first.train_seconds
    assert found.wall_seconds == pytest.approx(167.0 - 89.6)


def test_a_rollback_loses_its_steps_too() -> None:
    events = [
        {"time": 0.0, "event": "started"},
        {"time": 6.5, "event": "rollback", "step": 6, "to_step": 4, "skipped_tokens": 200},
        {"time": 11.0, "event": "finished", "step": 8},
    ]
    found = life(events, [metric(s, float(s)) for s in range(1, 7)] + [metric(s, 2.0 + s) for s in range(5, 9)])
    assert (found.lost_steps, found.segments[0].train_seconds, found.useful_seconds) == (2, 10.0, 8.0)
    assert found.timeline[1].text == "went back from step 6 to 4, skipping 200 tokens of data"


def test_a_clean_run_loses_nothing() -> None:
    events = [{"time": 0.0, "event": "started"}, {"time": 12.0, "event": "finished", "step": 10}]
    found = life(events, [metric(s, 2.0 + s) for s in range(1, 11)])
    assert (found.lost_steps, found.lost_tokens, found.faults) == (0, 0, 0)
    assert found.goodput == pytest.approx(10 / 12)


def test_a_clock_that_went_back_makes_times_unknown_and_keeps_the_counts() -> None:
    day = 86_400.0
    events = [
        {"time": day, "event": "started"},
        {"time": day + 5, "event": "saved", "step": 4, "stall_seconds": 0.5},
        {"time": 20.0, "event": "resumed", "step": 4, "lost_steps": 2},  # the new node's clock is a day behind
        {"time": 30.0, "event": "finished", "step": 10},
    ]
    metrics = [metric(s, day + s) for s in range(1, 7)] + [metric(s, 20.0 + s) for s in range(5, 11)]
    found = life(events, metrics)
    assert (found.goodput, found.wall_seconds, found.active_seconds, found.useful_seconds) == (None,) * 4
    assert (found.lost_steps, found.lost_tokens, found.resumes, found.saves, found.stall_seconds) == (2, 200, 1, 1, 0.5)
    assert [m.kind for m in found.timeline] == ["started", "saved", "clock", "resumed", "finished"]
    # Two hosts whose clocks differ a little are no jump.
    near = [{**e, "time": e["time"] + day - 40 if e["time"] < day else e["time"]} for e in events]
    assert life(near, []).wall_seconds is not None


def test_a_run_that_still_goes_and_logs_every_fifth_step() -> None:
    found = life([{"time": 0.0, "event": "started"}], [metric(5, 6.0), metric(10, 11.0)])
    assert found.segments[0].end == "running" and found.useful_seconds == 10.0 and found.wall_seconds == 11.0


def test_nothing_is_unknown_not_zero() -> None:
    found = life([], [])
    assert found.goodput is None and found.wall_seconds is None and found.segments == []


def test_moments_in_words() -> None:
    assert moment({"event": "started", "world_size": 1}).text == "started on 1 device"
    one = {"event": "resumed", "step": 4, "world_size": 16, "lost_steps": 1}
    assert moment(one).text == "resumed at step 4 on 16 devices, 1 step to do again"
    assert moment(
        {"time": 1.0, "event": "saved", "step": 4, "bytes": 2048, "stall_seconds": 0.5, "write_seconds": 2.0}
    ).text == ("saved step 4 (2 KiB, training waited 500 ms, written in 2 s)")
    assert (
        moment({"time": 1.0, "event": "fault", "rank": 3, "kind": "oom", "error": "full"}).text
        == "rank 3 failed (oom): full"
    )
    assert (
        moment({"time": 1.0, "event": "resumed", "step": 4}).text
        == "resumed at step 4 on unknown devices, unknown steps to do again"
    )
    assert moment({"time": 1.0, "event": "tomorrow"}).text == "tomorrow"
