"""Fine-tuning on several processes equals one process, in every kind of sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.helpers import build, steps
from tests.train.tuning_files import make_masked_store, masked_table, save_encoder, tune_table, write_tsv

from windlass.config import Recipe
from windlass.data.complete_tune import complete_tune
from windlass.train.checkpointing import load_model_weights

SHARDS = ("none", "zero1", "zero2", "full")


def _losses(rank: int, world: int, folder: str, shards: tuple[str, ...]) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of five steps, and the loss of a validation, for each kind of sharding."""
    torch.set_num_threads(1)
    answers = []
    for shard in shards:
        table = tune_table(Path(folder), tune={"dropout": 0.0, "batch": 12}, layout={"shard": shard, "micro_batch": 3})
        training = build(complete_tune(Recipe.model_validate(table)))
        load_model_weights(Path(folder) / "model", training.parts.modules[0])
        training.optimizer.adopt()
        values = steps(training, 5)
        answers.append([*values, (training.validator.run().overall.loss, 0.0)])
    return answers


@pytest.mark.multi
def test_processes_agree(tmp_path: Path, spread: Any) -> None:
    """53 examples in batches of 12: the last batch has 5, so that some ranks have none."""
    save_encoder(tmp_path / "model")
    write_tsv(tmp_path / "train.tsv", 53)
    write_tsv(tmp_path / "valid.tsv", 17, seed=1)
    (alone,) = _losses(0, 1, str(tmp_path), ("none",))
    for answers in spread(2, _losses, str(tmp_path), SHARDS):
        for shard, values in zip(SHARDS, answers, strict=True):
            for one, other in zip(alone, values, strict=True):
                assert other == pytest.approx(one, rel=3e-6, abs=1e-7), shard


def _masked_losses(rank: int, world: int, folder: str, shards: tuple[str, ...]) -> list[list[tuple[float, float]]]:
    torch.set_num_threads(1)
    answers = []
    for shard in shards:
        training = build(complete_tune(Recipe.model_validate(masked_table(Path(folder), layout={"shard": shard}))))
        training.parts.modules[0].init_weights(0)
        training.optimizer.adopt()
        values = steps(training, 4)
        answers.append([*values, (training.validator.run().overall.loss, 0.0)])
    return answers


@pytest.mark.multi
def test_hidden_tokens_are_the_same_on_all_layouts(tmp_path: Path, spread: Any) -> None:
    save_encoder(tmp_path / "model")
    make_masked_store(tmp_path)
    (alone,) = _masked_losses(0, 1, str(tmp_path), ("none",))
    for answers in spread(2, _masked_losses, str(tmp_path), ("none", "full")):
        for values in answers:
            for one, other in zip(alone, values, strict=True):
                assert other == pytest.approx(one, rel=3e-6, abs=1e-7)
