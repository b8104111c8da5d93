"""All ranks decide alike when only one of them has a problem: a gradient that is not finite on one rank is skipped by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.helpers import build

from windlass.config import Recipe
from windlass.train import loop


def recipe(**layout: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "guard", "model": {"layers": 2, "width": 32, "ffn": 48, "heads": 2, "vocab": 100},
        "data": {"seq_len": 16, "batch_tokens": 128}, "optim": {"lr": 1e-2}, "train": {"steps": 6, "precision": "fp32"},
        "layout": {"micro_batch": 2, **layout}, "energy": {"enabled": False}, "save": {"at_end": False, "every": 10**6},
    })  # fmt: skip


def one_rank_fails(value: Recipe, factor: float) -> tuple[list[int], list[float], list[torch.Tensor]]:
    """Reasons and losses of six steps; in the third the gradients of rank 1 alone are multiplied by `factor`."""
    training = build(value)
    batches, scale = loop.open_batches(training), training.stepper.targets.scale
    reasons, losses, weights = [], [], []
    for step in range(6):
        # The loss is divided by the batch's tokens.
        by = factor if step == 2 and training.world.rank == 1 else 1.0
        training.stepper.targets.scale = lambda batch, part, by=by: by * scale(batch, part)
        values = training.stepper.step(next(batches), 1e-2).values.tolist()
        training.progress.advance(training.plan)
        reasons.append(int(values[2]))
        losses.append(values[0])
        weight: Any = next(p for _, p in training.parts.named_parameters())
        weights.append((weight.to_local() if hasattr(weight, "to_local") else weight).detach().clone())
    batches.close()
    return reasons, losses, weights


@pytest.mark.multi
@pytest.mark.parametrize("layout", [{"shard": "full"}, {"pipeline": 2}], ids=str)
def test_all_ranks_skip_together(spawn: Any, layout: dict[str, Any]) -> None:
    for reasons, losses, weights in spawn(one_rank_fails, 2, recipe(**layout), float("nan")):
        assert reasons == [0, 0, 1, 0, 0, 0]
        assert all(torch.isfinite(torch.tensor(losses[3:])))
        assert torch.equal(weights[2], weights[1]) and not torch.equal(weights[3], weights[2])
