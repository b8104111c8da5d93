"""A reduced tokenizer gives the same ids as the complete one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.helpers import refused

from windlass.data.engines import SAMPLE, choose
from windlass.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer, reduce_json, train_bpe


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vocabulary large enough that most of it is left out."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    texts += [
        "De waarheid is als een \u00efdee \u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \u0440\u0443\u0441\u0441\u043a\u0438\u0439"
    ] * 5
    trained = train_bpe(texts, 3000, tmp_path_factory.mktemp("words"))
    return json.loads(trained.path.read_text(encoding="utf-8"))


def as_pairs(value: dict[str, Any], strings: bool) -> dict[str, Any]:
    """Both ways in which files write merges."""
    merges = [m.split(" ") if isinstance(m, str) else m for m in value["model"]["merges"]]
    return {**value, "model": {**value["model"], "merges": [" ".join(m) for m in merges] if strings else merges}}


def encode(value: dict[str, Any], texts: list[str]) -> list[list[int]]:
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(json.dumps(value))
    inner.encode_special_tokens = True
    return [inner.encode(text, add_special_tokens=False).ids for text in texts]


TEXT = st.one_of(st.text(), st.sampled_from([*SAMPLE, "def decode(self, s, _w=WHITESPACE.match):", "return obj, end"]))


@pytest.mark.parametrize("strings", [True, False])
@pytest.mark.parametrize("ignore_merges", [True, False])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=6))
def test_the_same_ids_as_the_whole_file(vocabulary: Any, strings: bool, ignore_merges: bool, texts: list[str]) -> None:
    value = as_pairs({**vocabulary, "model": {**vocabulary["model"], "ignore_merges": ignore_merges}}, strings)
    small = reduce_json(value, texts)
    assert small is not None
    assert len(small["model"]["vocab"]) < len(value["model"]["vocab"])
    assert encode(small, texts) == encode(value, texts)


def changed(value: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**value, **{k: v for k, v in keys.items() if k != "model"}, "model": {**value["model"], **keys.get("model", {})}}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"model": {"type": "Unigram"}},
        {"model": {"dropout": 0.1}},
        {"model": {"unk_token": "<unk>"}},
        {"model": {"byte_fallback": True}},
        {"model": {"end_of_word_suffix": "</w>"}},
        {"model": {"merges": None}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"added_tokens": [{"id": 9, "content": "windlass", "special": False}]},
    ],
    ids=str,
)
def test_where_something_else_has_a_say_the_whole_file_is_read(vocabulary: Any, keys: dict[str, Any]) -> None:
    assert reduce_json(vocabulary, ["windlass"]) is not None
    assert reduce_json(changed(vocabulary, **keys), ["windlass"]) is None


@pytest.mark.parametrize("engine", ["fastokens", "gigatoken", "tokenizers"])
def test_an_engine_is_compared_and_the_whole_reference_is_there_afterwards(tokenizer: Tokenizer, engine: str) -> None:
    fresh = load_tokenizer(tokenizer.path, glance=True)
    assert isinstance(fresh, JsonTokenizer)
    choose(fresh, engine, sample=["abc"])
    assert not {"_cut", "_inner", "parsed"} & set(fresh.__dict__)
    assert fresh.encode("another text altogether, 123") == tokenizer.encode("another text altogether, 123")


def added(content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 0, "content": content, "special": special, **flags}


def test_added_words_that_the_vocabulary_knows_keep_their_ids(vocabulary: Any) -> None:
    """A vocabulary may hold an added word as it is written, which no text has in the names of its bytes."""
    vocab = {**vocabulary["model"]["vocab"], "   ": len(vocabulary["model"]["vocab"])}
    value = changed(vocabulary, model={"vocab": vocab}, added_tokens=[added("   ", False), added("<|new|>", True)])
    texts = ["three   spaces", "none"]
    small = reduce_json(value, texts)
    assert small is not None
    assert encode(small, texts) == encode(value, texts)
    assert vocab["   "] in encode(small, texts)[0]
    assert [token["content"] for token in small["added_tokens"]] == ["<|new|>", "   "]


def test_a_vocabulary_with_holes_leaves_the_ids_of_added_tokens_to_the_library(vocabulary: Any, tmp_path: Path) -> None:
    import tokenizers

    vocab = {name: number if number < 2000 else number + 5 for name, number in vocabulary["model"]["vocab"].items()}
    value = changed(vocabulary, model={"vocab": vocab}, added_tokens=[added("<|new|>", True)])
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    fresh = load_tokenizer(tmp_path, eos="<|new|>", glance=True)
    assert fresh.eos == tokenizers.Tokenizer.from_str(json.dumps(value)).token_to_id("<|new|>")
    assert "added" not in fresh.__dict__


def test_a_library_that_numbers_added_tokens_by_another_rule_is_noticed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token's id was read off the file; the comparison asks the library for the same rule."""
    from windlass.data import tokenizer as module

    value = json.loads(tokenizer.path.read_text(encoding="utf-8"))
    value["added_tokens"] = [{"id": 7, "content": "<|done|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    rule: Callable[[Any], Any] = module._ids_in_file

    def other(value: Any) -> Any:
        vocab, added = rule(value)
        return vocab, {name: number + 1 for name, number in added.items()}

    choose(load_tokenizer(tmp_path, glance=True), "tokenizers")
    monkeypatch.setattr(module, "_ids_in_file", other)
    with refused("data.token-id-mismatch"):
        choose(load_tokenizer(tmp_path, glance=True), "tokenizers")
