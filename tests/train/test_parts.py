"""Schedules, batches and the guard: parts of training that need no second process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from windlass.blocks.attention.kernels import attention_core
from windlass.config import OptimConfig, Recipe, TrainConfig
from windlass.errors import ConfigError
from windlass.layout.resolve import complete_layout, job_size
from windlass.train import step as training_step
from windlass.train.batches import BatchPlan, batch_plan
from windlass.train.guard import LOSS_SPIKE, NONFINITE, NORM_SPIKE, OK, Guard
from windlass.train.progress import cut_at_parts, utilization_advice
from windlass.train.schedules import learning_rate, schedule_note


def recipe(**tables: Any) -> Recipe:
    base: dict[str, Any] = {
        "name": "t", "model": {"layers": 2, "width": 16, "ffn": 32, "heads": 2, "vocab": 100},
        "data": {"seq_len": 8, "batch_tokens": 128}, "train": {"steps": 5}, "layout": {"micro_batch": 2},
    }  # fmt: skip
    return Recipe.model_validate(
        {k: {**base.get(k, {}), **tables.get(k, {})} if isinstance(base.get(k), dict) else base[k] for k in base}
    )


def test_schedules_by_hand() -> None:
    cosine = OptimConfig(lr=1.0, warmup=100, min_lr_ratio=0.1)
    assert learning_rate(cosine, 50, 1100) == pytest.approx(0.5)
    assert learning_rate(cosine, 100, 1100) == pytest.approx(1.0)
    assert learning_rate(cosine, 600, 1100) == pytest.approx(0.55)
    assert learning_rate(cosine, 1100, 1100) == pytest.approx(0.1)
    wsd = OptimConfig(lr=1.0, warmup=0, schedule="wsd", decay=200, min_lr_ratio=0.0)
    assert learning_rate(wsd, 800, 1000) == 1.0
    for shape, quarter in (("linear", 0.75), ("1-sqrt", 0.5), ("cosine", 0.5 + 0.5 * math.cos(math.pi / 4))):
        shaped = wsd.model_copy(update={"decay_shape": shape})
        assert learning_rate(shaped, 850, 1000) == pytest.approx(quarter) and learning_rate(shaped, 1000, 1000) == 0.0
    assert learning_rate(wsd, 900, 1000) == pytest.approx(0.5)
    assert learning_rate(OptimConfig(lr=1.0, schedule="wsd", min_lr_ratio=0.0), 950, 1000) == pytest.approx(0.5)
    linear = OptimConfig(lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert learning_rate(linear, 500, 1000) == pytest.approx(1.5)
    assert learning_rate(OptimConfig(lr=3.0, schedule="constant"), 10**9, 1000) == 3.0


def test_a_run_shorter_than_its_schedule_gets_a_note() -> None:
    assert schedule_note(OptimConfig(warmup=100), 1000) == schedule_note(OptimConfig(warmup=1000), 1000) == ""
    note = schedule_note(OptimConfig(warmup=4000), 1000)
    assert all(number in note for number in ("4,000", "1,000", "25 %"))
    wsd = OptimConfig(warmup=400, schedule="wsd", decay=800, min_lr_ratio=0.1)
    assert all(number in schedule_note(wsd, 1000) for number in ("400", "1,000", "78 %"))
    assert schedule_note(wsd.model_copy(update={"schedule": "cosine"}), 1000) == ""  # `decay` is for wsd
    assert "0 %" in schedule_note(OptimConfig(lr=0.0, warmup=4000), 1000)


def plan_on(devices: int, **tables: Any) -> BatchPlan:
    value = recipe(**tables)
    assert value.layout is not None
    return batch_plan(value, complete_layout(value.layout, job_size(value, devices, devices)))


def test_batches_by_hand() -> None:
    plan = plan_on(4)
    assert (plan.layout.sequences_per_step, plan.sequences_per_rank, plan.layout.accumulation) == (16, 4, 2)
    assert (plan.tokens_per_step, plan.total_tokens, plan.steps) == (128, 640, 5)
    assert plan.indexes(32, 3).tolist() == [44, 45, 46, 47]
    assert plan_on(1, train={"steps": None}, data={"tokens": 1300}).steps == 10


def values(*pair: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(pair[0]), torch.tensor(pair[1])


def test_guard_refuses_what_is_not_finite() -> None:
    guard = Guard(TrainConfig(), torch.device("cpu"))
    assert int(guard.judge(*values(1.0, 2.0))) == OK
    assert int(guard.judge(*values(float("nan"), 2.0))) == NONFINITE
    assert int(guard.judge(*values(1.0, float("inf")))) == NONFINITE
    assert int(Guard(TrainConfig(skip_nonfinite=False), torch.device("cpu")).judge(*values(float("nan"), 1.0))) == OK


def test_guard_refuses_spikes_once_it_knows_the_run() -> None:
    guard = Guard(TrainConfig(skip_spike_sigma=6.0), torch.device("cpu"))
    assert int(guard.judge(*values(50.0, 1.0))) == OK, "the first steps are always allowed"
    for step in range(2500):
        assert int(guard.judge(*values(3.0 + 0.01 * (step % 5), 1.0 + 0.02 * (step % 3)))) == OK
    assert int(guard.judge(*values(3.5, 1.0))) == LOSS_SPIKE
    assert int(guard.judge(*values(3.0, 9.0))) == NORM_SPIKE
    assert int(guard.judge(*values(3.02, 1.02))) == OK, "a skipped step leaves no trace in the memory"


def test_utilization_advice() -> None:
    assert utilization_advice([]) == ""
    below, inside, above = (utilization_advice(values) for values in ([0.5, 0.6], [0.8], [0.99]))
    assert "55 %" in below and "below 70 %" in below
    assert "80 %" in inside and "70 % to 90 %" in inside
    assert "99 %" in above and "above 90 %" in above


def test_flash3_needs_its_package() -> None:
    attention_core("auto")
    with pytest.raises(ConfigError) as caught:
        attention_core("flash3")
    assert caught.value.code == "train.flash3-missing"


def test_large_and_small_gradients_have_the_same_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(size).bfloat16() for size in (5, 4000, 30)]
    expected = torch.stack([gradient.float().norm() for gradient in gradients]).square().sum()
    for limit in (1, 1000, 10**6):  # all large, one, none
        monkeypatch.setattr(training_step, "LARGE", limit)
        torch.testing.assert_close(training_step.norms(gradients).square().sum(), expected, rtol=1e-5, atol=0.0)


def test_a_narrow_terminal_shows_complete_parts_of_the_progress_line():
    line = "loss 2.3410  104.87k tok/s  MFU 41.2%  363.61 Wh"
    assert cut_at_parts(line, 60) == line
    assert cut_at_parts(line, 36) == "loss 2.3410  104.87k tok/s"
    assert cut_at_parts(line, 5) == "loss 2.3410"
