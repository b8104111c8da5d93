"""Are tokenizer files of every kind read as their own library reads them?"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from windlass.data.engines import choose
from windlass.data.tokenizer import JsonTokenizer, Tokenizer, byte_names, load_tokenizer, ranks_to_json, train_bpe
from windlass.errors import DataError


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
    with pytest.raises(DataError, match="too small"):
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
    with pytest.raises(DataError, match="a tekken tokenizer never reads them from text"):
        choose(tokenizer, specials=True, cache=tmp_path)


def test_ranks_of_an_unknown_count_are_refused(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(t).decode()} {r}" for t, r in ranks_of().items()]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))
    with pytest.raises(DataError, match="has 259 ranks, which no tokenizer known here has") as caught:
        load_tokenizer(tmp_path)
    assert "128,000 (llama-3)" in (caught.value.hint or "")
    (tmp_path / "tokenizer.model").write_text(lines[0] + "\n%%% what\n")
    with pytest.raises(DataError, match="line 2: not a base64 token"):
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
    with pytest.raises(DataError, match="a sentencepiece tokenizer never reads them from text"):
        choose(tokenizer, specials=True, cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("tokenizer.json", '{"model": 1}', "not a tokenizers JSON"),
        ("x.model", "garbage", "no tokenizer that windlass knows"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str, what: str) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=what):
        load_tokenizer(tmp_path / name)


def test_missing_files_and_unknown_end_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(DataError, match="holds no tokenizer file"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no token '<nope>'"):
        load_tokenizer(tokenizer.path, eos="<nope>")
    with pytest.raises(DataError, match="outside the tokenizer's 600 ids"):
        load_tokenizer(tokenizer.path, eos=600)
    assert load_tokenizer(tokenizer.path, eos=17).eos == 17


def test_the_end_token_of_a_folder_is_the_one_its_config_names(tmp_path: Path, tokenizer: Tokenizer) -> None:
    value = json.loads(tokenizer.path.read_text())
    value["added_tokens"].append({**value["added_tokens"][0], "id": 600, "content": "<turn>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<turn>"}}')
    found = load_tokenizer(tmp_path)
    assert (found.eos, found.vocab_size) == (600, 601)


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
    whole = load_tokenizer(tmp_path, eos=last)
    assert "_inner" not in quick.__dict__
    assert (quick.vocab_size, quick.eos, quick.hash) == (whole.vocab_size, whole.eos, whole.hash)
    assert isinstance(whole, JsonTokenizer)
    assert (whole.vocab_size, whole.eos) == (whole._inner.get_vocab_size(), whole._inner.token_to_id(last))
    assert quick.encode("water en wind") == whole.encode("water en wind")
    assert "parsed" not in whole.__dict__  # tens of megabytes that nobody needs any more


def test_the_library_has_the_last_word_on_added_tokens(tokenizer: Tokenizer) -> None:
    quick = load_tokenizer(tokenizer.path, glance=True)
    quick.__dict__["added"]["<|end_of_text|>"] = 7
    with pytest.raises(DataError, match=r"'<\|end_of_text\|>' is 0 to the tokenizers library, 7 was expected"):
        quick.encode("water")


def test_a_vocabulary_of_another_shape_is_left_to_the_library(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.Unigram([("a", -1.0), ("b", -2.0), ("</s>", 0.0)], unk_id=0)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path, glance=True)
    assert (found.vocab_size, found.eos) == (3, 2)
