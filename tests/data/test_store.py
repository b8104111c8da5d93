"""Opening, mapping and verifying a token store."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import index_bytes, refused

from windlass.config.sources import DataFile, DataSource
from windlass.data.shards import DTYPE_CODES, dtype_for, read_index
from windlass.data.store import open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer


@pytest.fixture
def store(data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Callable[[int], str]) -> Path:
    path = write_jsonl(tmp_path / "in.jsonl", [text(i) for i in range(200)])
    source = DataSource(paths=[str(path)], language="nl", licence="CC0-1.0", origin="made here")
    tokenize(data_file({"nl": source}, validation=0.2))
    return tmp_path / "store"


def test_documents_come_back_exactly(store: Path, tokenizer: Tokenizer, text: Callable[[int], str]) -> None:
    opened = open_store(store)
    texts = []
    for split in opened.splits:
        array = opened.tokens("nl", split)
        for start, stop in array.documents():
            ids = array[start:stop].tolist()
            assert ids[-1] == opened.eos
            texts.append(tokenizer.decode(ids[:-1]))
    assert sorted(texts) == sorted(text(i) for i in range(200))


def test_what_the_manifest_says(store: Path, tokenizer: Tokenizer) -> None:
    opened = open_store(store)
    info = opened.sources["nl"]
    assert opened.splits == ("train", "validation")
    assert (info.documents, info.language, info.licence, info.origin) == (200, "nl", "CC0-1.0", "made here")
    assert info.tokens == sum(info.splits.values()) == len(opened.tokens("nl")) + len(opened.tokens("nl", "validation"))
    assert (opened.vocab_size, opened.eos, opened.tokenizer_hash) == (600, tokenizer.eos, tokenizer.hash)
    assert opened.max_token == max(int(opened.tokens("nl", s)[:].max()) for s in opened.splits)


def test_vocabulary_below_65536_takes_two_bytes(store: Path) -> None:
    opened = open_store(store)
    size = sum(p.stat().st_size for p in store.glob("*.bin"))
    assert size == 2 * opened.sources["nl"].tokens


@pytest.mark.parametrize("kind", ["crc32", "sha256"])
def test_a_whole_store_has_no_problems_and_a_changed_byte_is_found(store: Path, kind: str) -> None:
    """Stores of earlier releases carry SHA-256 of their tokens."""
    if kind == "sha256":
        sums = json.loads((store / "checksums.json").read_text())
        for path in store.glob("*.bin"):
            sums["files"][path.name] = [[path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]]
        (store / "checksums.json").write_text(json.dumps(sums))
    assert open_store(store).verify() == []
    binary = store / "nl-train-00000.bin"
    raw = bytearray(binary.read_bytes())
    raw[100] ^= 1
    binary.write_bytes(raw)
    problems = open_store(store).verify()
    assert [p.file for p in problems] == ["nl-train-00000.bin"]
    assert "bytes 0 to" in problems[0].problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nl-train-00000.idx", "is missing"),
        ("tokenizer.json", "tokenizer is missing"),
        ("checksums.json", "nothing can be checked"),
    ],
)
def test_missing_files_are_found(store: Path, name: str, problem: str) -> None:
    (store / name).unlink()
    assert any(problem in p.problem for p in open_store(store).verify())


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("documents", 7, "in 7 documents of nl-train-00000.bin"),
        ("tokens", 3, " 3 tokens in"),
        ("file", "nl-other-00000.bin", "which has no checksum"),
    ],
)
def test_a_manifest_that_says_otherwise_than_the_files_is_found(
    store: Path, key: str, value: Any, problem: str
) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["sources"]["nl"]["shards"]["train"][0][key] = value
    (store / "manifest.json").write_text(json.dumps(manifest))
    problems = open_store(store).verify()
    assert {p.file for p in problems} == {"manifest.json"}
    assert any(problem in p.problem for p in problems)


def test_a_manifest_whose_sums_are_wrong_is_found(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["documents"] += 1
    (store / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = open_store(store).verify()
    assert "documents" in problem.problem


def test_a_forged_ledger_is_found(store: Path) -> None:
    ledger = json.loads((store / "ledger.json").read_text())
    ledger["sources"]["nl"]["licence"] = "MIT"
    (store / "ledger.json").write_text(json.dumps(ledger))
    assert any("does not match" in p.problem for p in open_store(store).verify())


def test_a_cut_shard_is_refused_when_touched(store: Path) -> None:
    binary = store / "nl-train-00000.bin"
    binary.write_bytes(binary.read_bytes()[:-10])
    with refused("data.store-file-cut"):
        open_store(store).tokens("nl")[:5]


def test_unknown_source_and_unfinished_store(store: Path, tmp_path: Path) -> None:
    with refused("data.source-missing", "'fr'"):
        open_store(store).tokens("fr")
    (tmp_path / "half" / "work").mkdir(parents=True)
    with refused("data.store-unfinished"):
        open_store(tmp_path / "half")
    with refused("data.store-missing"):
        open_store(tmp_path / "nothing")
    (store / "manifest.json").write_text("{")
    with refused("data.store-damaged"):
        open_store(store)


def test_index_has_megatrons_bytes() -> None:
    # Worked by hand from the format: two documents of 3 and 2 tokens, uint16.
    raw = index_bytes(np.array([3, 2], dtype=np.int32), np.dtype("<u2"))
    wanted = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 3, 2)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )
    assert raw == wanted


def test_an_index_without_marks_names_beginning_and_end_and_loses_no_document(tmp_path: Path) -> None:
    lengths = np.array([3, 2, 4], dtype=np.int32)
    read = {}
    for marks in (True, False):
        (tmp_path / "a.idx").write_bytes(index_bytes(lengths, np.dtype("<u2"), marks=marks))
        index = read_index(tmp_path / "a.idx")
        read[marks] = (index.documents, index.tokens, index.ends.tolist())
    assert read[True] == read[False] == (3, 9, [3, 5, 9])
    assert index.marks.tolist() == [0, 3]
    assert index_bytes(lengths[:0], np.dtype("<u2"), marks=False) == index_bytes(lengths[:0], np.dtype("<u2"))  # fmt: skip


def test_large_vocabularies_take_four_bytes_and_megatrons_code_for_int32() -> None:
    assert dtype_for(65_536) == np.dtype("<u2")
    assert dtype_for(65_537) == np.dtype("<i4")
    assert DTYPE_CODES[np.dtype("<i4")] == 4


def test_a_store_of_ten_billion_tokens_opens_at_once(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    shards = [{"file": f"big-train-{i:05d}.bin", "tokens": 10**9, "documents": 10**6} for i in range(10)]
    manifest["sources"]["big"] = {
        **manifest["sources"]["nl"],
        "tokens": 10**10,
        "documents": 10**7,
        "shards": {"train": shards},
    }
    (store / "manifest.json").write_text(json.dumps(manifest))
    with (store / "big-train-00007.bin").open("wb") as file:  # sparse: zeros, no disk space
        file.truncate(2 * 10**9)
    began = time.process_time()
    array = open_store(store).tokens("big")
    assert array[7 * 10**9 : 7 * 10**9 + 4].tolist() == [0, 0, 0, 0]
    assert time.process_time() - began < 0.5
    assert len(array) == 10**10


def test_borders_across_shards(write_megatron: Any, tmp_path: Path) -> None:
    from windlass.data.shards import Shard, TokenArray

    shards = []
    for number, documents in enumerate([[[1, 2, 3], [4, 5]], [[6], [7, 8, 9, 10]]]):
        prefix = write_megatron(tmp_path / f"s{number}", documents)
        shards.append(Shard(prefix.with_suffix(".bin"), 5, np.dtype("<u2"), 2, prefix.with_suffix(".idx")))
    array = TokenArray(shards)
    assert array[:].tolist() == list(range(1, 11))
    assert array[3:8].tolist() == [4, 5, 6, 7, 8]
    assert array.borders(0, 10).tolist() == [0, 3, 5, 6]
    assert array.borders(1, 6).tolist() == [3, 5]
    assert array.borders(4, 5).tolist() == []
    assert list(array.documents()) == [(0, 3), (3, 5), (5, 6), (6, 10)]
    assert array.document(2) == (5, 6)
