"""Files of every shape: plain, packed, torn, foreign, repaired; and never more than a few megabytes at a time."""

from __future__ import annotations

import gzip
import json

import pytest

from windlass.errors import ProfileError
from windlass.profile import stream
from windlass.profile.stream import EventStream

EVENTS = [{"ph": "X", "name": f"op {i}", "ts": i, "args": {"list": [{"a": 1}, {"b": "},{"}]}} for i in range(500)]


def read(path):
    found = EventStream(path)
    events = [e for batch in found for e in batch]
    return events, found.meta


def document(events=EVENTS, **meta):
    return {"schemaVersion": 1, **meta, "traceEvents": events, "traceName": "x"}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_events_and_metadata_come_back_whole(tmp_path, monkeypatch, indent, packed, chunk):
    monkeypatch.setattr(stream, "CHUNK_BYTES", chunk)
    text = json.dumps(document(deviceProperties=[{"id": 0}, {"id": 1}]), indent=indent).encode()
    path = tmp_path / "trace"  # the name does not matter, the content does
    path.write_bytes(gzip.compress(text) if packed else text)
    events, meta = read(path)
    assert events == EVENTS
    assert meta == {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}], "traceName": "x"}


def test_metadata_behind_the_events_is_not_taken_for_events(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 256)
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": EVENTS[:3], "deviceProperties": [{"id": i} for i in range(200)]}))
    events, meta = read(path)
    assert len(events) == 3
    assert len(meta["deviceProperties"]) == 200


@pytest.mark.parametrize("ending", ["]", "", ",", ",\n"])
def test_a_bare_list_may_end_without_its_bracket(tmp_path, ending):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(EVENTS)[:-1] + ending)
    assert read(path)[0] == EVENTS


def test_the_standard_library_reads_the_same_as_orjson(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document()))
    fast = read(path)
    monkeypatch.setattr(stream, "_fast_loads", None)
    assert read(path) == fast


def test_known_faults_of_old_profilers_are_repaired(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(
        rb'{"traceEvents": [{"ph": "X", "v": N/A, "w": nan, "x": -inf, "n": "C:\Users\x", "t": "a'
        + b'\x01\xff"}, {"ph": "i"}]}'
    )
    events, _ = read(path)
    assert [e["ph"] for e in events] == ["X", "i"]
    assert events[0]["v"] is None
    assert events[0]["w"] is None
    assert events[0]["n"] == r"C:\Users\x"


def test_a_torn_plain_file_says_how_far_it_could_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1000)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document())[:20_000])
    with pytest.raises(ProfileError, match=r"torn.*middle of the list of events; \d\d+ events before that") as caught:
        read(path)
    assert "capture again" in caught.value.hint


def test_a_torn_archive_is_noticed(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document()).encode())[:-20])
    with pytest.raises(ProfileError, match="torn: its compressed data ends"):
        read(path)


def test_a_damaged_archive_is_noticed(tmp_path):
    data = bytearray(gzip.compress(json.dumps(document()).encode()))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "t.json.gz"
    path.write_bytes(bytes(data))
    with pytest.raises(ProfileError, match="torn"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<html></html>", "is no JSON"),
        (b'{"loss": [1, 2], "step": 3}', r"JSON without traceEvents \(its keys: loss, step\)"),
        (b'{"loss": [1, 2', "torn: no traceEvents"),
        (b"PK\x03\x04rest", "zip archive"),
        (b'{"traceEvents": [{"ph": "X"}], "a": }', "what follows the events is no valid JSON"),
    ],
)
def test_foreign_files_are_named_for_what_they_are(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=message) as caught:
        read(path)
    assert caught.value.hint


def test_a_missing_file_is_no_traceback(tmp_path):
    with pytest.raises(ProfileError, match="does not exist"):
        read(tmp_path / "none.json")


def test_one_endless_event_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(stream, "LARGEST_EVENT_BYTES", 1 << 14)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 100_000)
    with pytest.raises(ProfileError, match="that are no event"):
        read(path)


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document()))
    seen: list[int] = []
    for _ in EventStream(path, seen.append):
        pass
    assert seen[-1] == path.stat().st_size
