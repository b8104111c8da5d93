"""A plan of a run whose batch grows: its steps, tokens and time are those of the phases."""

import pytest

from windlass.clusters import load_cluster
from windlass.config import Recipe
from windlass.planner import plan


def planned(batch: str, ramp: list[list[str]]) -> Recipe:
    return Recipe.model_validate({
        "name": "ramp", "cluster": "jupiter-booster", "nodes": 2,
        "model": {"layers": 16, "width": 2048, "ffn": 5632, "heads": 16, "vocab": 32000},
        "data": {"tokens": "100B", "seq_len": 4096, "batch_tokens": batch, "batch_ramp": ramp},
    })  # fmt: skip


def test_time_and_steps_are_the_sum_of_the_phases() -> None:
    cluster = load_cluster("jupiter-booster")
    ramp, small, large = (
        plan(planned(batch, steps), cluster).best
        for batch, steps in (("512Ki", [["50B", "1Mi"]]), ("512Ki", []), ("1Mi", []))
    )
    assert ramp.batch_tokens == 2**20 and small.batch_tokens == 2**19
    assert ramp.steps == pytest.approx((small.steps + large.steps) / 2, rel=1e-3)
    assert min(small.days, large.days) <= ramp.days <= max(small.days, large.days)


def test_a_plan_says_that_its_rate_is_that_of_the_largest_batch() -> None:
    cluster = load_cluster("jupiter-booster")
    plans = plan(planned("512Ki", [["50B", "1Mi"]]), cluster)
    best = plans.best
    assert best.tokens / (best.step.tokens_per_second_per_device * plans.task.devices) / 86400 < best.days
    assert any("1,048,576" in note and "data.batch_ramp" in note for note in plans.task.warnings)
    assert not any("batch_ramp" in note for note in plan(planned("512Ki", []), cluster).task.warnings)


def test_only_layouts_that_divide_every_batch_are_ranked() -> None:
    """24 sequences on 8 devices allow micro-batches of 1 and 3; 256 allow 1, 2, 4 and more."""
    plans = plan(planned("96Ki", [["50B", "1Mi"]]), load_cluster("jupiter-booster"))
    assert plans.plans and all(24 % (p.layout.data * p.layout.micro_batch) == 0 for p in plans.plans)
