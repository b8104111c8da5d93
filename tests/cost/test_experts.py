"""Mixture of experts: predicted memory and speed beside runs on one H200 (bf16, AdamW, 4 sequences of 4096 tokens)."""

from dataclasses import replace
from typing import Any

import pytest
from tests.cost.helpers import own

from windlass.clusters.load import load_cluster, load_device
from windlass.cost.memory import memory
from windlass.cost.step import DEFAULTS, Machine, estimate_step
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
    expected = 8 * 4 * DEFAULTS.imbalance * (sent * 0.75 / rate + 3 * cluster.links.intra_latency_us * 1e-6)
    assert inside.terms["expert-parallel traffic"] == pytest.approx(expected, rel=1e-6)
    assert across.terms["expert-parallel traffic"] > 5 * expected
    assert across.exposed_communication > inside.exposed_communication


MEGATRON = StepSpec(seq_len=4096, engine="megatron", attention="te")


def test_other_engines_send_as_many_copies_as_their_dispatcher() -> None:
    """Of 8 experts on 4 ranks each rank holds at least one with probability 1 - 0.75^8."""
    block, row = own(**OLMOE).groups[0].layer.branches[1].block, 2 * 2048
    sent = {
        name: block.exchanged_bytes(replace(MEGATRON, dispatch=name), Layout(data=4, expert=4))
        for name in ("alltoall", "allgather", "fused")
    }
    assert sent == {"alltoall": 8 * row, "allgather": 4 * row, "fused": pytest.approx(4 * (1 - 0.75**8) * row)}
    assert block.exchanged_bytes(MEGATRON, Layout(data=4, tensor=2, expert=4)) == 8 * row / 2


def test_even_routing_and_linked_racks_shorten_the_exchange() -> None:
    spec, cluster = own(**OLMOE), load_cluster("jupiter-booster")
    layout, machine = Layout(data=16, micro_batch=4, expert=16), Machine(load_device("gh200"), cluster.links, 4)

    def exchange(step: StepSpec, machine: Machine) -> float:
        return estimate_step(spec, step, layout, machine).terms["expert-parallel traffic"]

    uneven, rack = exchange(MEGATRON, machine), replace(machine, linked_devices=72)
    assert uneven / exchange(replace(MEGATRON, balanced=True), machine) == pytest.approx(DEFAULTS.imbalance)
    assert uneven > 5 * exchange(MEGATRON, rack)
    interleaved = replace(layout, pipeline=2, chunks=2, accumulation=8)
    plain = estimate_step(spec, MEGATRON, replace(interleaved, chunks=1), machine).terms["expert-parallel traffic"]
    hidden = estimate_step(spec, MEGATRON, interleaved, machine).terms["expert-parallel traffic"]
    assert hidden < 0.6 * plain  # the passes of two micro-batches run side by side


def test_experts_that_tensor_parallelism_leaves_undivided() -> None:
    """tensor 2 and expert_tensor 1: the 16 ranks of 8 replicas hold the experts four times."""
    spec, layout = own(**OLMOE), Layout(data=8, tensor=2, expert=4, expert_tensor=1, shard="zero1", shard_size=8)
    layer = spec.groups[0].layer
    assert layer.rank_params(layout) == (layer.num_params - layer.expert_params) / 2 + layer.expert_params / 4
    assert layout.for_experts.devices == layout.devices and layout.for_experts.shard_size == 4
    rows = layer.branches[1].block.kept_bytes(replace(MEGATRON, balanced=True), replace(layout, expert_tensor=2))
    rows -= layer.branches[1].block.kept_bytes(replace(MEGATRON, balanced=True), layout)
    assert rows == 2 * 8 * 2048 / 2  # half of the group's copies on each rank


def test_what_other_engines_keep_of_experts() -> None:
    block, layout = own(**OLMOE).groups[0].layer.branches[1].block, Layout(data=4)
    full = block.kept_bytes(MEGATRON, layout)
    assert full - block.kept_bytes(replace(MEGATRON, recomputed=("moe_act",)), layout) == 2 * 8 * 1024
    assert block.kept_bytes(replace(MEGATRON, recomputed=("moe",)), layout) == 0.0
    # Inputs of products in 8 bits: the copies and the activated product.
    assert full - block.kept_bytes(replace(MEGATRON, precision="mxfp8"), layout) == 8 * 2048 + 8 * 1024


def test_fsdp_in_a_pipeline_keeps_gathered_weights_and_undivided_gradients() -> None:
    spec, step = own(**OLMOE), StepSpec(seq_len=4096, engine="torch", loss="compiled", recompute="full")
    layout = Layout(data=4, pipeline=2, expert=2, shard="full", shard_size=4, accumulation=8)
    terms = memory(spec, step, layout).terms
    assert terms["gradients"] == pytest.approx(2.0 * terms["unsharded weights"])
    assert terms["unsharded weights"] > 2.0 * 4 * spec.groups[0].layer.rank_params(layout)


def test_ranks_that_do_not_fill_nodes_still_cross_the_fabric() -> None:
    spec, cluster = own(**OLMOE | {"experts": {"count": 66}}), load_cluster("jupiter-booster")
    machine = Machine(load_device("gh200"), cluster.links, 4)
    four, six = (estimate_step(spec, STEP, Layout(data=12, micro_batch=4, expert=e), machine) for e in (3, 6))
    assert six.terms["expert-parallel traffic"] > 3 * four.terms["expert-parallel traffic"]
