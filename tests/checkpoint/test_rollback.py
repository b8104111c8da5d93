"""A stretch of bad data costs a run only that stretch: skipped steps, rollback to an earlier checkpoint, the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.train.helpers import run_here

from windlass.checkpoint import files
from windlass.config import Recipe
from windlass.runs.folder import Run
from windlass.runs.history import read_history
from windlass.runs.measured import columns_of
from windlass.train.failure import DivergedError
from windlass.train.hooks import Hook

BAD = range(45 * 4, 60 * 4)
"""Sequences of steps 46 to 60, four a step."""


class BadStretch(Hook):
    """Text that counts upwards, which is learned at once, and random tokens in the bad stretch. It keeps the numbers it served."""

    def __init__(self) -> None:
        self.served: list[int] = []

    def on_start(self, training: Any) -> None:
        seq, random = training.stream.seq_len, np.random.default_rng(0)

        def sequences(indexes: Any) -> np.ndarray:
            numbers = np.asarray(indexes, dtype=np.int64)
            self.served += numbers.tolist()
            rows = (numbers[:, None] + np.arange(seq + 1)) % 50
            bad = np.isin(numbers, BAD)
            rows[bad] = random.integers(50, 100, (int(bad.sum()), seq + 1))
            return rows.astype(np.int32)

        training.stream.sequences = sequences


def recipe(**train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "t", "model": {"layers": 1, "width": 32, "ffn": 48, "heads": 2, "vocab": 100}, "data": {"seq_len": 16, "batch_tokens": 64},
        "train": {"steps": 70, "precision": "fp32", "skip_spike_sigma": 8.0, "max_skipped": 3, **train}, "optim": {"lr": 3e-3},
        "layout": {"micro_batch": 4}, "save": {"every": 10, "asynchronous": False}, "energy": {"enabled": False},
    })  # fmt: skip


def run_at(path: Path) -> Run:
    run = Run(path)
    for folder in (run.path, run.ranks, run.checkpoints, run.logs):
        folder.mkdir(parents=True, exist_ok=True)
    return run


def test_a_spike_leads_back_to_an_earlier_checkpoint_and_past_the_data(tmp_path: Path) -> None:
    run, bad = run_at(tmp_path), BadStretch()
    # Fifteen bad steps in a row are all skipped; the fifteenth is one too many and leads back to the checkpoint before the first.
    assert run_here(recipe(rollback=True, max_skipped=15), run, bad) == 0
    events = list(run.events())
    skipped = [e for e in events if e.event == "skipped"]
    back = next(e for e in events if e.event == "rollback")
    assert {e.reason for e in skipped} <= {"loss spike", "gradient norm spike"} and len(skipped) == 15
    assert (back.step, back.to_step) == (60, 40)
    assert back.sequences == [160, 240] and back.skipped_tokens == 80 * 16 and "15 steps in a row" in back.reason
    lines = [m.as_dict() for m in run.metrics_lines()]
    after = lines[next(i for i, line in enumerate(lines) if line["step"] == 60) + 1 :]
    assert [line["step"] for line in after] == list(range(41, 71)) and not any(line["skipped"] for line in after)
    assert after[-1]["loss"] < lines[44]["loss"] < lines[0]["loss"]
    # What was written while it went wrong is no checkpoint any more; step 70 ended after 240 + 30 x 4 sequences.
    assert [step for step, _ in files.steps_on_disk(run)] == [50, 60, 70]
    assert any(path.name.startswith("damaged-step-000000050") for path in run.checkpoints.iterdir())
    assert max(bad.served) >= 240 + 30 * 4 - 1


def test_the_same_spike_twice_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as error:
        run_here(recipe(rollback=True), run_at(tmp_path), BadStretch())
    assert error.value.code == "train.diverged" and "3 " in error.value.message
    assert sum(e.event == "rollback" for e in Run(tmp_path).events()) == 1


def test_without_rollback_a_spike_is_skipped_and_then_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as error:
        run_here(recipe(), run_at(tmp_path), BadStretch())
    assert "train.rollback" in error.value.hint


def test_the_automatic_interval_says_its_steps(tmp_path: Path) -> None:
    value = recipe(steps=6).model_copy(update={"save": recipe().save.model_copy(update={"every": "auto"})})
    run = run_at(tmp_path)
    assert run_here(value, run) == 0
    event = next(e for e in run.events() if e.event == "interval")
    assert event.steps >= 1 and event.seconds > 0 and event.reason


def test_a_resume_names_the_damaged_checkpoint(tmp_path: Path) -> None:
    run, said = run_at(tmp_path), []
    assert run_here(recipe(steps=20), run) == 0
    shard = run.checkpoint(20) / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert run_here(recipe(steps=22), run, say=said.append) == 0
    assert any(
        line.startswith("damaged: step-000000020: __0_0.distcp") and "damaged-step-000000020" in line for line in said
    ), said
    assert any("resumed at step 10" in line and "to load" in line for line in said)
    # A start from a checkpoint says what loading it cost, as a part of the start-up.
    first, second = read_history(run.events(), columns_of(run.metrics_lines())).segments
    assert first.load_seconds is None and 0 < second.load_seconds < second.startup_seconds
