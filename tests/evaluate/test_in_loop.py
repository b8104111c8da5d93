"""Validation in the training loop gives the numbers of `windlass eval`, by source and language."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.train.helpers import run_here

from windlass.config import Loaded, Recipe
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.open_model import open_model
from windlass.evaluate.perplexity import evaluate_text
from windlass.runs.folder import Run, create_run
from windlass.train.validate import HeldOutSource, combine, hold_out


class Stream:
    """Three sources of 90, 9 and no held-out windows, the rare one at every tenth place."""

    sources = ("much", "little", "none")
    store = None
    mixture = SimpleNamespace(windows=(90, 9, 0))

    def identity(self, indexes: Any) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.asarray(indexes)
        return (numbers % 11 == 10).astype(np.int64), numbers


def test_every_source_gets_whole_batches_of_its_own() -> None:
    held = hold_out(Stream(), 40, 8)
    assert [(part.name, len(part.indexes)) for part in held] == [("much", 40), ("little", 8)]
    assert [round(part.share, 3) for part in held] == [0.909, 0.091]
    assert set(held[1].indexes % 11) == {10} and 10 not in set(held[0].indexes % 11)


def test_a_source_smaller_than_a_batch_is_repeated_in_it() -> None:
    little = hold_out(Stream(), 64, 32)[1]
    assert len(little.indexes) == 32 and len(set(little.indexes.tolist())) == 9


def test_means_are_put_together_by_share_and_bytes() -> None:
    none = np.zeros(0, dtype=np.int64)
    held = [
        HeldOutSource("a", "nl", 4.0, none, 0.75),
        HeldOutSource("b", "nl", 2.0, none, 0.125),
        HeldOutSource("c", "en", None, none, 0.125),
    ]
    found = combine(held, [2.0, 4.0, 1.0])
    assert found.overall.loss == pytest.approx(0.75 * 2 + 0.125 * 4 + 0.125)
    assert found.overall.bits_per_byte is None and found.languages["en"].bits_per_byte is None
    dutch = found.languages["nl"]
    assert dutch.loss == pytest.approx((0.75 * 2 + 0.125 * 4) / 0.875)
    assert dutch.bits_per_byte == pytest.approx((0.75 * 2 + 0.125 * 4) / math.log(2) / (0.75 * 4 + 0.125 * 2))
    assert found.line() == {
        "val_loss": found.overall.loss, "val_loss/a": 2.0, "val_bits_per_byte/a": pytest.approx(2 / math.log(2) / 4),
        "val_loss/b": 4.0, "val_bits_per_byte/b": pytest.approx(4 / math.log(2) / 2), "val_loss/c": 1.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(store: Store, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = Recipe.model_validate(
        {
            "name": "in-loop",
            "model": {"layers": 1, "width": 32, "ffn": 48, "heads": 2, "vocab": tokenizer.vocab_size},
            "data": {"store": str(store.path), "seq_len": 32, "batch_tokens": 128},
            "optim": {"lr": 1e-2},
            "train": {"steps": 6, "precision": "fp32", "eval_every": 3, "eval_tokens": 1_000_000},
            "layout": {"micro_batch": 1},
            "energy": {"enabled": False},
        }
    )
    run = create_run(tmp_path_factory.mktemp("in-loop") / "run", Loaded(recipe=recipe, text="", path=None, origins={}))
    assert run_here(recipe, run) == 0
    return run


def test_events_and_metrics_name_sources_and_languages(trained: Run) -> None:
    passes = [event for event in trained.events() if event.event == "evaluated"]
    assert [event.step for event in passes] == [3, 6]
    assert set(passes[-1].sources) == {"dutch", "english"} and set(passes[-1].languages) == {"du", "en"}
    assert passes[-1].sources["dutch"] == passes[-1].languages["du"]  # its only source
    lines = [m.as_dict() for m in trained.metrics_lines() if m.val_loss is not None]
    assert lines and lines[0]["val_loss/dutch"] == passes[0].sources["dutch"]["loss"]
    assert lines[0]["val_bits_per_byte"] == passes[0].bits_per_byte


def test_the_loop_and_eval_agree(trained: Run, store: Store, tokenizer: Tokenizer) -> None:
    """The last pass saw the weights of the last checkpoint: the same text, but for the windows' ends."""
    last = [event for event in trained.events() if event.event == "evaluated"][-1]
    scores = {
        (s.group, s.metric): s.value
        for s in evaluate_text(open_model(trained.path, dtype="fp32"), store, tokenizer).scores
    }
    for name in ("dutch", "english"):
        found = last.sources[name]
        assert math.exp(found["loss"]) == pytest.approx(scores[f"source {name}", "perplexity"], rel=0.03)
        assert found["bits_per_byte"] == pytest.approx(scores[f"source {name}", "bits_per_byte"], rel=0.03)


def test_progress_and_report_show_them(trained: Run, tmp_path: Path) -> None:
    from windlass.report.collect import collect
    from windlass.report.sections import evaluation

    section = evaluation(collect(trained.path))
    table = next(item for item in section.items if getattr(item, "columns", ())[:1] == ("text",))
    assert [row[0] for row in table.rows] == ["all", "source dutch", "source english", "language du", "language en"]
    assert any(getattr(item, "title", "") == "Validation loss by source" for item in section.items)
