"""All ranks together see one order, whatever their number, also after a resume."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import refused

from windlass.config import DataConfig, DataStage
from windlass.config.sources import DataFile, DataSource
from windlass.data.store import open_store
from windlass.data.stream import StoreStream, SyntheticStream, open_stream
from windlass.data.tokenize import tokenize
from windlass.errors import ConfigError


@pytest.fixture
def store(write_megatron: Any, tmp_path: Path) -> Path:
    """Two sources of which every token names its own position: a counts up from 0, b from 10,000."""
    lengths = [7, 1, 30, 12, 50, 3, 60, 37] * 10
    starts = np.cumsum([0, *lengths])
    for name, base in (("a", 0), ("b", 10_000)):
        documents = [list(range(base + s, base + e)) for s, e in itertools.pairwise(starts)]
        write_megatron(tmp_path / "m" / name, documents, "<i4")
    return tmp_path / "m"


def config(store: Path, **keys: Any) -> DataConfig:
    return DataConfig(store=str(store), seq_len=16, max_epochs=1000, **keys)


def deliver(store: Path, ranks: int, steps: range, batch: int = 24, **keys: Any) -> np.ndarray:
    """Global batches as `ranks` separate processes would read them: each opens the store itself and takes its own part."""
    parts = []
    for rank in range(ranks):
        stream = open_stream(config(store, **keys), seed=11)
        per = batch // ranks
        parts.append(np.stack([stream.sequences(step * batch + rank * per + np.arange(per)) for step in steps]))
    return np.concatenate(parts, axis=1)


def test_one_and_eight_ranks_deliver_the_same_batches_also_after_a_resume(store: Path) -> None:
    single = deliver(store, 1, range(10))
    assert np.array_equal(single, deliver(store, 8, range(10)))
    resumed = np.concatenate(
        [deliver(store, 8, range(4)), deliver(store, 3, range(4, 7)), deliver(store, 2, range(7, 10))]
    )
    assert np.array_equal(single, resumed)


def test_windows_are_stretches_of_their_source(store: Path) -> None:
    stream = open_stream(config(store, mix={"a": 0.5, "b": 0.5}), seed=1)
    tokens = stream.sequences(np.arange(64))
    source, window = stream.identity(np.arange(64))
    wanted = source[:, None] * 10_000 + window[:, None] * 16 + np.arange(17)[None, :]
    assert tokens.dtype == np.int32
    assert np.array_equal(tokens, wanted)


def test_no_token_is_an_input_twice_in_one_pass(store: Path) -> None:
    stream = open_stream(config(store), seed=2)
    windows = 2 * ((2000 - 1) // 16)
    inputs = stream.sequences(np.arange(windows))[:, :-1].ravel()
    assert len(np.unique(inputs)) == len(inputs) == windows * 16


def test_stage_takes_over_at_its_token(store: Path) -> None:
    stream = open_stream(config(store, mix={"a": 1.0}, stages=[DataStage(start=16 * 40, mix={"b": 1.0})]), seed=3)
    source, _ = stream.identity(np.arange(80))
    assert source.tolist() == [0] * 40 + [1] * 40


def test_document_ids_count_the_borders_inside_each_sequence(store: Path) -> None:
    stream = open_stream(config(store), seed=4)
    starts = set(np.cumsum([0, *([7, 1, 30, 12, 50, 3, 60, 37] * 10)])[:-1].tolist())
    tokens, ids = stream.sequences(np.arange(50)), stream.document_ids(np.arange(50))
    for row in range(50):
        number, wanted = 0, []
        for place, token in enumerate(tokens[row] % 10_000):
            number += place > 0 and int(token) in starts
            wanted.append(number)
        assert ids[row].tolist() == wanted


def test_repetition_beyond_the_limit_is_refused(store: Path) -> None:
    with refused("data.source-repeated", "a: 2.", "2,000 tokens, at most 2", "data.epochs"):
        open_stream(
            DataConfig(store=str(store), seq_len=16, mix={"a": 0.9, "b": 0.1}, epochs={"a": 2.0}, tokens=5600), seed=0
        )


def test_epochs_report(store: Path) -> None:
    report = open_stream(config(store, mix={"a": 0.75, "b": 0.25}), seed=0).epochs(16 * 1024)
    assert [(p.source, p.trained) for p in report] == [("a", 16 * 768), ("b", 16 * 256)]
    assert report[0].epochs == pytest.approx(768 / 124)


def test_a_store_with_larger_ids_than_the_model_is_refused(
    store: Path, data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    tokenize(data_file({"x": [write_jsonl(tmp_path / "x.jsonl", [text(i) for i in range(50)])]}))
    largest = open_store(tmp_path / "store").max_token or 0
    open_stream(DataConfig(store=str(tmp_path / "store"), seq_len=16), seed=0, vocab=largest + 1)
    with refused("data.vocabulary-too-small", f"token {largest}", "100"):
        open_stream(DataConfig(store=str(tmp_path / "store"), seq_len=16), seed=0, vocab=100)


def test_a_changed_token_beyond_the_vocabulary_is_refused_where_it_is_read(
    data_file: Callable[..., DataFile], write_jsonl: Any, write_megatron: Any, tmp_path: Path, text: Any
) -> None:
    tokenize(data_file({"x": [write_jsonl(tmp_path / "x.jsonl", [text(i) for i in range(50)])]}))
    shard = tmp_path / "store" / "x-train-00000.bin"
    shard.write_bytes(b"\xff\xff" + shard.read_bytes()[2:])  # the manifest still says that the largest is 599
    stream = open_stream(DataConfig(store=str(tmp_path / "store"), seq_len=16, max_epochs=99), seed=0, vocab=600)
    with refused("data.token-outside-vocabulary", "65,535", "600"):
        for number in range(200):
            stream.sequences([number])
    write_megatron(tmp_path / "wide", [[1, 2, 2**32 + 5] * 20], "<i8")  # the low 32 bits are a valid id
    with refused("data.token-outside-vocabulary", "4,294,967,301"):
        open_stream(config(tmp_path / "wide"), seed=0, vocab=600).sequences([0])


def test_too_little_data_and_a_missing_split_are_refused(store: Path) -> None:
    with refused("data.too-few-tokens", "4,097"):
        open_stream(DataConfig(store=str(store), seq_len=4096), seed=0)
    with refused("data.split-missing", "'validation'"):
        open_stream(config(store), seed=0, split="validation")


def test_lawful_policy_lists_what_is_missing(
    store: Path, data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    with refused("data.source-unlawful", "2 of 2 sources", "a: licence and origin missing"):
        open_stream(config(store, policy="lawful"), seed=0)
    path = write_jsonl(tmp_path / "x.jsonl", [text(i) for i in range(50)])
    tokenize(data_file({"x": DataSource(paths=[str(path)], licence="CC0-1.0", origin="here")}, policy="lawful"))
    stream = open_stream(DataConfig(store=str(tmp_path / "store"), seq_len=16, policy="lawful"), seed=0)
    assert isinstance(stream, StoreStream)
    assert stream.ledger_hash == open_store(tmp_path / "store").ledger_hash is not None


def test_synthetic_tokens_have_the_same_interface() -> None:
    stream = open_stream(DataConfig(seq_len=32), seed=1, vocab=50)
    assert isinstance(stream, SyntheticStream)
    tokens = stream.sequences(np.arange(100))
    assert tokens.shape == (100, 33)
    assert tokens.min() == 0
    assert tokens.max() == 49
    assert np.array_equal(tokens[[5, 3]], stream.sequences([5, 3]))
    assert not np.array_equal(
        tokens, SyntheticStream(DataConfig(seq_len=32), seed=2, vocab=50).sequences(np.arange(100))
    )
    assert stream.document_ids([0]).sum() == 0
    with refused("data.vocabulary-missing", error=ConfigError):
        open_stream(DataConfig(), seed=0)


def test_the_validation_split_is_read_whole_in_its_natural_mix(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    sources = {
        name: [write_jsonl(tmp_path / f"{name}.jsonl", [text(i + n) for i in range(150)])]
        for name, n in (("x", 0), ("y", 1000))
    }
    tokenize(data_file(sources, validation=0.3))
    stream = open_stream(
        DataConfig(store=str(tmp_path / "store"), seq_len=16, mix={"x": 1.0}), seed=0, split="validation"
    )
    source, _ = stream.identity(np.arange(int(stream.mixture.windows.sum())))  # type: ignore[union-attr]
    assert set(source.tolist()) == {0, 1}


def test_the_system_is_told_of_every_sequence_before_the_first_is_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that a cold disk fetches megabytes around each, one sequence after the other."""
    calls: list[tuple[int, int]] = []

    class Mapped(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            assert option == mmap.MADV_WILLNEED
            calls.append((start, start + length))

    monkeypatch.setattr("windlass.data.shards.mmap.mmap", Mapped)
    stream = open_stream(config(store), seed=11)
    assert isinstance(stream, StoreStream)
    for array in stream.arrays:
        monkeypatch.setattr(array, "copy", lambda start, out, real=array.copy: (calls.append((0, 0)), real(start, out)))
    stream.sequences(np.arange(6))
    _, window = stream.identity(np.arange(6))
    ends = [int(place * 16 + 17) * 4 for place in window]
    assert calls == [((end - 17 * 4) // mmap.PAGESIZE * mmap.PAGESIZE, end) for end in ends] + [(0, 0)] * 6
