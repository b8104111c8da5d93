"""Typed events: the same lines as before, and old, torn and unknown lines read back."""

from __future__ import annotations

import json

import pytest

from windlass.runs.events import (
    EVENT_CLASSES,
    EVENTS,
    Evaluated,
    GaveUp,
    LayoutChanged,
    RecipeChanged,
    Saved,
    UnknownEvent,
    field_names,
    parse_event,
)
from windlass.runs.folder import Run


def test_an_event_is_written_with_its_kind_and_time_and_read_back(tmp_path):
    run = Run(tmp_path)
    saved = Saved(step=5, tokens=640, bytes=2048, stall_seconds=0.5, write_seconds=2.0, checkpoint="step-000000005")
    run.record(saved)
    line = json.loads(run.events_file.read_text())
    keys = ["time", "event", "step", "tokens", "bytes", "stall_seconds", "write_seconds", "checkpoint", "metric"]
    assert list(line) == keys and line["event"] == "saved" and line["metric"] is None
    [event] = run.events(Saved)
    assert event == Saved(**{**vars(saved), "time": line["time"]})
    assert list(run.events(GaveUp)) == []


def test_an_optional_field_is_left_out_when_it_is_unknown():
    assert "attempts" not in GaveUp(reason="x").as_dict()
    assert GaveUp(reason="x", attempts=2).as_dict()["attempts"] == 2


def test_missing_and_impossible_values_are_unknown():
    assert parse_event({"event": "saved"}) == Saved()
    event = parse_event(
        {"event": "saved", "time": "noon", "step": "five", "bytes": 1e300, "stall_seconds": float("nan")}
    )
    assert event == Saved()
    assert parse_event({"event": "saved", "step": 4.0, "later": 1}) == Saved(step=4, extra={"later": 1})
    assert parse_event({"event": "evaluated", "sources": {"a": {"loss": 2.0}, "b": 3}}).sources == {"a": {"loss": 2.0}}
    assert Evaluated().languages == {}


def test_unknown_kinds_are_kept_as_they_are():
    line = {"time": 1.0, "event": "{0} tomorrow", "weather": "fine"}
    event = parse_event(line)
    assert isinstance(event, UnknownEvent) and event.event == "{0} tomorrow"
    assert event.as_dict() == line and event.describe() == "{0} tomorrow"
    assert parse_event({}).event == "unknown"


@pytest.mark.parametrize("kind", EVENT_CLASSES)
def test_every_kind_has_a_meaning_and_describes_itself_without_its_fields(kind):
    event = parse_event({"event": kind})
    assert event.event == kind and event.describe()
    assert all(name in EVENTS[kind] for name in field_names(EVENT_CLASSES[kind]))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"event": "started", "world_size": 1}, "started on 1 device"),
        (
            {"event": "resumed", "step": 4, "world_size": 16, "lost_steps": 1},
            "resumed at step 4 on 16 devices, 1 step to repeat",
        ),
        ({"event": "resumed", "step": 4}, "resumed at step 4 on unknown devices, unknown steps to repeat"),
        (
            {"event": "saved", "step": 4, "bytes": 2048, "stall_seconds": 0.5, "write_seconds": 2.0},
            "saved step 4 (2 KiB, training waited 500 ms, written in 2 s)",
        ),
        ({"event": "expert_loads", "step": 6, "percent": {"1": [100, 100, 100], "2": [0, 240, 60], "3": "damaged"}},
         "expert loads at step 6: up to 2.40 x the mean (expert 1 of layer 2), 1 unused"),
        ({"event": "rollback", "step": 6, "to_step": 4, "skipped_tokens": 200},
         "rolled back from step 6 to 4, skipping 200 tokens of data"),
    ],
)  # fmt: skip
def test_events_describe_themselves_with_units(line, text):
    assert parse_event(line).describe() == text


def test_changes_show_old_and_new_value():
    assert (
        "shard: none -> full" in LayoutChanged(old={"shard": "none", "a": 1}, new={"shard": "full", "a": 1}).describe()
    )
    assert "a: 1" not in LayoutChanged(old={"shard": "none", "a": 1}, new={"shard": "full", "a": 1}).describe()
    assert "train.steps: 5 -> 9" in RecipeChanged(changes={"train.steps": [5, 9]}).describe()
