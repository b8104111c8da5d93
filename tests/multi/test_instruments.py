"""Instruments and QK-clip give the same numbers in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.helpers import build, loop

from windlass.config import Recipe


def recipe(micro: int, **layout: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "instruments", "model": {"layers": 4, "width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 250, "init_std": 0.2},
        "data": {"seq_len": 32, "batch_tokens": 512}, "optim": {"name": "sgd", "lr": 0.03, "qk_clip": 1.5},
        "train": {"steps": 4, "precision": "fp32", "instruments": 1}, "layout": {"micro_batch": micro, **layout},
        "energy": {"enabled": False},
    })  # fmt: skip


def measured(value: Recipe) -> list[list[list[float]]]:
    """Of three steps, so that what QK-clip did to the weights shows in the second."""
    torch.set_num_threads(1)
    training = build(value)
    batches, layers = loop.open_batches(training), []
    try:
        for _ in range(3):
            batch = next(batches)
            layers.append(training.stepper.step(batch, 0.03, measure=True).layers.tolist())
            training.progress.advance(training.plan)
    finally:
        batches.close()
    return layers


def all_measured(values: list[Recipe]) -> list[list[list[list[float]]]]:
    return [measured(value) for value in values]


@pytest.mark.multi
def test_every_layout_measures_the_same(spawn: Any) -> None:
    one = torch.tensor(measured(recipe(16)))
    assert float(one[0, :4, 4].max()) > 3.0, "QK-clip has something to do"
    assert float(one[1, :4, 4].max()) < 2.0
    layouts = [
        recipe(4, shard="full", tensor=2),
        recipe(4, shard="hybrid", shard_size=2),
        recipe(2, shard="zero1", pipeline=2),
    ]
    for rank in spawn(all_measured, 4, layouts):
        for values in rank:
            torch.testing.assert_close(torch.tensor(values), one, rtol=2e-4, atol=1e-6, equal_nan=True)
