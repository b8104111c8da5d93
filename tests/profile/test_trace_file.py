"""Trace files of every form: plain, packed, damaged, foreign and repaired."""

from __future__ import annotations

import gzip
import json
import re
from types import SimpleNamespace

import pytest

from windlass.errors import ProfileError
from windlass.profile import trace as trace_module
from windlass.profile.trace import TraceFile

EVENTS = [{"ph": "X", "name": f"op {i}", "ts": i, "args": {"list": [{"a": 1}, {"b": "},{"}]}} for i in range(500)]


def read(path):
    result = TraceFile(path)
    events = [e for batch in result for e in batch]
    return events, result.meta


def document(events=EVENTS, **meta):
    return {"schemaVersion": 1, **meta, "traceEvents": events, "traceName": "x"}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_events_and_metadata_come_back_whole(tmp_path, monkeypatch, indent, packed, chunk):
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", chunk)
    text = json.dumps(document(deviceProperties=[{"id": 0}, {"id": 1}]), indent=indent).encode()
    path = tmp_path / "trace"  # the name does not matter, the content does
    path.write_bytes(gzip.compress(text) if packed else text)
    events, meta = read(path)
    assert events == EVENTS
    assert meta == {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}], "traceName": "x"}


def test_metadata_behind_the_events_is_not_taken_for_events(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", 256)
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
    monkeypatch.setattr(trace_module, "orjson", None)
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


def test_a_truncated_file_reports_how_far_it_was_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", 1000)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document())[:20_000])
    with pytest.raises(ProfileError) as error:
        read(path)
    assert error.value.code == "profile.trace-damaged"
    assert re.search(r"\d\d+ events", error.value.message)


PACKED = gzip.compress(json.dumps(document()).encode(), mtime=0)
MIDDLE = len(PACKED) // 2


@pytest.mark.parametrize(
    ("content", "code", "detail"),
    [
        (PACKED[:-20], "damaged", ""),
        (PACKED[:MIDDLE] + bytes([PACKED[MIDDLE] ^ 0xFF]) + PACKED[MIDDLE + 1 :], "damaged", ""),
        (b"", "empty", ""),
        (b"<html></html>", "not-json", "<html>"),
        (b'{"loss": [1, 2], "step": 3}', "without-events-key", "loss, step"),
        (b'{"loss": [1, 2', "damaged", "0 events"),
        (b"PK\x03\x04rest", "archive-unsupported", "zip"),
        (b'{"traceEvents": [{"ph": "X"}], "a": }', "damaged", ""),
    ],
    ids=["cut", "flipped", "empty", "html", "no-events", "cut-json", "zip", "bad-json"],
)
def test_damaged_and_foreign_files_are_refused(tmp_path, content, code, detail):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError) as error:
        read(path)
    assert error.value.code == f"profile.trace-{code}"
    assert detail in error.value.message
    assert error.value.hint


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ProfileError) as error:
        read(tmp_path / "none.json")
    assert error.value.code == "profile.path-missing"


def test_one_endless_event_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(trace_module, "LARGEST_EVENT_BYTES", 1 << 14)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 100_000)
    with pytest.raises(ProfileError) as error:
        read(path)
    assert error.value.code == "profile.trace-damaged"


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document()))
    bytes_read: list[int] = []
    for _ in TraceFile(path, bytes_read.append):
        pass
    assert bytes_read[-1] == path.stat().st_size


LINES = [json.dumps(event) for event in EVENTS]
TEXT = '{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join(LINES) + '\n], "traceName": "x"}'


def place_of(text: str, line: int, marker: str) -> int:
    """Byte offset of a marker in a line of the file, counted from 1."""
    start = sum(len(part) + 1 for part in text.split("\n")[: line - 1])
    return text.index(marker, start)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
@pytest.mark.parametrize(
    ("marker", "replacement"),
    [
        ("op 3", 'op"3'),
        ('"X"', '"X'),
        ("}]}}", "}]}"),
        ('"args"', '\\"args"'),
        ('{"list"', '\0\0\0"list"'),
        ("}]}}", "}]}}]"),
    ],
    ids=["stray-quote", "lost-quote", "lost-brace", "escaped-quote", "hole", "bracket"],
)
def test_one_damaged_place_is_reported_with_its_offset(tmp_path, monkeypatch, packed, chunk, marker, replacement):
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", chunk)
    line = 302 if marker == "op 3" else 250
    at = place_of(TEXT, line, marker)
    text = (TEXT[:at] + replacement + TEXT[at + len(marker) :]).encode()
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(ProfileError) as error:
        read(path)
    assert error.value.code == "profile.trace-damaged"
    offset, where = (
        int(n.replace(",", "")) for n in re.search(r"byte ([\d,]+), line ([\d,]+)", error.value.message).groups()
    )
    assert abs(offset - at) < 40
    assert where in (line, line + 1)  # what a lost brace spoils is the next line


def test_the_offset_counts_the_bytes_of_the_file_also_where_faults_of_old_profilers_are_repaired(tmp_path):
    events = [rb'{"ph": "X", "v": N/A, "n": "C:\Users\x", "t": "' + "é".encode() + b'\xff"}'] * 200
    text = b'{"traceEvents": [' + b", ".join([*events, b'{"ph": "X"", "ts": 1}', *events]) + b"]}"
    path = tmp_path / "t.json"
    path.write_bytes(text)
    at = text.index(b'X"",') + 2
    with pytest.raises(ProfileError, match=f"byte {at:,},"):
        read(path)


def test_a_damaged_place_is_found_by_few_parses(tmp_path, monkeypatch):
    """Parsed bytes are bounded by a few blocks: the blocks before the damage once, its own block a few times."""
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", 4096)
    parsed = []

    def count_and_parse(data):
        parsed.append(len(data))
        return json.loads(data)

    monkeypatch.setattr(trace_module, "orjson", SimpleNamespace(loads=count_and_parse))
    text = TEXT
    at = place_of(text, 100, "op 9")
    path = tmp_path / "t.json"
    path.write_text(text[:at] + '"' + text[at:])
    with pytest.raises(ProfileError):
        read(path)
    assert sum(parsed) < at + 3 * 4096


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize(("garbage", "ignored"), [(b"", 0), (b"\0" * 900, 0), (b"\0\0garbage" * 20, 178), (b"x", 1)])
def test_garbage_after_the_compressed_data_is_a_note(tmp_path, monkeypatch, members, chunk, garbage, ignored):
    monkeypatch.setattr(trace_module, "READ_BLOCK_BYTES", chunk)
    text = json.dumps(document()).encode()
    parts = [text] if members == 1 else [text[:5000], text[5000:]]
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"".join(map(gzip.compress, parts)) + garbage)
    file = TraceFile(path)
    assert [e for batch in file for e in batch] == EVENTS
    assert file.meta["traceName"] == "x"
    assert [note.split()[0] for note in file.notes] == ([str(ignored)] if ignored else [])


def test_a_bare_list_is_not_cut_short_by_a_stray_bracket(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[" + ", ".join(LINES[:3]) + "], " + ", ".join(LINES[3:]) + "]")
    with pytest.raises(ProfileError) as error:
        read(path)
    assert error.value.code == "profile.trace-damaged"


@pytest.mark.parametrize("value", ["[" * 50_000 + "]" * 50_000, "9" * 6000, "1e400", "NaN"])
def test_hostile_values_are_read_or_refused(tmp_path, value):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "X", "ts": ' + value + '}, {"ph": "X"}]}')
    try:
        assert len(read(path)[0]) == 2
    except ProfileError as error:
        assert error.code == "profile.trace-damaged"
