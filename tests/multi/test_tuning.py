"""Fine-tuning on several processes equals one process, in every kind of sharding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.train.helpers import build, place_here, steps
from tests.train.tuning_files import make_masked_store, masked_table, reviews, save_encoder, tune_table, write_tsv

from windlass.config import Recipe
from windlass.data.complete_tune import complete_tune
from windlass.train.checkpointing import load_model_weights

SHARDS = ("none", "zero1", "zero2", "full")


def assert_close(values: list[tuple[float, float]], alone: list[tuple[float, float]], case: object = None) -> None:
    """The sums of small gradient norms are rounded by another order."""
    for (loss, norm), (one_loss, one_norm) in zip(values, alone, strict=True):
        assert loss == pytest.approx(one_loss, rel=3e-6), case
        assert norm == pytest.approx(one_norm, rel=3e-5), case


def _losses(folder: str, shards: tuple[str, ...]) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of five steps, and the loss of a validation, for each kind of sharding."""
    answers = []
    for shard in shards:
        table = tune_table(Path(folder), tune={"dropout": 0.0, "batch": 12}, layout={"shard": shard, "micro_batch": 3})
        training = build(complete_tune(Recipe.model_validate(table), place_here().world_size))
        load_model_weights(Path(folder) / "model", training.parts.modules[0])
        training.optimizer.adopt()
        values = steps(training, 5)
        answers.append([*values, (training.validator.run().overall.loss, 0.0)])
    return answers


@pytest.mark.multi
def test_processes_agree(tmp_path: Path, spawn: Any) -> None:
    """53 examples in batches of 12: the last batch has 5, so that some ranks have none."""
    save_encoder(tmp_path / "model")
    write_tsv(tmp_path / "train.tsv", 53)
    write_tsv(tmp_path / "valid.tsv", 17, seed=1)
    (alone,) = _losses(str(tmp_path), ("none",))
    for answers in spawn(_losses, 2, str(tmp_path), SHARDS):
        for shard, values in zip(SHARDS, answers, strict=True):
            assert_close(values, alone, shard)


def _decoder_losses(folder: str, layouts: list[dict[str, Any]], task: str) -> list[list[tuple[float, float]]]:
    """The same for one of our own decoders with the head of a task."""
    model = {"family": "llama", "layers": 2, "width": 32, "heads": 4, "ffn": 48, "vocab": 300}
    answers = []
    for layout in layouts:
        files = {"train": f"{folder}/train.jsonl", "validation": f"{folder}/valid.jsonl"}
        table = tune_table(Path(folder), tune={"batch": 12, "task": task, **files}, layout={**layout, "micro_batch": 3})
        table |= {"model": model, "data": {"seq_len": 48, "tokenizer": f"{folder}/model/tokenizer.json"}, "save": {}}
        training = build(complete_tune(Recipe.model_validate(table), place_here().world_size))
        values = steps(training, 5)
        answers.append([*values, (training.validator.run().overall.loss, 0.0)])
    return answers


@pytest.mark.multi
@pytest.mark.parametrize("task", ["classify", "tag"])
def test_a_decoder_divided_by_heads(tmp_path: Path, spawn: Any, task: str) -> None:
    save_encoder(tmp_path / "model")
    for name, count in (("train", 53), ("valid", 17)):
        lines = [(text.split(), label) for text, label in reviews(count, seed=count)]
        tagged = [{"text": words, "label": ["B-A" if len(word) > 4 else "O" for word in words]} for words, _ in lines]
        labelled = [{"text": " ".join(words), "label": label} for words, label in lines]
        rows = tagged if task == "tag" else labelled
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (alone,) = _decoder_losses(str(tmp_path), [{}], task)
    layouts = [{"tensor": 2}, {"shard": "full"}]
    for answers in spawn(_decoder_losses, 2, str(tmp_path), layouts, task):
        for layout, values in zip(layouts, answers, strict=True):
            assert_close(values, alone, layout)


def _masked_losses(folder: str, shards: tuple[str, ...]) -> list[list[tuple[float, float]]]:
    answers = []
    for shard in shards:
        training = build(complete_tune(Recipe.model_validate(masked_table(Path(folder), layout={"shard": shard}))))
        training.parts.modules[0].init_weights(0)
        training.optimizer.adopt()
        values = steps(training, 4)
        answers.append([*values, (training.validator.run().overall.loss, 0.0)])
    return answers


@pytest.mark.multi
def test_hidden_tokens_are_the_same_on_all_layouts(tmp_path: Path, spawn: Any) -> None:
    save_encoder(tmp_path / "model")
    make_masked_store(tmp_path)
    (alone,) = _masked_losses(str(tmp_path), ("none",))
    for answers in spawn(_masked_losses, 2, str(tmp_path), ("none", "full")):
        for values in answers:
            assert_close(values, alone)
