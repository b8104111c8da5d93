"""What differs between two states of a token store, named with its numbers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.config.sources import DataFile
from windlass.data.identity import differences, identify, recheck
from windlass.data.store import CHECKSUMS, open_store
from windlass.data.tokenize import tokenize

Make = Callable[..., DataFile]


@pytest.fixture
def store(data_file: Make, write_jsonl: Any, text: Any, tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(40)])
    tokenize(data_file({"s": [tmp_path / "a.jsonl"]}, shard_tokens=500, chunk=4096))
    return tmp_path / "store"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def compare(old: dict[str, Any], path: Path) -> list[str]:
    return differences(json.loads(json.dumps(old)), identify(open_store(path), old["sampling"]))


def test_a_moved_and_a_copied_store_are_the_same(store: Path, tmp_path: Path) -> None:
    old = identify(open_store(store))
    assert len(old["files"]) > 4 and all(entry["checksum"] for entry in old["files"].values())
    shutil.copytree(store, tmp_path / "copy", copy_function=shutil.copyfile)
    assert compare(old, tmp_path / "copy") == []
    store.rename(tmp_path / "moved")
    assert compare(old, tmp_path / "moved") == []


def test_every_change_is_named(store: Path, tmp_path: Path) -> None:
    old = identify(open_store(store))
    shard, index = store / "s-train-00001.bin", store / "s-train-00001.idx"
    size = shard.stat().st_size

    def after(change: Callable[[], object]) -> str:
        shutil.copytree(store, tmp_path / "kept")
        change()
        lines = compare(old, store)
        shutil.rmtree(store)
        (tmp_path / "kept").rename(store)
        return "\n".join(lines)

    for path in (shard, index):
        for offset in (0, path.stat().st_size // 2, -1):
            assert path.name in after(lambda path=path, offset=offset: flip(path, offset))
    assert f"s-train-00001.bin: bytes {size:,} -> {size - 2:,}" in after(lambda: os.truncate(shard, size - 2))
    assert "s-train-00001.bin" in after(shard.unlink)

    def edit(name: str, key: str, value: Any) -> None:
        content = json.loads((store / name).read_text())
        (store / name).write_text(json.dumps(content | {key: value}))

    lines = after(lambda: edit("manifest.json", "ledger_hash", "f" * 64))
    assert old["ledger_hash"][:16] in lines and "f" * 16 in lines
    files = json.loads((store / CHECKSUMS).read_text())["files"]
    other = files | {shard.name: [[size, "00000000"]]}
    assert "s-train-00001.bin: listed checksum" in after(lambda: edit(CHECKSUMS, "files", other))
    assert compare(old, store) == []


def test_an_added_source_is_other_data(
    store: Path, data_file: Make, write_jsonl: Any, text: Any, tmp_path: Path
) -> None:
    old = identify(open_store(store))
    write_jsonl(tmp_path / "b.jsonl", [text(i) for i in range(50, 60)])
    sources = {"s": [tmp_path / "a.jsonl"], "t": [tmp_path / "b.jsonl"]}
    tokenize(data_file(sources, shard_tokens=500, chunk=4096))
    assert "t-train-00000.bin: was added" in compare(old, store)


def test_a_change_between_the_sampled_blocks(tmp_path: Path, store: Path) -> None:
    """Sampling may miss it; the file's time tells that it was written, and then it is read completely."""
    old = identify(open_store(store), {"blocks": 1, "block_bytes": 16})
    shard = store / "s-train-00000.bin"
    flip(shard, shard.stat().st_size // 2)
    assert compare(old, store) == []
    (line,) = recheck(open_store(store), [shard.name])
    assert line.startswith(f"{shard.name}: bytes ")


def test_a_store_without_checksums_compares_sizes_and_samples(tmp_path: Path, write_megatron: Any) -> None:
    prefix = write_megatron(tmp_path / "m" / "text", [list(range(1000)), list(range(50))])
    for path in (tmp_path / "m", prefix):  # a folder, and one prefix in it
        old = identify(open_store(path))
        assert {entry["checksum"] for entry in old["files"].values()} == {None}
        assert compare(old, path) == []
        flip(prefix.with_suffix(".bin"), 1000)
        (line,) = compare(old, path)
        assert line.startswith("text.bin: checksum of sampled blocks ")
        flip(prefix.with_suffix(".bin"), 1000)


def test_synthetic_tokens_are_not_a_store(store: Path) -> None:
    old = identify(open_store(store))
    assert "kind: windlass -> synthetic" in differences(old, identify(None))
    assert "kind: synthetic -> windlass" in differences(identify(None), old)


def test_many_shards_cost_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, at: reads.append(size) or real(handle, size, at))
    for number in range(200):
        np.save(tmp_path / f"part-{number}.npy", np.arange(100_000, dtype="<u2"))
    old = identify(open_store(tmp_path))
    assert len(reads) <= 8192 and max(reads) == 4096 and len(old["files"]) == 200
