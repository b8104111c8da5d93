"""Where do the embeddings of a new tokenizer begin? From the old tokenizer's pieces of the same text: no token begins from noise."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.data.tokenizer import JsonTokenizer, RanksTokenizer, SentencePieceTokenizer, Tokenizer, byte_names
from windlass.errors import ConfigError
from windlass.models import padded_vocab

ROWS = ("embed.weight", "head.weight")


def grow(
    recipe: Recipe, state: dict[str, Tensor], old: Tokenizer, new: Tokenizer
) -> tuple[Recipe, dict[str, Tensor], str]:
    """Recipe and weights for the new tokenizer, and a sentence that says what was done."""
    if recipe.model.family == "hf":
        raise ConfigError(
            "evaluate.vocabulary-family-hf-model",
            "the vocabulary of a family hf model cannot grow here",
            hint="a model of Llama's own form can; see `windlass import`",
        )
    pieces = pieces_of(old, new)
    vocab = recipe.model.vocab or old.vocab_size
    grown = {name: _rows(tensor, pieces, vocab) if name in ROWS else tensor for name, tensor in state.items()}
    kept = sum(len(part) == 1 for part in pieces)
    empty = sum(not part for part in pieces)
    said = (
        f"vocabulary {vocab:,} -> {new.vocab_size:,}: {kept:,} tokens keep or take one old row, "
        f"{len(pieces) - kept - empty:,} begin as the mean of their old pieces, {empty:,} as the mean of all"
    )
    model = recipe.model.model_copy(update={"vocab": new.vocab_size})
    return recipe.model_copy(update={"model": model}), grown, said


def _rows(table: Tensor, pieces: list[list[int]], vocab: int) -> Tensor:
    """New rows in fp32 sums, padded with zeros to the aligned size."""
    made = torch.zeros(padded_vocab(len(pieces)), table.shape[1], dtype=table.dtype)
    mean = table[:vocab].float().mean(0)
    for number, part in enumerate(pieces):
        made[number] = (table[part].float().mean(0) if part else mean).to(table.dtype)
    return made


def pieces_of(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
    """For each new id, the old ids that stand for the same text; empty where there is no text."""
    table = {token: number for number, token in reversed(list(enumerate(token_bytes(old)))) if token}
    found = []
    for number, token in enumerate(token_bytes(new)):
        if number == new.eos and old.eos is not None:  # the end of a document, whatever its name
            found.append([old.eos])
        elif not token:
            found.append([])
        else:
            found.append([table[token]] if token in table else _cut(token, old, table))
    return found


def _cut(token: bytes, old: Tokenizer, table: dict[bytes, int]) -> list[int]:
    try:
        return old.encode(token.decode("utf-8"))
    except UnicodeDecodeError:  # part of a character: its bytes
        return [table[bytes([b])] for b in token if bytes([b]) in table]


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each id stands for, by id; empty for an id without text."""
    if isinstance(tokenizer, JsonTokenizer):
        added = tokenizer._inner.get_added_tokens_decoder()
        return [_json_bytes(tokenizer, number, added) for number in range(tokenizer.vocab_size)]
    if isinstance(tokenizer, RanksTokenizer):
        made = [b""] * tokenizer.vocab_size
        for token, rank in tokenizer.ranks.items():
            made[rank + tokenizer.first] = token
        for name, number in tokenizer.specials:
            made[number] = name.encode()
        return made
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return [_piece_bytes(tokenizer.inner, number) for number in range(tokenizer.vocab_size)]


@lru_cache(maxsize=1)
def _bytes_by_name() -> dict[str, int]:
    return {name: number for number, name in enumerate(byte_names())}


def _json_bytes(tokenizer: JsonTokenizer, number: int, added: dict[int, object]) -> bytes:
    token, table = tokenizer._inner.id_to_token(number), _bytes_by_name()
    if token is None:
        return b""
    if number not in added and all(character in table for character in token):
        return bytes(table[character] for character in token)
    return _marked_bytes(token)


def _marked_bytes(token: str) -> bytes:
    """SentencePiece's way: <0x41> is a byte, the low line is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _piece_bytes(inner: object, number: int) -> bytes:
    if inner.is_control(number) or inner.is_unknown(number) or inner.is_unused(number):  # type: ignore[attr-defined]
        return inner.id_to_piece(number).encode()  # type: ignore[attr-defined]
    return _marked_bytes(inner.id_to_piece(number))  # type: ignore[attr-defined]
