"""Does the ledger say where everything came from, and the summary repeat it readably?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.config.sources import DataFile, Source
from windlass.data.inspect import by_language, compare_tokenizers, fertility, samples
from windlass.data.ledger import summary
from windlass.data.store import open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer


def make(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, licence: str = "CC0-1.0"
) -> Path:
    path = write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(130)])
    nl = Source(
        paths=[str(path)], language="nl", licence=licence, origin="a | b", consent="opt-in", notes="of the publisher"
    )
    tokenize(data_file({"news": nl, "other": [path]}, output=str(tmp_path / licence)))
    return tmp_path / licence


def test_the_hash_follows_the_terms(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    one, two = (open_store(make(data_file, write_jsonl, tmp_path, text, licence)) for licence in ("CC0-1.0", "MIT"))
    assert one.ledger_hash != two.ledger_hash
    assert one.ledger()["sources"]["news"]["consent"] == "opt-in"
    assert one.ledger()["sources"]["news"]["tokens"] == one.sources["news"].tokens


def test_summary(data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any) -> None:
    store = open_store(make(data_file, write_jsonl, tmp_path, text))
    page = summary(store)
    assert f"| news | nl | CC0-1.0 | a \\| b | opt-in | 130 | {store.sources['news'].tokens:,} | 50.0% |" in page
    assert "| other | not stated | **missing** | **missing** | not stated |" in page
    assert "documents read: 260; rejected as unreadable: 0; filtered out: 0" in page
    assert "- news: of the publisher" in page
    assert store.ledger_hash is not None
    assert store.ledger_hash in page


def test_fertility_and_samples(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, tokenizer: Tokenizer
) -> None:
    store = open_store(make(data_file, write_jsonl, tmp_path, text))
    texts = [text(i) for i in range(130)]
    sampled = [texts[i] for i in (0, 64, 128)]
    wanted = sum(len(tokenizer.encode(t)) for t in sampled) / sum(len(t.split()) for t in sampled)
    fit = fertility(store)["news"]
    assert fit["tokens_per_word"] == wanted
    assert fit["tokens_per_byte"] == store.sources["news"].tokens / sum(len(t.encode()) for t in texts)
    assert set(by_language(store)) == {"nl", "unknown"}
    shown = samples(store, 3)
    assert len(shown) == 6
    assert all(s["text"].removesuffix("<|end_of_text|>") in texts for s in shown)


def test_tokenizers_side_by_side(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["water wind"])
    rows = compare_tokenizers(data_file({"s": Source(paths=[str(path)], language="nl")}), {"t": tokenizer})
    tokens = len(tokenizer.encode("water wind"))
    assert rows == [
        {
            "language": "nl",
            "tokenizer": "t",
            "vocab_size": 600,
            "tokens_per_word": tokens / 2,
            "tokens_per_byte": tokens / 10,
            "bytes": 10,
        }
    ]
    json.dumps(rows)
