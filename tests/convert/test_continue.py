"""Continued pre-training with another tokenizer, another mix and a new warm-up; the old data is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.train.helpers import run_here

from windlass.config import Recipe
from windlass.convert.imports import import_model
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer, train_bpe
from windlass.evaluate.open_model import open_model
from windlass.evaluate.perplexity import evaluate_text
from windlass.runs.folder import Run, create_run

SMALL = {"family": "llama", "layers": 2, "width": 48, "ffn": 96, "heads": 4, "kv_heads": 2}


def train(path: Path, store: Store, vocab: int, steps: int, **tables: Any) -> Run:
    from windlass.config import Loaded

    value = {
        "name": path.name,
        "model": {**SMALL, "vocab": vocab},
        "train": {"steps": steps, "precision": "fp32"},
        "layout": {"micro_batch": 4},
        "energy": {"enabled": False},
        "data": {
            "store": str(store.path),
            "seq_len": 32,
            "batch_tokens": 512,
            "max_epochs": 100,
            **tables.pop("data", {}),
        },
        "optim": {"lr": 5e-3, "warmup": 2048, **tables.pop("optim", {})},
        "save": {"every": 1000, **tables.pop("save", {})},
    }
    run = create_run(path, Loaded(recipe=Recipe.model_validate(value), text="", path=None, origins={}))
    assert run_here(run.recipe(), run) == 0
    return run


def losses(run: Run) -> list[float]:
    return [line.loss for line in run.metrics_lines()]


def bits(run: Path, store: Store, tokenizer: Tokenizer) -> dict[str, float]:
    result = evaluate_text(open_model(run), store, tokenizer)
    return {s.group: s.value or 0.0 for s in result.scores if s.metric == "bits_per_byte"}


def test_grow_and_go_on(
    tmp_path: Path, store: Store, tokenizer: Tokenizer, make_store: Any, corpus: dict[str, Path]
) -> None:
    base = train(tmp_path / "base", store, tokenizer.vocab_size, 60, data={"mix": {"english": 1.0}})
    texts = [json.loads(line)["text"] for line in corpus["dutch"].read_text().splitlines()]
    new = train_bpe(texts, 440, tmp_path / "tokenizer")
    other = make_store(tmp_path / "other", new)
    grown = import_model(base.path, tmp_path / "grown", tokenizer=new.path)
    mixed = {"data": {"mix": {"dutch": 0.5, "english": 0.5}}, "optim": {"lr": 3e-3, "warmup": 5 * 512}}
    went_on = train(tmp_path / "cpt", other, new.vocab_size, 40, save={"load": str(grown.run)}, **mixed)
    anew = train(tmp_path / "anew", other, new.vocab_size, 2, **mixed)
    rates = [line.lr for line in went_on.metrics_lines()]
    assert rates[0] < rates[2] < rates[4] == pytest.approx(3e-3, rel=0.05) and rates[-1] < rates[4]
    assert losses(went_on)[0] < losses(anew)[0] - 0.3  # what was learned came along
    assert losses(went_on)[-1] < losses(went_on)[0]
    # Bits per byte compare the two tokenizers: the new language is learned, and what is replayed is forgotten less.
    before, after = bits(base.path, store, tokenizer), bits(went_on.path, other, new)
    assert after["language du"] < before["language du"] - 0.3
    forgot = train(
        tmp_path / "forgot",
        other,
        new.vocab_size,
        40,
        save={"load": str(grown.run)},
        **{**mixed, "data": {"mix": {"dutch": 1.0}}},
    )
    assert after["language en"] < bits(forgot.path, other, new)["language en"] - 0.2
