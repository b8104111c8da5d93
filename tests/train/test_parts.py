"""Schedule, geometry, mesh arithmetic, guard and stages: the parts of training that need no second process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windlass.config import LayoutConfig, OptimConfig, Recipe, TrainConfig
from windlass.errors import ConfigError
from windlass.models import build
from windlass.train.attention import apply_attention
from windlass.train.geometry import geometry_of
from windlass.train.guard import LOSS_SPIKE, NONFINITE, NORM_SPIKE, OK, Guard
from windlass.train.mesh import axes_of
from windlass.train.parallelize import choose_sync, stage_layers, stage_numbers
from windlass.train.progress import utilization_advice
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
    assert learning_rate(wsd, 900, 1000) == pytest.approx(0.5)
    assert learning_rate(OptimConfig(lr=1.0, schedule="wsd", min_lr_ratio=0.0), 950, 1000) == pytest.approx(0.5)
    linear = OptimConfig(lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert learning_rate(linear, 500, 1000) == pytest.approx(1.5)
    assert learning_rate(OptimConfig(lr=3.0, schedule="constant"), 10**9, 1000) == 3.0


def test_a_run_shorter_than_its_schedule_gets_a_note() -> None:
    assert schedule_note(OptimConfig(warmup=100), 1000) == schedule_note(OptimConfig(warmup=1000), 1000) == ""
    note = schedule_note(OptimConfig(warmup=4000), 1000)
    assert all(number in note for number in ("4,000", "1,000", "25%"))
    wsd = OptimConfig(warmup=400, schedule="wsd", decay=800, min_lr_ratio=0.1)
    assert all(number in schedule_note(wsd, 1000) for number in ("400", "1,000", "78%"))
    assert schedule_note(wsd.model_copy(update={"schedule": "cosine"}), 1000) == ""  # `decay` is for wsd
    assert "0%" in schedule_note(OptimConfig(lr=0.0, warmup=4000), 1000)


def test_geometry_by_hand() -> None:
    g = geometry_of(recipe(), 4)
    assert (g.batch, g.per_rank, g.micro_batches, g.tokens_per_step, g.steps) == (16, 4, 2, 128, 5)
    assert g.indexes(32, 3).tolist() == [44, 45, 46, 47]
    tokens = geometry_of(recipe(train={"steps": None}, data={"tokens": 1300}), 1)
    assert tokens.steps == 10


def test_batch_that_ranks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"128\) is not a multiple of 48") as caught:
        geometry_of(recipe(), 3)
    assert "144" in caught.value.hint


def test_pipeline_needs_micro_batches() -> None:
    with pytest.raises(ConfigError, match="2 micro-batches cannot fill a pipeline of 4"):
        geometry_of(recipe(layout={"pipeline": 4, "micro_batch": 8}), 1)
    with pytest.raises(ConfigError, match="interleaved schedule"):
        geometry_of(recipe(layout={"pipeline": 3, "schedule": "interleaved"}), 1)


def test_axes() -> None:
    assert axes_of(LayoutConfig(shard="full", tensor=2), 8, 8).shard == 4
    hybrid = axes_of(LayoutConfig(shard="hybrid"), 16, 4)
    assert (hybrid.replicate, hybrid.shard, hybrid.data) == (4, 4, 16)
    assert axes_of(LayoutConfig(shard="none"), 8, 8).replicate == 8
    context = axes_of(LayoutConfig(shard="full", context=2), 8, 8)
    assert (context.shard, context.data) == (8, 4)
    with pytest.raises(ConfigError, match="6 devices cannot hold"):
        axes_of(LayoutConfig(tensor=2, pipeline=2), 6, 6)
    with pytest.raises(ConfigError, match=r"shard_size \(3\)"):
        axes_of(LayoutConfig(shard="hybrid", shard_size=3), 8, 8)


def test_stages() -> None:
    assert [len(r) for r in stage_layers(10, 4)] == [3, 3, 2, 2]
    assert stage_layers(10, 4)[3] == range(8, 10)
    assert stage_numbers("1f1b", 1, 4, 2) == [1]
    assert stage_numbers("interleaved", 1, 4, 2) == [1, 5]
    assert stage_numbers("zbv", 1, 4, 2) == [1, 6]


@pytest.mark.parametrize(
    ("layout", "every", "deferred"),
    [({"shard": "none"}, False, False), ({"shard": "zero1"}, False, False), ({"shard": "zero2"}, True, False), ({"shard": "full"}, True, False),
     ({"shard": "hybrid"}, True, True), ({"shard": "full", "sync": "last"}, False, False), ({"shard": "none", "sync": "every"}, True, False)],
)  # fmt: skip
def test_when_gradients_are_reduced(layout: dict[str, Any], every: bool, deferred: bool) -> None:
    sync = choose_sync(recipe(layout=layout), 4)
    assert (sync.every, sync.defer_replicas) == (every, deferred)
    assert sync.note.startswith("gradient reduction")


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
    assert "55%" in below and "below 70%" in below
    assert "80%" in inside and "70% to 90%" in inside
    assert "99%" in above and "above 90%" in above


def test_flash3_needs_its_package() -> None:
    with torch.device("meta"):
        model = build(recipe().model, seq_len=8)
    apply_attention(model, "auto")
    with pytest.raises(ConfigError, match="flash_attn_interface is not installed"):
        apply_attention(model, "flash3")
