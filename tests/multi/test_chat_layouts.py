"""Conversations, adapters and preference pairs train the same on every layout as on one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multi.conftest import spawn
from tests.train.chat_store import make_store, recipe_table
from tests.train.helpers import build, new_run, steps

from windlass.config import Recipe
from windlass.train.preference import attach_references

Curve = list[tuple[float, float]]
CHAT, LORA = {"task": "chat"}, {"task": "chat", "lora": {"rank": 4, "alpha": 8.0}}
PREFER = {"task": "prefer"}
LAYOUTS = [
    (CHAT, {"shard": "full"}), (CHAT, {"tensor": 2}), (CHAT, {"pipeline": 2}), (CHAT, {"context": 2}),
    (LORA, {"shard": "full"}), (LORA, {"shard": "zero1"}), (LORA, {"tensor": 2}), (LORA, {"pipeline": 2}),
    (PREFER, {"shard": "full"}), (PREFER, {"shard": "none"}), (PREFER, {"tensor": 2}),
]  # fmt: skip


def recipe(folder: str, tune: dict[str, Any], layout: dict[str, Any]) -> Recipe:
    pairs = tune["task"] == "prefer"
    options = {"data": {} if pairs else {"mix": {"chat": 0.7, "web": 0.3}}, "optim": {"name": "sgd", "lr": 0.3}}
    store = Path(folder, "pairs" if pairs else "chat", "store")
    return Recipe.model_validate(recipe_table(store, tune, layout=layout, **options))


def train(folder: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Curve]:
    torch.set_num_threads(1)
    curves = []
    for number, (tune, layout) in enumerate(cases):
        training = build(recipe(folder, tune, layout))
        if training.recipe.task == "prefer":
            training = replace(training, run=new_run(Path(folder, f"run-{training.world.size}-{number}")))
            attach_references(training)
        curves.append(steps(training, 4))
        if training.recipe.task == "prefer":
            scores = training.validator.run()
            curves[-1] += [(scores.overall.loss, scores.scores["reward_margin"])]
    return curves


@pytest.mark.multi
@pytest.mark.timeout(600)
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    make_store(tmp_path / "chat", texts=20)
    make_store(tmp_path / "pairs", 30, pairs=True, validation=0.3)
    # B of an adapter starts at zero: its gradient is small, and so is the norm of the first step.
    alone = {str(tune): train(str(tmp_path), [(tune, {})])[0] for tune in (CHAT, LORA, PREFER)}
    for rank in spawn(train, 2, str(tmp_path), LAYOUTS, timeout=500.0):
        for (tune, layout), curve in zip(LAYOUTS, rank, strict=True):
            for (loss, norm), (loss0, norm0) in zip(curve, alone[str(tune)], strict=True):
                assert loss == pytest.approx(loss0, rel=3e-6), (tune, layout)
                assert norm == pytest.approx(norm0, rel=3e-5), (tune, layout)
