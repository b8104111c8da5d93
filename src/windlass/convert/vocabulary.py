"""Embedding rows for a new tokenizer, from the old tokenizer's pieces of the same text: no row starts from noise."""

from typing import Any

import torch
from torch import Tensor

from windlass.blocks.embedding.spec import padded_rows
from windlass.config import Recipe
from windlass.convert.config_json import format_of
from windlass.data.tokenizer import JsonTokenizer, RanksTokenizer, SentencePieceTokenizer, Tokenizer, byte_names
from windlass.errors import ConfigError

VOCABULARY_WEIGHTS = ("embed.weight", "head.weight")


def grow_vocabulary(
    recipe: Recipe, state: dict[str, Tensor], old: Tokenizer, new: Tokenizer
) -> tuple[Recipe, dict[str, Tensor], str]:
    """Recipe and weights for the new tokenizer, and a sentence that says what was done."""
    if format_of(recipe.model).wraps_transformers:
        raise ConfigError(
            "convert.vocabulary-of-transformers-model",
            "the vocabulary of a model of family hf cannot grow",
            hint="use a model that `windlass import` reads as one of windlass's own families",
        )
    pieces = old_pieces(old, new)
    vocab = recipe.model.vocab or old.vocab_size
    grown = dict(state)
    for name, table in ((name, state[name]) for name in VOCABULARY_WEIGHTS if name in state):
        grown[name] = torch.zeros(padded_rows(len(pieces)), table.shape[1], dtype=table.dtype)
        mean = table[:vocab].float().mean(0)
        for token, ids in enumerate(pieces):
            grown[name][token] = (table[ids].float().mean(0) if ids else mean).to(table.dtype)
    single, empty = sum(len(ids) == 1 for ids in pieces), sum(not ids for ids in pieces)
    note = (
        f"vocabulary {vocab:,} -> {new.vocab_size:,}: {single:,} tokens copy one old row, "
        f"{len(pieces) - single - empty:,} start as the mean of their old pieces, {empty:,} as the mean of all rows"
    )
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab": new.vocab_size})}), grown, note


def old_pieces(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
    """For each new id, the old ids of the same text; empty for an id without text."""
    id_of_bytes = {token: number for number, token in reversed(list(enumerate(token_bytes(old)))) if token}
    pieces = []
    for number, token in enumerate(token_bytes(new)):
        if number == new.eos and old.eos is not None:  # the end of a document, whatever its name
            pieces.append([old.eos])
        elif not token or token in id_of_bytes:
            pieces.append([id_of_bytes[token]] if token else [])
        else:
            try:
                pieces.append(old.encode(token.decode("utf-8")))
            except UnicodeDecodeError:  # part of a character: its single bytes
                pieces.append([id_of_bytes[bytes([b])] for b in token if bytes([b]) in id_of_bytes])
    return pieces


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each id stands for; empty for an id without text."""
    ids = range(tokenizer.vocab_size)
    if isinstance(tokenizer, RanksTokenizer):
        texts = {rank + tokenizer.offset: token for token, rank in tokenizer.ranks.items()}
        texts |= {number: name.encode() for name, number in tokenizer.specials}
        return [texts.get(number, b"") for number in ids]
    if isinstance(tokenizer, JsonTokenizer):
        added = tokenizer._inner.get_added_tokens_decoder()
        byte_of_name = {name: number for number, name in enumerate(byte_names())}

        def json_bytes(number: int) -> bytes:
            token = tokenizer._inner.id_to_token(number) or ""
            if number not in added and all(character in byte_of_name for character in token):
                return bytes(byte_of_name[character] for character in token)
            return _sentencepiece_bytes(token)

        return [json_bytes(number) for number in ids]
    assert isinstance(tokenizer, SentencePieceTokenizer)
    inner: Any = tokenizer.inner
    special = [inner.is_control(i) or inner.is_unknown(i) or inner.is_unused(i) for i in ids]
    return [inner.id_to_piece(i).encode() if special[i] else _sentencepiece_bytes(inner.id_to_piece(i)) for i in ids]


def _sentencepiece_bytes(token: str) -> bytes:
    """SentencePiece writes a byte as <0x41> and a space as U+2581."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
