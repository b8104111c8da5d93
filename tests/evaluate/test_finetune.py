"""Fine-tuned classifiers learn, count right, and give the same result on one and two processes."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate import finetune
from windlass.evaluate.finetune import LabelledTexts, TuneOptions, classify, macro_f1, read_tsv, seed_scores
from windlass.evaluate.open_model import open_model
from windlass.runs.folder import Run

GOOD, BAD = ["ship", "water", "together", "great"], ["heavy", "wind", "rope", "load"]


def reviews(count: int = 60) -> LabelledTexts:
    """Two of the words tell the label, the rest are the same for both."""
    dice = random.Random(0)
    labels = [dice.choice(["plus", "minus"]) for _ in range(count)]
    texts = [
        " ".join(["the", dice.choice(GOOD if label == "plus" else BAD), dice.choice(GOOD if label == "plus" else BAD)])
        for label in labels
    ]
    return list(zip(texts, labels, strict=True))


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    path = tmp_path / "polemo.tsv"
    path.write_text("text\ttarget\n" + "".join(f"{text}\t{label}\n" for text, label in reviews()))
    return path


@pytest.mark.parametrize(("which", "frozen"), [("llama_run", False), ("llama_run", True), ("retnet_run", False)])
def test_it_learns(which: str, frozen: bool, request: Any, tokenizer: Tokenizer) -> None:
    run = request.getfixturevalue(which)
    options = TuneOptions(frozen=frozen, epochs=25 if frozen else 6, lr=2e-2 if frozen else 2e-3, seeds=(0, 1))
    results, labels = classify(lambda: open_model(run.path), tokenizer, reviews(), None, options)
    assert labels == ["minus", "plus"] and all(t.count == 12 for t in results)
    assert all(t.losses[-1] < 0.5 * t.losses[0] for t in results)
    assert min(t.accuracy for t in results) >= 0.75
    scores = {s.metric: s for s in seed_scores("polemo", results, labels, options)}
    assert scores["accuracy"].value == pytest.approx(sum(t.accuracy for t in results) / 2)


def test_a_frozen_model_stays_as_it_was(llama_run: Run, tokenizer: Tokenizer) -> None:
    opened = open_model(llama_run.path)
    before = {name: p.clone() for name, p in opened.model.named_parameters()}
    classify(lambda: opened, tokenizer, reviews(), None, TuneOptions(frozen=True, epochs=2))
    assert all(torch.equal(p, before[name]) for name, p in opened.model.named_parameters())


def test_macro_f1_by_hand() -> None:
    """Label 0: TP 1, FP 1, FN 1 -> 1/2. Label 1: TP 2, FP 1, FN 1 -> 2/3. Label 2: never -> 0."""
    guesses, truth = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 0])
    assert macro_f1(guesses, truth, 3) == pytest.approx((0.5 + 2 / 3 + 0) / 3)


def _body(rank: int, world: int, path: str, tokenizer_path: str) -> tuple[list[float], float]:
    from windlass.data.tokenizer import load_tokenizer

    torch.set_num_threads(1)
    options = TuneOptions(epochs=2, lr=1e-3, batch=16)
    results, _ = classify(lambda: open_model(path), load_tokenizer(tokenizer_path), reviews(), None, options)
    return results[0].losses, results[0].macro_f1


@pytest.mark.multi
def test_two_processes_learn_the_same(llama_run: Run, tokenizer: Tokenizer, spread: Any) -> None:
    alone = _body(0, 1, str(llama_run.path), str(tokenizer.path))
    for losses, f1 in spread(2, _body, str(llama_run.path), str(tokenizer.path)):
        assert losses == pytest.approx(alone[0], rel=1e-3) and f1 == pytest.approx(alone[1])


def test_the_file_is_read_as_it_is_meant(tsv: Path, tmp_path: Path) -> None:
    assert read_tsv(tsv) == reviews()
    bare = tmp_path / "bare.tsv"
    bare.write_text('a "quoted text\tx\nb\ty\n')
    assert read_tsv(bare) == [('a "quoted text', "x"), ("b", "y")]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tsv(content: str) -> Path:
        (tmp_path / "bad.tsv").write_text(content)
        return tmp_path / "bad.tsv"

    def check(train: LabelledTexts, test: LabelledTexts | None) -> None:
        classify(lambda: pytest.fail("a model was opened"), None, train, test, TuneOptions())  # type: ignore[arg-type]

    texts, one_label, other_labels = reviews(), [("a", "x"), ("b", "x")], [("a", "x"), ("b", "y")]
    cases: list[tuple[Any, str, str]] = [
        (lambda: read_tsv(tsv("")), "evaluate.tsv-empty", "bad.tsv"),
        (lambda: read_tsv(tsv("text\tlabel\na\tx\nb\n")), "evaluate.tsv-line-incomplete", "line 3"),
        (lambda: read_tsv(tsv("a\tx\n\ty\n")), "evaluate.tsv-line-incomplete", "line 2"),
        (lambda: read_tsv(tmp_path / "none.tsv"), "evaluate.file-missing", "none.tsv"),
        (lambda: check(one_label, texts), "evaluate.one-label-only", "2"),
        (lambda: check(other_labels, texts), "evaluate.test-labels-unknown", "minus, plus"),
    ]
    for action, code, text in cases:
        with pytest.raises(DataError) as error:
            action()
        assert error.value.code == code and text in error.value.message
    monkeypatch.setattr(finetune, "_rank_and_world", lambda: (0, 3))
    with pytest.raises(ConfigError) as batch_error:
        check(texts, None)
    assert batch_error.value.code == "evaluate.batch-not-divisible" and "18" in (batch_error.value.hint or "")


@pytest.mark.multi
def test_workers_of_the_command(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, out = tmp_path / "set.tsv", tmp_path / "out.json"
    train.write_text("text\tlabel\n" + "".join(f"{w} water\t{w}\n" for w in ("ship", "rope") * 12))
    argv = ["windlass", "finetune", llama_run.path, "--train", train, "--epochs", 1, "--batch", 4, "--output", out]
    monkeypatch.setattr(sys, "argv", [*map(str, argv), "--no-save"])
    assert finetune.start_workers(2) == 0
    result = json.loads(out.read_text())
    assert result["processes"] == 2 and {s["metric"] for s in result["scores"]} == {"accuracy", "macro_f1"}
