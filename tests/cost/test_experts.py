"""Mixture of experts: predicted memory and speed beside two runs on one H200 (bf16, AdamW, 4 sequences of 4096 tokens)."""

from dataclasses import replace
from typing import Any

import pytest
from tests.cost.helpers import own

from windlass.blocks.experts.spec import RANK_IMBALANCE
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


@pytest.mark.parametrize(
    ("model", "gib", "tokens_per_second"), [(OLMOE, 63.34, 92_870), (QWEN3, 92.06, 70_039)], ids=["olmoe", "qwen3"]
)
def test_two_runs_on_an_h200(model: dict[str, Any], gib: float, tokens_per_second: int) -> None:
    spec = own(**model)
    assert memory(spec, STEP, LAYOUT).allocated / 2**30 == pytest.approx(gib, rel=0.02)
    machine = Machine(load_device("h200"), load_cluster("workstation").links, 1)
    estimate = estimate_step(spec, STEP, LAYOUT, machine)
    assert estimate.tokens_per_second_per_device == pytest.approx(tokens_per_second, rel=0.05)


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


def test_expert_parallelism_divides_what_sharding_leaves_whole() -> None:
    """Without sharding a rank holds a quarter of the experts and everything else; fully sharded the states are as small
    as before, and a quarter of the experts is gathered."""
    spec = own(**OLMOE)
    one, four = (Layout(data=8, micro_batch=4, expert=degree) for degree in (1, 4))
    held = [memory(spec, STEP, layout).terms["optimizer states"] for layout in (one, four)]
    assert held[0] - held[1] == pytest.approx(8 * 0.75 * spec.expert_params)
    full, divided = (replace(layout, shard="full", shard_size=8) for layout in (one, four))
    full_terms, divided_terms = (memory(spec, STEP, layout).terms for layout in (full, divided))
    assert full_terms["optimizer states"] == pytest.approx(divided_terms["optimizer states"])
    assert divided.for_experts.shard_size == 2 and divided.for_experts.devices == 8
    layer = spec.groups[0].layer
    assert (
        layer.rank_params(full) - layer.rank_params(divided)
        == 0.75 * layer.expert_params
        == 0.75 * 3 * 64 * 2048 * 1024
    )


def test_an_exchange_costs_what_its_links_carry() -> None:
    """Each of 8 layers sends 8 rows of 2048 16-bit values per token four times: three quarters of them leave the rank."""
    spec, cluster = own(**OLMOE), load_cluster("jupiter-booster")
    machine = Machine(load_device("gh200"), cluster.links, 4)
    inside, across = (estimate_step(spec, STEP, Layout(data=16, micro_batch=4, expert=e), machine) for e in (4, 16))
    rate = (cluster.links.intra_gbs or 0) * 1e9 * 0.80 * 0.84
    sent = 4 * 4096 * 8 * 2048 * 2
    expected = 8 * 4 * (RANK_IMBALANCE * sent * 0.75 / rate + 3 * cluster.links.intra_latency_us * 1e-6)
    assert inside.terms["expert-parallel traffic"] == pytest.approx(expected, rel=1e-6)
    assert across.terms["expert-parallel traffic"] > 5 * expected
    assert across.exposed_communication > inside.exposed_communication
