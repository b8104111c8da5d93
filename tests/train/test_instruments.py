"""Instruments: norms by hand, a blown-up layer is named, logits of attention, and QK-clip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import helpers
from tests.train.helpers import build, steps

from windlass.blocks.attention.kernels import Scores
from windlass.blocks.attention.logits import raise_largest
from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.runs.events import LayersMeasured


def recipe(model: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **train: Any) -> Recipe:
    shape = {"layers": 4, "width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 250, **(model or {})}
    return Recipe.model_validate({
        "name": "instruments", "model": shape, "data": {"seq_len": 32, "batch_tokens": 512},
        "optim": {"name": "sgd", "lr": 0.3, "clip": 0, **(optim or {})}, "train": {"steps": 4, "precision": "fp32", "instruments": 2, **train},
        "layout": {"micro_batch": 4}, "save": {"every": 1000}, "energy": {"enabled": False},
    })  # fmt: skip


def measured(training: Any) -> torch.Tensor:
    batches = helpers.loop.open_batches(training)
    batch = next(batches)
    batches.close()
    return training.stepper.step(batch, 0.3, measure=True).layers


def test_norms_by_layer_by_hand() -> None:
    training, other = build(recipe()), build(recipe(instruments=0))
    before = {slot.name: slot.weights.detach().clone() for slot in training.optimizer.slots}
    batches = helpers.loop.open_batches(other)
    batch = next(batches)
    batches.close()
    other.stepper.gradients(batch)
    layers = measured(training)
    assert layers.shape == (5, 5)
    for row in range(5):
        mine = [slot for slot in other.optimizer.slots if (f"layers.{row}." in slot.name) == (row < 4) and ("layers." in slot.name) == (row < 4)]  # fmt: skip
        gradient = torch.cat([slot.gradient.flatten() for slot in mine]).norm()
        assert float(layers[row, 0]) == pytest.approx(float(gradient), rel=1e-5)
        named = {slot.name: slot.weights.detach() for slot in training.optimizer.slots}
        weights = torch.cat([named[slot.name].flatten() for slot in mine])
        assert float(layers[row, 1]) == pytest.approx(float(weights.norm()), rel=1e-5)
        change = weights - torch.cat([before[slot.name].flatten() for slot in mine])
        assert float(layers[row, 2]) == pytest.approx(float(change.norm()), rel=1e-5)
    assert torch.isfinite(layers[:4]).all() and torch.isnan(layers[4, 3:]).all()
    assert other.stepper.logits is None and training.parts.modules[0].observer is None


@pytest.mark.parametrize("weight", ["feed_forward.w2.weight", "attention.wv.weight"])
def test_a_layer_that_blows_up_is_named(weight: str, tmp_path: Path) -> None:
    class BlowUp(helpers.Hook):
        def on_step_begin(self, training: Any) -> None:
            if training.step == 3:
                with torch.no_grad():
                    training.parts.modules[0].get_parameter(f"layers.2.{weight}").mul_(300.0)

    run = helpers.new_run(tmp_path)
    assert helpers.run_here(recipe(log_every=10), run, BlowUp()) == 0
    calm, blown = (event for event in run.events() if isinstance(event, LayersMeasured))
    assert (calm.step, blown.step) == (2, 4)
    for name in ("weight_norm", "activation_rms"):
        layer, _, ratio = blown.largest(name)
        assert layer == 2 and ratio > 5, name
        assert calm.largest(name)[2] < 2, name
    assert "layer 2" in blown.describe()


def test_the_largest_logit_by_hand() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    logits = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * 0.5
    distance = torch.arange(16)[:, None] - torch.arange(16)
    documents = torch.arange(16).expand(2, 16) // 5
    visible = (distance >= 0) & (distance < 6) & (documents[0][:, None] == documents[0])
    expected = logits.masked_fill(~visible, float("-inf")).amax((0, 2, 3))
    largest = torch.full((4,), -torch.inf)
    raise_largest(largest, q, k, Scores(window=6, scale=0.5, softcap=1.0), documents)
    assert torch.allclose(largest, expected)
    largest[1] = 99.0
    raise_largest(largest, q, k, Scores(window=6, scale=0.5), documents)
    assert float(largest[1]) == 99.0
    long = torch.full((4,), -torch.inf)
    raise_largest(long, torch.randn(1, 4, 640, 8), torch.randn(1, 2, 640, 8), Scores(), None)
    assert torch.isfinite(long).all(), "16 of 640 queries"


def test_qk_clip_brings_a_head_to_its_limit_and_leaves_the_others() -> None:
    """Head 1 shares its keys with head 0: the product of its factors is its own, that of head 0 stays 1."""
    training = build(recipe(optim={"lr": 0.0, "qk_clip": 2.0, "weight_decay": 0}))
    module = training.parts.modules[0]
    with torch.no_grad():
        module.get_parameter("layers.1.attention.wq.weight")[16:32] *= 60.0

    def largest() -> torch.Tensor:
        batches = helpers.loop.open_batches(training)
        batch = next(batches)
        batches.close()
        training.stepper.gradients(batch)
        training.optimizer.zero_grad()
        return training.stepper.logits.largest()[1]

    before, other = largest(), module.get_parameter("layers.0.attention.wq.weight").clone()
    assert before[1] > 2.0 and before[[0, 2, 3]].max() < 2.0
    steps(training, 1, lr=0.0)
    training.progress.tokens = training.progress.sequences = 0  # the same batch again
    after = largest()
    assert float(after[1]) == pytest.approx(2.0, rel=1e-4)
    assert torch.allclose(after[[0, 2, 3]], before[[0, 2, 3]], rtol=1e-4)
    assert torch.equal(other, module.get_parameter("layers.0.attention.wq.weight"))


@pytest.mark.parametrize("model", [{"family": "qwen3"}, {"family": "retnet", "kv_heads": None}])
def test_qk_clip_is_refused_where_it_does_nothing(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        build(recipe(model, {"qk_clip": 100.0}))
    assert error.value.code == "model.no-qk-clip" and "100" in error.value.message
