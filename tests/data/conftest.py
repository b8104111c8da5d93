"""Small real tokenizers, corpora and stores that the data tests share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import index_bytes

from windlass.config.sources import DataFile, DataSource
from windlass.data.tokenizer import Tokenizer, train_bpe

WORDS = [
    "de",
    "het",
    "een",
    "water",
    "schip",
    "lier",
    "touw",
    "data",
    "model",
    "token",
    "wind",
    "kracht",
    "samen",
    "draait",
    "grote",
    "zware",
    "last",
    "hijst",
    "mannen",
    "zee",
    "haven",
    "über",
    "naïve",
    "日本語",
    "код",
    "12345",
    "<|end_of_text|>",
]


def make_text(number: int, max_words: int = 60) -> str:
    """A text that depends on its number only; with odd spaces and line ends, which must survive."""
    dice = random.Random(number)
    parts = [
        dice.choice(WORDS) + dice.choice([" ", " ", " ", "\n", "  ", ". ", "\t"])
        for _ in range(dice.randint(1, max_words))
    ]
    return f" {number} " + "".join(parts)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe([make_text(i) for i in range(300)], 600, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def write_jsonl() -> Callable[[Path, list[str]], Path]:
    def write(path: Path, texts: list[str]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps({"id": i, "text": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)),
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture
def data_file(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., DataFile]:
    """A data file with sources given as name=[paths]; other keys pass."""

    def make(sources: dict[str, Any], **keys: Any) -> DataFile:
        tables = {
            name: value if isinstance(value, DataSource) else DataSource(paths=[str(p) for p in value])
            for name, value in sources.items()
        }
        keys = {
            "output": str(tmp_path / "store"),
            "tokenizer": str(tokenizer.path),
            "workers": 1,
            "chunk": 65_536,
            "engine": "tokenizers",
            **keys,
        }
        return DataFile(sources=tables, **keys)

    return make


@pytest.fixture
def write_megatron() -> Callable[[Path, list[list[int]], str], Path]:
    """A store as Megatron writes it, from lists of ids; returns the prefix."""

    def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        kind = np.dtype(dtype)
        prefix.with_suffix(".bin").write_bytes(np.array([t for d in documents for t in d], dtype=kind).tobytes())
        prefix.with_suffix(".idx").write_bytes(index_bytes(np.array([len(d) for d in documents], dtype=np.int32), kind))
        return prefix

    return write


@pytest.fixture
def text() -> Callable[..., str]:
    return make_text
