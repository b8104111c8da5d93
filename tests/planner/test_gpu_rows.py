"""Predictions of our own engine against single measurements on an H200 and against traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windlass.clusters import load_cluster
from windlass.config import LayoutConfig, load_recipe
from windlass.cost.memory import WORKSPACE_BYTES, memory
from windlass.cost.step import estimate_step
from windlass.planner.candidates import candidate_of, enumerate_candidates, problems
from windlass.planner.task import PlanTask, make_task

ROOT = Path(__file__).resolve().parents[2]


def task(name: str, **train: Any) -> PlanTask:
    recipe = load_recipe(ROOT / "recipes" / name, [f"train.{k}={v}" for k, v in train.items()]).recipe
    return make_task(recipe, load_cluster(recipe.cluster))


def test_tied_tables_and_products_in_fp8_are_divided_as_the_engine_does() -> None:
    tied, fp8 = task("teuken_7b_juwels.toml"), task("gptnl_8b_snellius.toml", precision="fp8")
    for given in (tied, fp8):
        candidate = candidate_of(LayoutConfig.model_validate({"tensor": 2}), "none", given)
        assert not any(p.code.startswith("layout.tensor") for p in problems(given, candidate))
        assert {c.layout.tensor for c in enumerate_candidates(given)} >= {1, 2}
    assert {c.layout.pipeline for c in enumerate_candidates(tied)} >= {1, 2, 4}
    assert candidate_of(LayoutConfig(), "none", fp8).step(fp8).fused_projections


def test_a_divided_embedding_has_a_divided_gradient() -> None:
    """Traced: 8B over 80 devices, zero1, tensor 2, micro_batch 2: 69.12 GiB without library workspaces."""
    given = task("gptnl_8b_snellius.toml")
    layout = LayoutConfig.model_validate({"shard": "zero1", "tensor": 2, "micro_batch": 2})
    candidate = candidate_of(layout, "none", given)
    found = memory(given.model, candidate.step(given), candidate.layout)
    assert (found.allocated - WORKSPACE_BYTES) / 2**30 == pytest.approx(69.12, rel=0.005)


@pytest.mark.parametrize(
    ("attention", "step_ms", "allocated_gib"), [("auto", 81.9, 17.0), ("flash", 90.9, 17.0), ("math", 377.3, 69.0)]
)
def test_attention_kernels_of_the_sweep_on_an_h200(attention: str, step_ms: float, allocated_gib: float) -> None:
    """0.4B, eight sequences of 2,048 on one device, from benchmarks/results/gpu_sweep.json: a stored square in fp32 costs 4.6 times."""
    given = _one_gpu(f"train.attention={attention}")
    candidate = candidate_of(LayoutConfig.model_validate({"shard": "none", "micro_batch": 8}), "none", given)
    spec = candidate.step(given)
    step = estimate_step(given.model, spec, candidate.layout, given.machine)
    assert step.seconds * 1e3 == pytest.approx(step_ms, rel=0.04)
    held = memory(given.model, spec, candidate.layout)
    assert held.allocated / 2**30 == pytest.approx(allocated_gib, rel=0.015)


def test_documents_apart_cost_a_mask_and_a_slower_kernel_only_over_divided_sequences() -> None:
    plain, masked = _one_gpu(), _one_gpu("data.mask_documents=true")
    candidate = candidate_of(LayoutConfig.model_validate({"shard": "none", "micro_batch": 8}), "none", plain)
    divided = replace(candidate.layout, context=2)
    times = {
        (layout.context, t is masked): estimate_step(t.model, candidate.step(t), layout, t.machine).terms["attention"]
        for layout in (candidate.layout, divided)
        for t in (plain, masked)
    }
    assert times[1, True] == times[1, False] and times[2, True] > 1.5 * times[2, False]
    step = candidate.step(masked)
    assert not memory(masked.model, step, candidate.layout).terms.get("document mask")
    assert memory(masked.model, step, divided).terms["document mask"] == 8 * 2048**2 / 2 * (1 + 2 * 24)
    assert any("mask_documents" in text for text in masked.warnings) and not any("mask" in t for t in plain.warnings)


def _one_gpu(*overrides: str) -> PlanTask:
    """The recipe of recipes/sweeps/one_gpu.toml on one H200."""
    model = {"layers": 24, "width": 1024, "ffn": 2816, "heads": 16, "kv_heads": 8, "vocab": 32000, "tied": "false"}
    words = [f"model.{k}={v}" for k, v in model.items()] + [
        "data.seq_len=2048",
        "train.steps=14",
        "train.precision=bf16",
    ]
    recipe = load_recipe(ROOT / "recipes" / "tiny_cpu.toml", [*words, "train.compile=true", *overrides]).recipe
    cluster = load_cluster("workstation")
    node = cluster.node.model_copy(update={"devices": 1})
    return make_task(recipe, cluster.model_copy(update={"device": "h200", "node": node}))
