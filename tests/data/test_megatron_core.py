"""megatron-core reads our stores and we read its. Required on Linux x86-64."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.config.sources import DataFile
from windlass.data.store import open_store
from windlass.data.tokenize import tokenize

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("megatron-core has no wheels for this platform", allow_module_level=True)


@pytest.fixture(scope="module")
def indexed() -> Any:
    """Not importorskip: a test environment that lost the package would pass without having looked. Not at the top: it
    takes seconds, and every process of a test run reads this file."""
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


@pytest.mark.parametrize("marks", [False, True])
def test_megatron_reads_our_store(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, indexed: Any, marks: bool
) -> None:
    tokenize(data_file({"s": [write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(80)])]}, document_marks=marks))
    theirs = indexed.IndexedDataset(str(tmp_path / "store" / "s-train-00000"))
    ours = open_store(tmp_path / "store").tokens("s")
    spans = list(ours.documents())
    assert len(theirs) == len(spans) == 80
    assert theirs.document_indices.tolist() == (list(range(81)) if marks else [0, 80])
    for number, (start, stop) in enumerate(spans):
        assert np.array_equal(theirs[number], ours[start:stop])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons_store(indexed: Any, tmp_path: Path, dtype: Any) -> None:
    import torch

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
    documents = [[1, 2, 3], [4], [5, 6]]
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "m.idx"))
    array = open_store(tmp_path / "m").tokens("m")
    assert [array[a:b].tolist() for a, b in array.documents()] == documents


def test_megatron_s_data_for_language_models_does_not_look_at_the_marks(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, indexed: Any
) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Words:
        eod, pad, vocab_size, unique_identifiers = 0, 1, 65_536, {"class": "Words"}

    source = {"s": [write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(200)])]}
    delivered = []
    for marks in (False, True):
        folder = tmp_path / f"store-{marks}"
        tokenize(data_file(source, output=str(folder), document_marks=marks))
        prefix = str(folder / "s-train-00000")
        low = indexed.IndexedDataset(prefix)
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=64, split="1", tokenizer=Words(), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, path_to_cache=str(tmp_path / f"cache-{marks}"),
        )  # fmt: skip
        count = GPTDataset.numel_low_level_dataset(low)
        dataset = GPTDataset(low, prefix, np.arange(count, dtype=np.int32), 50, Split.train, config)
        delivered.append([dataset[i]["tokens"].tolist() for i in range(len(dataset))])
        assert count == 200
    assert delivered[0] == delivered[1] and len(delivered[0]) >= 50
