"""Batch sizes by token position: phases by hand, and what is refused."""

from typing import Any

import pytest

from windlass.config import Recipe, check
from windlass.config.ramp import BatchPhase, batch_phases, run_length
from windlass.errors import ConfigError


def recipe(ramp: list[Any], batch: int | None = 1024, **train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "ramp", "model": {"layers": 2, "width": 64, "ffn": 96, "heads": 4, "vocab": 250},
        "data": {"seq_len": 64, "batch_tokens": batch, "batch_ramp": ramp, **({} if "steps" in train else {"tokens": 20_000})},
        "train": train,
    })  # fmt: skip


def test_the_step_that_begins_at_a_position_has_the_new_size() -> None:
    """4 steps of 1,024 reach 4,096 >= 4,000; 3 of 2,048 reach 10,240 >= 10,000; 2 of 4,096 end at 18,432 of 20,000."""
    value = recipe([[4000, 2048], ["10K", "4Ki"]])
    assert batch_phases(value, 1024) == (
        BatchPhase(0, 1024, 4), BatchPhase(4096, 2048, 3), BatchPhase(10_240, 4096, 2),
    )  # fmt: skip
    assert run_length(value) == (9, 18_432)


@pytest.mark.parametrize(("steps", "length"), [(3, (3, 3072)), (4, (4, 4096)), (6, (6, 8192)), (10, (10, 22_528))])
def test_a_run_by_steps(steps: int, length: tuple[int, int]) -> None:
    assert run_length(recipe([[4000, 2048], [10_000, 4096]], steps=steps)) == length


def test_without_a_ramp() -> None:
    assert run_length(recipe([])) == (19, 19_456)
    assert run_length(recipe([], batch=None)) is None


@pytest.mark.parametrize(
    ("ramp", "batch", "numbers"),
    [
        ([[4000, 2000]], 1024, ("2,000", "64", "1,984")),
        ([[4000, 2048], [4000, 4096]], 1024, ("4,000",)),
        ([[0, 2048]], 1024, ("0",)),
        ([[4000, 2048]], None, ("data.batch_tokens",)),
    ],
)
def test_a_wrong_ramp_is_refused(ramp: list[Any], batch: int | None, numbers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check(recipe(ramp, batch))
    assert error.value.code == "config.invalid" and "data.batch_ramp" in str(error.value)
    assert all(number in str(error.value) for number in numbers)
