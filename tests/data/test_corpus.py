"""The demo corpus: reproducible, of the requested size, ready to tokenize."""

from __future__ import annotations

import json
from pathlib import Path

from tests.data.helpers import refused

from windlass.data.corpus import data_file, gather
from windlass.data.store import open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import train_bpe


def test_gather_and_tokenize(tmp_path: Path) -> None:
    one, two = gather(tmp_path / "a", 100_000), gather(tmp_path / "b", 100_000)
    assert set(one) == {"code", "docs"}
    assert all(one[name].file.read_bytes() == two[name].file.read_bytes() for name in one)
    assert 60_000 < sum(source.bytes for source in one.values()) <= 100_000
    texts = [json.loads(line)["text"] for source in one.values() for line in source.file.open()]
    tokenizer = train_bpe(texts, 512, tmp_path / "tok")
    tokenize(data_file(one, tokenizer=tokenizer.path, output=tmp_path / "store").model_copy(update={"workers": 1}))
    store = open_store(tmp_path / "store")
    assert store.sources["code"].licence == "PSF-2.0"
    assert sum(source.documents or 0 for source in store.sources.values()) == len(texts)


def test_nothing_asked_for(tmp_path: Path) -> None:
    with refused("data.corpus-empty"):
        gather(tmp_path, 0)
