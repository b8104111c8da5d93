"""An engine is used only when it gives exactly the reference's ids."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tests.data.helpers import refused

from windlass.data import engines
from windlass.data.engines import Engine, choose, first_difference
from windlass.data.tokenizer import Tokenizer

FAST = [name for name in ("fastokens", "gigatoken") if importlib.util.find_spec(name)]


def wrong(tokenizer: Tokenizer) -> Engine:
    """Right in everything but one id of one text."""

    def encode(texts: list[str], eos: int | None) -> engines.FlatIds:
        rows = [tokenizer.encode(text) for text in texts]
        if len(rows) > 5 and rows[5]:
            rows[5] = [rows[5][0] + 1, *rows[5][1:]]
        return engines._join(rows, np.uint32(0), eos)

    return Engine("fastokens", lambda: encode)


@pytest.mark.parametrize("name", [*FAST, "tokenizers"])
@pytest.mark.parametrize("specials", [False, True])
def test_every_engine_agrees_with_the_reference(
    tokenizer: Tokenizer, name: str, specials: bool, tmp_path: Path
) -> None:
    engine, reason = choose(tokenizer, name, specials=specials, sample=["water <|end_of_text|> wind"], cache=tmp_path)
    assert engine.name == name
    assert "exact on 18 sample texts" in reason


def test_one_wrong_id_is_found(tokenizer: Tokenizer) -> None:
    difference = first_difference(wrong(tokenizer), tokenizer, False, list(engines.SAMPLE))
    assert difference is not None
    assert "not exact" in difference


def test_an_inexact_engine_is_passed_over_with_its_reason(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(engines.ENGINES, "fastokens", lambda *args: wrong(tokenizer))
    monkeypatch.setitem(engines.ENGINES, "gigatoken", lambda *args: (_ for _ in ()).throw(ImportError("no module")))
    engine, reason = choose(tokenizer, cache=tmp_path)
    assert engine.name == "tokenizers"
    assert "fastokens: not exact" in reason
    assert "gigatoken: not installed" in reason


def test_an_engine_asked_for_by_name_is_refused_when_it_differs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(engines.ENGINES, "fastokens", lambda *args: wrong(tokenizer))
    with refused("data.engine-unusable", "fastokens: not exact"):
        choose(tokenizer, "fastokens", cache=tmp_path)


def test_an_engine_that_crashes_is_passed_over(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import os

    def die(texts: list[str], eos: int | None) -> engines.FlatIds:
        os._exit(3)

    first, second, *_ = engines.ENGINES
    monkeypatch.setitem(engines.ENGINES, first, lambda *args: Engine(first, lambda: die))
    engine, reason = choose(tokenizer, cache=tmp_path)
    assert engine.name == second
    assert "crashed on the sample" in reason


@pytest.mark.skipif(len(FAST) < 2, reason="needs both fast engines")
def test_the_engine_that_costs_least_comes_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert choose(tokenizer, cache=tmp_path)[0].name == "gigatoken"


def test_wrong_kind_of_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with refused("data.engine-unusable", "tiktoken", "json"):
        choose(tokenizer, "tiktoken", cache=tmp_path)


def test_flat_arrays_of_nothing() -> None:
    ids, offsets = engines._join([[], [1, 2], []], np.uint32(0), None)
    assert ids.dtype == np.uint32
    assert offsets.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("offset", [0, 1000])
def test_the_end_of_document_stands_after_every_text_the_empty_ones_too(offset: int) -> None:
    parts, eos = [[5, 6], [], [7]], 3  # an eos below the offset, as tekken's is
    flat, offsets = engines._join(parts, np.uint32(offset), eos)
    assert flat.tolist() == [5 + offset, 6 + offset, 3, 3, 7 + offset, 3] and offsets.tolist() == [0, 3, 4, 6]
    bare = engines._join(parts, np.uint32(offset), None)
    assert bare[1].tolist() == [0, 2, 2, 3]
    again = engines.add_eos(*bare, eos)
    assert again[0].tolist() == flat.tolist() and again[1].tolist() == offsets.tolist()
    assert engines._join([], np.uint32(0), eos)[1].tolist() == [0]
