"""Predictions of our own engine against what one H200 measured: the goals are part of the test."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from windlass.clusters import load_cluster
from windlass.config import LayoutConfig, load_recipe
from windlass.cost.memory import WORKSPACE_BYTES, memory
from windlass.plan.layouts import enumerate_choices, from_config, problems, work_of
from windlass.plan.task import Task, make_task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_plan.py, which puts its own folder's path aside when loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_plan", ROOT / "benchmarks" / "gpu_plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_and_time_of_the_measured_rows(bench: ModuleType) -> None:
    import json

    record = json.loads((ROOT / "benchmarks" / "results" / "gpu_plan.json").read_text())
    rows = [r for r in record["rows"] if r["outcome"] == "ok"]
    assert len(rows) >= 24
    plans = [bench.predict(r, record["device"]) for r in rows]
    memory = [
        abs(bench.error_pct(p.memory.allocated / 2**30, r["allocated_gib"])) for p, r in zip(plans, rows, strict=True)
    ]
    steps = [abs(bench.error_pct(p.step.seconds, r["step_seconds"])) for p, r in zip(plans, rows, strict=True)]
    assert statistics.median(memory) <= 3 and max(memory) <= 8
    assert statistics.median(steps) <= 5
    assert all(p.fits for p in plans)


def task(name: str, **train: Any) -> Task:
    recipe = load_recipe(ROOT / "recipes" / name, [f"train.{k}={v}" for k, v in train.items()]).recipe
    return make_task(recipe, load_cluster(recipe.cluster))


def test_tied_tables_and_products_in_fp8_are_divided_as_the_engine_does() -> None:
    tied, fp8 = task("teuken_7b_juwels.toml"), task("gptnl_8b_snellius.toml", precision="fp8")
    for given in (tied, fp8):
        choice = from_config(LayoutConfig.model_validate({"tensor": 2}), "none", given)
        assert not any("layout.tensor" in reason for reason in problems(given, choice))
        assert {c.tensor for c in enumerate_choices(given)} >= {1, 2}
    assert {c.pipeline for c in enumerate_choices(tied)} >= {1, 2, 4}
    assert work_of(fp8, from_config(LayoutConfig(), "none", fp8)).fuse


def test_a_divided_embedding_has_a_divided_gradient() -> None:
    """Traced: 8B over 80 devices, zero1, tensor 2, micro_batch 2: 69.12 GiB without library workspaces."""
    given = task("gptnl_8b_snellius.toml")
    layout = LayoutConfig.model_validate({"shard": "zero1", "tensor": 2, "micro_batch": 2})
    choice = from_config(layout, "none", given)
    found = memory(given.shape, work_of(given, choice), choice.degrees(), given.per_node)
    assert (found.allocated - WORKSPACE_BYTES) / 2**30 == pytest.approx(69.12, rel=0.005)


@pytest.mark.parametrize(
    ("shard", "sync"), [("none", "last"), ("zero1", "last"), ("zero2", "every"), ("full", "every")]
)
def test_gradients_are_reduced_when_the_engine_does(shard: str, sync: str) -> None:
    choice = from_config(LayoutConfig.model_validate({"shard": shard}), "none", task("gptnl_8b_snellius.toml"))
    assert choice.degrees().sync == sync
