"""Stores of Megatron, OLMo and datatrove are read as they are; cut ones are refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import refused
from tests.untrusted import Canary

from windlass.config import DataConfig
from windlass.data.store import open_store
from windlass.data.stream import open_stream

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]
FLAT = [t for d in DOCUMENTS for t in d]


def test_megatron_folder_and_prefix(write_megatron: Any, tmp_path: Path) -> None:
    write_megatron(tmp_path / "m" / "nl_text_document", DOCUMENTS)
    write_megatron(tmp_path / "m" / "sub" / "en", DOCUMENTS, "<i4")
    store = open_store(tmp_path / "m")
    assert store.kind == "megatron"
    assert {n: (s.tokens, s.documents) for n, s in store.sources.items()} == {
        "nl_text_document": (13, 3),
        "sub.en": (13, 3),
    }
    assert store.tokens("sub.en")[:].tolist() == FLAT
    assert list(open_store(tmp_path / "m" / "nl_text_document").sources) == ["nl_text_document"]
    assert store.verify() == []


def test_megatron_bin_and_idx_must_belong_together(write_megatron: Any, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "x", DOCUMENTS)
    prefix.with_suffix(".bin").write_bytes(b"\0" * 10)
    with refused("data.store-file-cut", "10 bytes", "26"):
        open_store(tmp_path / "x")
    prefix.with_suffix(".bin").unlink()
    with refused("data.store-incomplete", ".bin"):
        open_store(tmp_path / "x")
    prefix.with_suffix(".idx").write_bytes(b"something else entirely, long enough to be a header")
    with refused("data.megatron-index-invalid"):
        open_store(tmp_path / "x")


def test_a_cut_index_is_refused(write_megatron: Any, tmp_path: Path) -> None:
    index = write_megatron(tmp_path / "x", DOCUMENTS).with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-3])
    with refused("data.store-file-cut"):
        open_store(tmp_path / "x")


@pytest.mark.parametrize("width", [2, 4])
def test_datatrove(tmp_path: Path, width: int) -> None:
    file = tmp_path / "t" / "00000_part.ds"
    file.parent.mkdir()
    np.array(FLAT, dtype=f"<u{width}").tofile(file)
    np.array([3, 4, 13], dtype="<u8").tofile(file.with_name(file.name + ".index"))
    file.with_name(file.name + ".metadata").write_text(f"some/tokenizer|{width}\n13\n13 T")
    store = open_store(tmp_path / "t")
    assert store.kind == "datatrove"
    assert store.sources["t"].documents == 3
    assert store.tokens("t")[:].tolist() == FLAT
    assert list(store.tokens("t").documents()) == [(0, 3), (3, 4), (4, 13)]
    file.with_name(file.name + ".metadata").unlink()
    assert open_store(tmp_path / "t").tokens("t")[:].tolist() == FLAT  # the last document end tells the width
    file.with_name(file.name + ".index").unlink()
    with refused("data.token-width-unknown"):
        open_store(tmp_path / "t")


@pytest.mark.parametrize("width", [2, 4])
def test_olmo(tmp_path: Path, width: int) -> None:
    file = tmp_path / "o" / "part-0.npy"
    file.parent.mkdir()
    np.array(FLAT, dtype=f"<u{width}").tofile(file)
    with gzip.open(file.with_suffix(".csv.gz"), "wt") as listing:
        listing.write("0,3,id1,src,1\n3,4,id2,src,2\n4,13,id3,src,3\n")
    store = open_store(tmp_path / "o")
    assert (store.kind, store.sources["o"].documents) == ("olmo", 3)
    assert store.tokens("o")[:].tolist() == FLAT
    stream = open_stream(DataConfig(store=str(tmp_path / "o"), seq_len=4, max_epochs=100), seed=0)
    assert stream.sequences([0]).shape == (1, 5)
    file.with_suffix(".csv.gz").unlink()
    with refused("data.token-width-unknown", "part-0.csv.gz"):
        open_store(tmp_path / "o")
    good = gzip.compress(b"0,3,x\n3,9,y\n")
    for content in (
        b"",
        b"plain",
        good[:-9],
        good[:12] + b"\xff\xff" + good[14:],
        gzip.compress(b"0\n"),
        gzip.compress(b"\xff,\xff"),
    ):
        file.with_suffix(".csv.gz").write_bytes(content)
        with refused("data.store-file-cut"):
            open_store(tmp_path / "o")


def test_real_npy_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    np.save(tmp_path / "n" / "a.npy", np.array(FLAT, dtype=np.uint32))
    assert open_store(tmp_path / "n").tokens("n")[:].tolist() == FLAT
    np.save(tmp_path / "n" / "a.npy", np.zeros((2, 2)))
    with refused("data.token-array-invalid", "(2, 2)"):
        open_store(tmp_path / "n")
    np.save(tmp_path / "n" / "a.npy", np.array([Canary(tmp_path / "canary")]), allow_pickle=True)
    with refused("data.token-array-invalid", "a.npy"):
        open_store(tmp_path / "n")
    np.save(tmp_path / "n" / "a.npy", np.array(FLAT, dtype=np.uint32))
    content = (tmp_path / "n" / "a.npy").read_bytes()
    for size in (8, 100, len(content) - 1):
        (tmp_path / "n" / "a.npy").write_bytes(content[:size])
        with refused("data.token-array-invalid", "a.npy"):
            open_store(tmp_path / "n")
    assert not (tmp_path / "canary").exists()


def test_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with refused("data.store-missing"):
        open_store(tmp_path)
