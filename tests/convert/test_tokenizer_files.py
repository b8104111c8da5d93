"""Exported tokenizers give the same ids, whatever kind of file they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.convert import tokenizer_files
from windlass.convert.tokenizer_files import write_tokenizer
from windlass.convert.vocabulary import old_pieces, token_bytes
from windlass.data.tokenizer import _CL100K, RanksTokenizer, Tokenizer, load_tokenizer
from windlass.errors import DataError

pytest.importorskip("tiktoken")


def ranks(folder: Path, first: int) -> RanksTokenizer:
    """256 bytes and some merges; `first` ids before them are special, as in tekken."""
    merged = [b"de", b" de", b"het", b" het", b"he", b" h", b" he", b"12", b"na"]
    table = {token: number for number, token in enumerate([bytes([b]) for b in range(256)] + sorted(merged, key=len))}
    specials = (("<unk>", 0), ("<s>", 1), ("</s>", 2)) if first else (("<|end_of_text|>", len(table)),)
    size = len(table) + max(first, 1)
    (folder / "ranks").write_bytes(b"made by hand")
    eos = 2 if first else len(table)
    return RanksTokenizer(folder / "ranks", "ranks", size, eos, _CL100K, specials, table, offset=first)


@pytest.mark.parametrize("first", [0, 10])
def test_ranks_become_a_json_with_the_same_ids(tmp_path: Path, first: int) -> None:
    tokenizer = ranks(tmp_path, first)
    write_tokenizer(tokenizer, tmp_path, max_length=64)
    again = load_tokenizer(tmp_path / "tokenizer.json")
    for text in ("de het naïve 12345", "  hé\n日本", "hethet dede"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == text
    assert again.eos == tokenizer.eos
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("de het 12", add_special_tokens=False).input_ids == tokenizer.encode("de het 12")
    assert theirs.eos_token_id == tokenizer.eos


def test_a_tokenizer_that_would_change_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tokenizer_files.json_of_ranks

    def shifted(tokenizer: RanksTokenizer) -> str:
        value = json.loads(real(tokenizer))
        vocab = value["model"]["vocab"]
        vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
        return json.dumps(value)

    monkeypatch.setattr(tokenizer_files, "json_of_ranks", shifted)
    with pytest.raises(DataError) as error:
        write_tokenizer(ranks(tmp_path, 0), tmp_path, max_length=64)
    assert error.value.code == "convert.tokenizer-ids-differ"


def test_pieces_of_the_same_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    old, new = tokenizer, ranks(tmp_path, 10)
    pieces = old_pieces(old, new)
    assert len(pieces) == new.vocab_size and pieces[new.eos] == [old.eos]
    for number, token in enumerate(token_bytes(new)):
        if number >= 10:
            assert b"".join(token_bytes(old)[i] for i in pieces[number]) == token, token
    assert pieces[5] == []  # an id that stands for nothing
