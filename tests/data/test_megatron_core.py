"""Does megatron-core itself read what we write, and we what it writes? A dev dependency on Linux x86-64, where it must not be missing."""

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

# Not importorskip: a test environment that lost the package would pass without having looked.
from megatron.core.datasets import indexed_dataset as indexed


def test_megatron_reads_our_store(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    tokenize(data_file({"s": [write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(80)])]}))
    theirs = indexed.IndexedDataset(str(tmp_path / "store" / "s-train-00000"))
    ours = open_store(tmp_path / "store").tokens("s")
    spans = list(ours.documents())
    assert len(theirs) == len(spans) == 80
    assert theirs.document_indices.tolist() == list(range(81))
    for number, (start, stop) in enumerate(spans):
        assert np.array_equal(theirs[number], ours[start:stop])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons_store(tmp_path: Path, dtype: Any) -> None:
    import torch

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
    documents = [[1, 2, 3], [4], [5, 6]]
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "m.idx"))
    array = open_store(tmp_path / "m").tokens("m")
    assert [array[a:b].tolist() for a, b in array.documents()] == documents
