"""Checksums and the manifest."""

from __future__ import annotations

import zlib

import pytest

from windlass.checkpoint import files
from windlass.errors import CheckpointError


def test_checksums_are_crc32_of_each_chunk(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10)
    path = tmp_path / "x"
    path.write_bytes(b"0123456789abcdefghij!")
    assert files.checksums(path) == [f"{zlib.crc32(part):08x}" for part in (b"0123456789", b"abcdefghij", b"!")]


def test_an_empty_file_has_a_checksum(tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"")
    assert files.checksums(tmp_path / "x") == ["00000000"]


def test_the_damaged_chunk_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 4)
    (tmp_path / "x").write_bytes(b"aaaabbbbcccc")
    manifest = {"files": files.describe(tmp_path, ["x"])}
    (tmp_path / "x").write_bytes(b"aaaabbXbcccc")
    [problem] = files.content_problems(tmp_path, manifest, ["x"])
    assert problem.startswith("x ") and "chunk 2 of 3" in problem


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path) -> None:
    with pytest.raises(CheckpointError) as error:
        files.complete(tmp_path)
    assert error.value.code == "checkpoint.incomplete"


def test_names_beyond_nine_digits_are_read(run) -> None:
    run.checkpoint(12_345_678_901).mkdir()
    run.checkpoint(5).mkdir()
    assert [step for step, _ in files.steps_on_disk(run)] == [5, 12_345_678_901]


def test_set_aside_never_overwrites(run) -> None:
    for _ in range(3):
        run.checkpoint(1).mkdir()
        files.set_aside(run.checkpoint(1), "why")
    assert sorted(p.name for p in run.checkpoints.iterdir()) == [
        "damaged-step-000000001",
        "damaged-step-000000001-2",
        "damaged-step-000000001-3",
    ]
