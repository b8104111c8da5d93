"""A batch that grows on the way: the same curve in every layout, and after a stop in the middle of a phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.multi.test_resume import curve, same
from tests.train import helpers

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.runs.folder import Run


def recipe(steps: int | None, micro: int, **layout: Any) -> Recipe:
    """4 steps of 8 sequences, then 3 of 16, and 1 of 32: 256, 512 and 1,024 tokens."""
    data = {"seq_len": 32, "batch_tokens": 256, "batch_ramp": [[1000, 512], [2500, 1024]], "tokens": 4000}
    return Recipe.model_validate({
        "name": "ramp", "model": {"layers": 4, "width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 250},
        "data": data, "optim": {"name": "sgd", "lr": 0.3, "warmup": 512, "schedule": "cosine"}, "train": {"steps": steps, "precision": "fp32"},
        "layout": {"micro_batch": micro, **layout}, "save": {"every": 1000}, "energy": {"enabled": False},
    })  # fmt: skip


def run_here(folder: str, value: Recipe) -> int:
    return helpers.run_here(value, helpers.new_run(Path(folder)))


@pytest.mark.multi
def test_every_layout_and_resume_keep_the_curve(spawn: Any, tmp_path: Path) -> None:
    uncut, cut = tmp_path / "uncut", tmp_path / "cut"
    assert run_here(str(uncut), recipe(None, 8)) == 0
    lines = list(Run(uncut).metrics_lines())
    assert [line.tokens for line in lines] == [256, 512, 768, 1024, 1536, 2048, 2560, 3584]
    # The learning rate is a function of tokens, so it does not notice the ramp.
    assert lines[-1].lr == pytest.approx(0.03, rel=1e-6), "the schedule ends with the last step"
    # The number of steps of a run by tokens is not known to the schedule of one by steps: both end at 3,584 tokens.
    for steps, micro, layout in ((5, 2, {"shard": "none", "pipeline": 2}), (6, 2, {"shard": "full"})):
        part = recipe(steps, micro, **layout)
        part = part.model_copy(update={"optim": part.optim.model_copy(update={"schedule": "constant"})})
        assert spawn(run_here, 2, str(cut), part) == [0, 0]
    last = recipe(8, 8).model_copy(update={"optim": part.optim})
    assert run_here(str(cut), last) == 0
    constant = tmp_path / "constant"
    assert run_here(str(constant), last) == 0
    same(curve(cut), curve(constant))


def test_a_layout_that_does_not_divide_a_batch_of_the_ramp_is_refused() -> None:
    value = recipe(None, 4)
    data = value.data.model_copy(update={"batch_ramp": [(1000, 192), (2000, 1024)]})
    with pytest.raises(ConfigError) as error:
        helpers.make_start(value.model_copy(update={"data": data}), helpers.place_here())
    assert error.value.code == "layout.batch-not-divisible"
    assert "192" in error.value.message and "128" in (error.value.hint or "") and "256" in (error.value.hint or "")
