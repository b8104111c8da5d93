"""Mixture of experts: predicted memory and speed beside runs on one H200 (bf16, AdamW, 4 sequences of 4096 tokens)."""

from dataclasses import replace
from typing import Any

import pytest
from tests.cost.helpers import own

from windlass.clusters.load import load_cluster, load_device
from windlass.cost.memory import memory
from windlass.cost.step import Machine, estimate_step
from windlass.layout.types import Layout, StepSpec

STEP, LAYOUT = StepSpec(seq_len=4096), Layout(micro_batch=4)
OLMOE: dict[str, Any] = {"family": "olmoe", "layers": 8, "width": 2048, "heads": 16, "ffn": 1024, "vocab": 50304}
QWEN3: dict[str, Any] = {
    "family": "qwen3_moe", "layers": 8, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144, "vocab": 151936,
    "experts": {"ffn": 768},
}  # fmt: skip


FP8 = replace(STEP, precision="fp8", fused_projections=True)


@pytest.mark.parametrize(
    ("model", "step", "gib", "tokens_per_second"),
    [(OLMOE, STEP, 63.34, 96_780), (OLMOE, FP8, 62.9, 98_431), (QWEN3, STEP, 92.06, 75_633)],
    ids=["olmoe", "olmoe with attention in FP8", "qwen3"],
)
def test_runs_on_an_h200(model: dict[str, Any], step: StepSpec, gib: float, tokens_per_second: int) -> None:
    spec = own(**model)
    assert memory(spec, step, LAYOUT).allocated / 2**30 == pytest.approx(gib, rel=0.02)
    machine = Machine(load_device("h200"), load_cluster("workstation").links, 1)
    estimate = estimate_step(spec, step, LAYOUT, machine)
    assert estimate.tokens_per_second_per_device == pytest.approx(tokens_per_second, rel=0.055)


def test_more_experts_cost_memory_and_small_products() -> None:
    """The same weights meet each token; their number grows, and the rows of each product shrink."""
    few, many = (own(**OLMOE | {"experts": {"count": count}}) for count in (16, 256))
    assert few.params.active + 8 * 240 * 2048 == many.params.active  # the router's rows
    machine = Machine(load_device("h200"), load_cluster("workstation").links, 1)
    seconds = [estimate_step(spec, STEP, LAYOUT, machine).terms["matrix products"] for spec in (few, many)]
    assert 1.05 < seconds[1] / seconds[0] < 2.0
    sizes = [memory(spec, STEP, LAYOUT).terms["weights"] for spec in (few, many)]
    assert sizes[1] - sizes[0] == 4 * (many.params.stored - few.params.stored)


def test_tensor_parallelism_divides_experts_and_not_the_copies_of_tokens() -> None:
    block = own(**OLMOE).groups[0].layer.branches[1].block
    one, two = (block.kept_bytes(STEP, Layout(tensor=degree)) for degree in (1, 2))
    assert one - two == 2 * 3 * 8 * 1024 / 2
