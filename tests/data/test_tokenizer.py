"""Tokenizer files of every kind are read as their own library reads them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tests.data.helpers import refused

from windlass.data.engines import choose
from windlass.data.tokenizer import JsonTokenizer, Tokenizer, byte_names, load_tokenizer, ranks_to_json, train_bpe


def test_training_is_deterministic_and_lossless(tmp_path: Path) -> None:
    texts = ["de zee is groot ", "het schip vaart op de zee\n"] * 20
    one, two = train_bpe(texts, 300, tmp_path / "a"), train_bpe(texts, 300, tmp_path / "b")
    assert one.path.read_bytes() == two.path.read_bytes()
    assert 257 < one.vocab_size <= 300
    for text in ("  de zee\t\n", "日本語 é\x00", "<|end_of_text|>"):
        assert one.decode(one.encode(text)) == text
    assert one.eos not in one.encode("<|end_of_text|>")
    assert one.encode("<|end_of_text|>", specials=True) == [one.eos]


def test_training_from_files_and_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("water water water")
    assert train_bpe([tmp_path / "t.txt"], 260, tmp_path / "out.json").vocab_size <= 260
    with refused("data.vocabulary-too-small", "100"):
        train_bpe(["x"], 100, tmp_path / "x")


def ranks_of() -> dict[bytes, int]:
    """256 bytes and three merges, worked by hand: "ab", "abc" (ab + c) and " ab" (space + ab)."""
    ranks = {bytes([b]): b for b in range(256)}
    return {**ranks, b"ab": 256, b"abc": 257, b" ab": 258}


def test_converted_ranks_give_the_same_ids() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from tokenizers import Tokenizer as Inner

    pattern = r" ?\p{L}+|\s+|[^\s\p{L}]+"
    converted = Inner.from_str(ranks_to_json(ranks_of(), pattern))
    reference = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks_of(), special_tokens={})
    for text in ("abc", " ab", "abab abc", "é ab\x00", "aabbcc ab"):
        assert converted.encode(text).ids == reference.encode(text)


def test_byte_names_are_256_different_printable_characters() -> None:
    assert len(set(byte_names())) == 256
    assert byte_names()[ord("A")] == "A"
    assert byte_names()[ord(" ")] == "Ġ"


def test_tekken(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    ranks = ranks_of()
    vocab = [{"rank": r, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, r in ranks.items()]
    config = {
        "pattern": r" ?\p{L}+|\s+|[^\s\p{L}]+",
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": 20 + 258,
        "default_num_special_tokens": 20,
        "version": "v3",
    }
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos, tokenizer.offset) == ("tekken", 278, 2, 20)
    assert tokenizer.encode("abc") == [257 + 20]
    assert tokenizer.encode(" ab") == [20 + 32, 20 + 256]  # rank 258 lies beyond the used vocabulary
    assert tokenizer.decode([20 + 257, 2]) == "abc</s>"
    with refused("data.special-tokens-unsupported", "tekken"):
        choose(tokenizer, specials=True, cache=tmp_path)


def test_ranks_of_an_unknown_count_are_refused(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(t).decode()} {r}" for t, r in ranks_of().items()]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))
    with refused("data.ranks-unknown", "259 ranks", "128,000 (llama-3)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text(lines[0] + "\n%%% what\n")
    with refused("data.tokenizer-damaged", "line 2"):
        load_tokenizer(tmp_path)


def test_llama3_ranks_by_count(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    tokens = [bytes([b]) for b in range(256)] + [
        bytes([97 + i // 26 % 26, 97 + i % 26, *str(i).encode()]) for i in range(128_000 - 256)
    ]
    (tmp_path / "tokenizer.model").write_text(
        "\n".join(f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens))
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos) == ("ranks", 128_256, 128_001)
    assert tokenizer.encode("<|end_of_text|>", specials=True) == [128_001]
    assert tokenizer.decode(tokenizer.encode("héllo <|end_of_text|>")) == "héllo <|end_of_text|>"


def test_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "t.txt").write_text("the ship sails on the sea\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"), model_prefix=str(tmp_path / "m"), vocab_size=17, minloglevel=2
    )
    tokenizer = load_tokenizer(tmp_path / "m.model")
    assert (tokenizer.kind, tokenizer.vocab_size) == ("sentencepiece", 17)
    assert tokenizer.eos == 2
    assert tokenizer.decode(tokenizer.encode("the sea")) == "the sea"
    with refused("data.special-tokens-unsupported", "sentencepiece"):
        choose(tokenizer, specials=True, cache=tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    for name, content in (("tokenizer.json", '{"model": 1}'), ("x.model", "garbage")):
        (tmp_path / name).write_text(content)
        with refused("data.tokenizer-damaged", name):
            load_tokenizer(tmp_path / name)


def test_missing_files_and_unknown_end_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with refused("data.tokenizer-missing", "none.json"):
        load_tokenizer(tmp_path / "none.json")
    with refused("data.tokenizer-missing"):
        load_tokenizer(tmp_path)
    with refused("data.eos-unknown", "<nope>"):
        load_tokenizer(tokenizer.path, eos="<nope>")
    with refused("data.eos-unknown", "600"):
        load_tokenizer(tokenizer.path, eos=600)
    assert load_tokenizer(tokenizer.path, eos=17).eos == 17


def test_the_end_token_of_a_folder_is_the_one_its_config_names(tmp_path: Path, tokenizer: Tokenizer) -> None:
    value = json.loads(tokenizer.path.read_text())
    value["added_tokens"].append({**value["added_tokens"][0], "id": 600, "content": "<turn>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<turn>"}}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos, loaded.vocab_size) == (600, 601)


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [("<turn>", 600)],
        [("<b>", 601), ("<a>", 600)],  # numbered in the order of the file
        [("<turn>", 640)],  # the library gives it 600, whatever the file says
        [("water", 600), ("<a>", 601)],  # a word that the model knows under another id
        [("<a>", 600), ("<a>", 600), ("<b>", 601)],
    ],
)
def test_a_glance_at_the_file_knows_what_the_library_knows(
    tmp_path: Path, tokenizer: Tokenizer, tokens: list[tuple[str, int]]
) -> None:
    value = json.loads(tokenizer.path.read_text())
    value["added_tokens"] += [{**value["added_tokens"][0], "id": i, "content": name} for name, i in tokens]
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    last = tokens[-1][0] if tokens else "<|end_of_text|>"
    quick = load_tokenizer(tmp_path, eos=last, glance=True)
    complete = load_tokenizer(tmp_path, eos=last)
    assert "_inner" not in quick.__dict__
    assert (quick.vocab_size, quick.eos, quick.hash) == (complete.vocab_size, complete.eos, complete.hash)
    assert isinstance(complete, JsonTokenizer)
    assert (complete.vocab_size, complete.eos) == (complete._inner.get_vocab_size(), complete._inner.token_to_id(last))
    assert quick.encode("water en wind") == complete.encode("water en wind")
    assert "parsed" not in complete.__dict__  # tens of megabytes that nobody needs any more


def test_the_library_has_the_last_word_on_added_tokens(tokenizer: Tokenizer) -> None:
    quick = load_tokenizer(tokenizer.path, glance=True)
    quick.__dict__["added"]["<|end_of_text|>"] = 7
    with refused("data.token-id-mismatch", "'<|end_of_text|>'", " 0", "7"):
        quick.encode("water")


def test_a_vocabulary_of_another_shape_is_left_to_the_library(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.Unigram([("a", -1.0), ("b", -2.0), ("</s>", 0.0)], unk_id=0)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path, glance=True)
    assert (loaded.vocab_size, loaded.eos) == (3, 2)
