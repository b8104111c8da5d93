"""Does the fine-tune learn, count right, and come to the same with two processes as with one?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.classify import HowToTune, Lines, classify, macro_f1, read_tsv, refuse, scores_of, split
from windlass.evaluate.opened import open_model
from windlass.runs.folder import Run

GOOD, BAD = ["ship", "water", "together", "great"], ["heavy", "wind", "rope", "load"]


def reviews(count: int = 60) -> Lines:
    """Two of the words tell the label, the rest are the same for both."""
    dice = random.Random(0)
    labels = [dice.choice(["plus", "minus"]) for _ in range(count)]
    texts = [
        " ".join(["the", dice.choice(GOOD if label == "plus" else BAD), dice.choice(GOOD if label == "plus" else BAD)])
        for label in labels
    ]
    return Lines(texts, labels)


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    path = tmp_path / "polemo.tsv"
    lines = reviews()
    path.write_text(
        "text\ttarget\n" + "".join(f"{t}\t{label}\n" for t, label in zip(lines.texts, lines.labels, strict=True))
    )
    return path


@pytest.mark.parametrize(("which", "frozen"), [("llama_run", False), ("llama_run", True), ("retnet_run", False)])
def test_it_learns(which: str, frozen: bool, request: Any, tokenizer: Tokenizer) -> None:
    run = request.getfixturevalue(which)
    how = HowToTune(frozen=frozen, epochs=25 if frozen else 6, lr=2e-2 if frozen else 2e-3, seeds=(0, 1))
    found, labels = classify(lambda: open_model(run.path), tokenizer, reviews(), None, how)
    assert labels == ["minus", "plus"] and all(t.count == 12 for t in found)
    assert all(t.losses[-1] < 0.5 * t.losses[0] for t in found)
    assert min(t.accuracy for t in found) >= 0.75
    scores = {s.metric: s for s in scores_of("polemo", found, labels, how)}
    assert scores["accuracy"].value == pytest.approx(sum(t.accuracy for t in found) / 2)


def test_a_frozen_model_stays_as_it_was(llama_run: Run, tokenizer: Tokenizer) -> None:
    opened = open_model(llama_run.path)
    before = {name: p.clone() for name, p in opened.model.named_parameters()}
    classify(lambda: opened, tokenizer, reviews(), None, HowToTune(frozen=True, epochs=2))
    assert all(torch.equal(p, before[name]) for name, p in opened.model.named_parameters())


def test_macro_f1_by_hand() -> None:
    """Label 0: TP 1, FP 1, FN 1 -> 1/2. Label 1: TP 2, FP 1, FN 1 -> 2/3. Label 2: never -> 0."""
    guesses, truth = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 0])
    assert macro_f1(guesses, truth, 3) == pytest.approx((0.5 + 2 / 3 + 0) / 3)


def _body(rank: int, world: int, path: str, tokenizer_path: str) -> tuple[list[float], float]:
    from windlass.data.tokenizer import load_tokenizer

    torch.set_num_threads(1)
    how = HowToTune(epochs=2, lr=1e-3, batch=16)
    found, _ = classify(lambda: open_model(path), load_tokenizer(tokenizer_path), reviews(), None, how)
    return found[0].losses, found[0].macro_f1


@pytest.mark.multi
def test_two_processes_learn_the_same(llama_run: Run, tokenizer: Tokenizer, spread: Any) -> None:
    alone = _body(0, 1, str(llama_run.path), str(tokenizer.path))
    for losses, f1 in spread(2, _body, str(llama_run.path), str(tokenizer.path)):
        assert losses == pytest.approx(alone[0], rel=1e-3) and f1 == pytest.approx(alone[1])


def test_the_file_is_read_as_it_is_meant(tsv: Path, tmp_path: Path) -> None:
    assert read_tsv(tsv) == reviews()
    bare = tmp_path / "bare.tsv"
    bare.write_text('a "quoted text\tx\nb\ty\n')
    assert read_tsv(bare) == Lines(['a "quoted text', "b"], ["x", "y"])


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("text\tlabel\na\tx\nb\n", "line 3 lacks"), ("a\tx\n\ty\n", "line 2 lacks")],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.tsv").write_text(content)
    with pytest.raises(DataError, match=message):
        read_tsv(tmp_path / "bad.tsv")
    with pytest.raises(DataError, match="there is no classification set"):
        read_tsv(tmp_path / "none.tsv")


def test_bad_labels_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.evaluate import classify as room

    lines, how = reviews(), HowToTune()
    with pytest.raises(DataError, match="all 2 training texts"):
        refuse(Lines(["a", "b"], ["x", "x"]), lines, ["x"], how)
    with pytest.raises(DataError, match="no training text has: minus, plus"):
        refuse(Lines(["a", "b"], ["x", "y"]), lines, ["x", "y"], how)
    monkeypatch.setattr(room, "_world", lambda: 3)
    with pytest.raises(ConfigError, match="does not divide over 3") as caught:
        refuse(*split(lines, 0.2), ["minus", "plus"], how)
    assert "18" in (caught.value.hint or "")
