"""When the passes of a step can be one CUDA graph; that they are the same is shown in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.helpers import build, steps

from windlass.config import Recipe
from windlass.layout.types import Layout, StepSpec
from windlass.train.capture import obstacle


@pytest.mark.parametrize(
    ("world", "step", "layout", "tables", "named"),
    [
        ({}, {}, {}, {}, None),
        ({"cuda": False}, {}, {}, {}, "CUDA"),
        ({"size": 4}, {}, {}, {}, "4 processes"),
        ({}, {"engine": "torch"}, {}, {}, "transformers"),
        ({}, {"mask_documents": True}, {}, {}, "documents"),
        ({}, {}, {"offload": "optimizer"}, {}, "host memory"),
        ({}, {}, {}, {"data": {"batch_ramp": [[1000, 4096]]}}, "batch grows"),
        ({}, {}, {}, {"train": {"instruments": 5}}, "measured"),
    ],
)
def test_obstacles(
    world: dict[str, Any], step: dict[str, Any], layout: dict[str, Any], tables: dict[str, Any], named: str | None
) -> None:
    here: Any = SimpleNamespace(**{"cuda": True, "size": 1, "layout": Layout(**layout)} | world)
    recipe = Recipe.model_validate({"name": "c", "model": {"family": "hf", "config": "x"}, **tables})
    reason = obstacle(recipe, StepSpec(seq_len=64, **step), here)
    assert reason is None if named is None else named in (reason or "")


def test_a_cpu_trains_without_it_and_says_so() -> None:
    tables: dict[str, Any] = {
        "name": "c",
        "model": {"layers": 1, "width": 32, "ffn": 48, "heads": 2, "vocab": 64},
        "data": {"seq_len": 16, "batch_tokens": 64},
        "train": {"steps": 2, "precision": "fp32"},
    }
    curves = []
    for capture in (False, True):
        training = build(Recipe.model_validate(tables | {"train": tables["train"] | {"capture": capture}}))
        curves.append(steps(training, 2))
        assert any(note.startswith("capture: off") for note in training.parts.notes) == capture
    assert curves[0] == curves[1]
