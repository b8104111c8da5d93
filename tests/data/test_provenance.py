"""Ledger, summary of training content, fertility and samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windlass.config import validate
from windlass.config.sources import DataFile, DataSource
from windlass.data import joining
from windlass.data.inspect import by_language, by_source, compare_tokenizers, samples
from windlass.data.store import open_store, summary
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError


def make(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, licence: str = "CC0-1.0"
) -> Path:
    path = write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(130)])
    nl = DataSource(
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


def test_terms_can_be_said_better_later(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Licence, origin, kind and the like change no token: a finished store takes them up without being made again."""
    source = DataSource(paths=[str(write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(30)]))])
    file = data_file({"news": source})
    tokenize(file)
    before, store = (tmp_path / "store" / "news-train-00000.bin").stat(), open_store(file.output)
    assert store.ledger()["sources"]["news"]["kind"] is None
    better = data_file({"news": source.model_copy(update={"kind": "licensed", "licence": "by contract"})})
    with monkeypatch.context() as patch:  # the process dies after the ledger was written, before the manifest
        patch.setattr(joining, "hash_file", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokenize(better)
    again = tokenize(better)
    assert (again.restated, again.chunks_done, again.tokens) == (True, 0, store.sources["news"].tokens)
    terms = open_store(file.output)
    assert (terms.sources["news"].kind, terms.ledger()["sources"]["news"]["licence"]) == ("licensed", "by contract")
    assert terms.ledger_hash != store.ledger_hash
    assert terms.verify() == []
    assert (tmp_path / "store" / "news-train-00000.bin").stat().st_mtime_ns == before.st_mtime_ns
    assert not tokenize(better).restated


def test_the_kinds_are_those_of_the_report() -> None:
    from windlass.report.model_card import KINDS

    with pytest.raises(ConfigError) as caught:
        validate(
            DataFile,
            {"output": "o", "tokenizer": "t", "sources": {"a": {"paths": ["a"], "kind": "found"}}},
            "data.toml",
        )
    assert "sources.a.kind" in caught.value.message
    for kind in KINDS:
        assert DataSource(paths=["a"], kind=kind).kind == kind


def test_summary(data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any) -> None:
    store = open_store(make(data_file, write_jsonl, tmp_path, text))
    page = summary(store)
    assert (
        f"| news | nl | CC0-1.0 | a \\| b | opt-in | not stated | 130 | {store.sources['news'].tokens:,} | 50.0 % |"
        in page
    )
    assert "| other | not stated | **missing** | **missing** | not stated |" in page
    assert "documents read: 260; rejected as unreadable: 0; filtered out: 0" in page
    assert "- news: of the publisher" in page
    assert store.ledger_hash is not None
    assert store.ledger_hash in page


def test_what_the_eu_asks_of_a_crawl_is_in_ledger_and_summary(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    terms = {
        "collected": "2019-03 to 2024-06",
        "crawler": "OurBot, obeys robots.txt",
        "opt_out": "ai.txt, before crawling",
    }
    path = write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(30)])
    file = data_file(
        {"web": DataSource(paths=[str(path)], kind="web", **terms), "other": DataSource(paths=[str(path)])}
    )
    tokenize(file)
    store = open_store(file.output)
    assert {key: store.ledger()["sources"]["web"][key] for key in terms} == terms
    page = summary(store)
    assert "## Period of collection\n\n- web: 2019-03 to 2024-06\n\n" in page
    assert "## Crawlers\n\n- web: OurBot, obeys robots.txt\n\n" in page
    assert "## Reservations of rights (opt-outs)\n\n- web: ai.txt, before crawling\n" in page


def test_fertility_and_samples(
    data_file: Callable[..., DataFile], write_jsonl: Any, tmp_path: Path, text: Any, tokenizer: Tokenizer
) -> None:
    store = open_store(make(data_file, write_jsonl, tmp_path, text))
    texts = [text(i) for i in range(130)]
    sampled = [texts[i] for i in (0, 64, 128)]
    wanted = sum(len(tokenizer.encode(t)) for t in sampled) / sum(len(t.split()) for t in sampled)
    fit = by_source(store)["news"]
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
    rows = compare_tokenizers(data_file({"s": DataSource(paths=[str(path)], language="nl")}), {"t": tokenizer})
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
