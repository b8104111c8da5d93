import time
from dataclasses import replace
from typing import Any

import pytest
from tests.cost.helpers import classic, own, retnet

from windlass.clusters import find_device
from windlass.clusters.model import Device, Efficiency, Links
from windlass.cost.step import DEFAULTS, Machine, StepEstimate, bubble_share, estimate_step, sustained_tflops
from windlass.errors import PlanError
from windlass.layout.resolve import gradient_sync
from windlass.layout.types import Layout, StepSpec
from windlass.models.spec import ModelSpec


def sharded(devices: int, kind: str = "full", size: int | None = None, **degrees: Any) -> Layout:
    return Layout(data=devices, shard=kind, shard_size=size or devices, **degrees)


FULL = sharded(64)


def run(
    model: ModelSpec,
    device: Device,
    links: Links,
    layout: Layout = FULL,
    per_node: int = 8,
    efficiency: Efficiency | None = None,
    **step: Any,
) -> StepEstimate:
    """One step of another loop on FSDP, unless `engine` says otherwise."""
    spec = StepSpec(**{"seq_len": 4096, "engine": "torch", "sync": gradient_sync(layout), **step})
    return estimate_step(model, spec, layout, Machine(device, links, per_node, efficiency))


def test_terms_sum_to_the_step(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    result = run(llama_8b, h100, links)
    assert sum(result.terms.values()) == pytest.approx(result.seconds)
    assert result.tokens_per_second_per_device == pytest.approx(4096 / result.seconds)
    assert 0.2 < result.mfu < 0.6 and result.mfu_convention == "6N+attention"


@pytest.mark.parametrize(
    ("layers", "width", "ffn", "kv_heads", "vocab", "seq_len", "micro_batch", "recompute", "measured"),
    [
        (22, 2048, 5632, 4, 32000, 4096, 8, "none", 65_825),
        (16, 4096, 14336, 8, 128256, 8192, 2, "none", 19_266),
        (16, 4096, 14336, 8, 128256, 8192, 2, "selective", 17_516),
        (32, 4096, 14336, 8, 128256, 8192, 1, "full", 6_815),
    ],
)  # fmt: skip
def test_torchtitan_on_one_h200(
    h100: Device,
    layers: int,
    width: int,
    ffn: int,
    kv_heads: int,
    vocab: int,
    seq_len: int,
    micro_batch: int,
    recompute: str,
    measured: int,
) -> None:
    """Measured on an H200 with torch 2.11; nothing is calibrated here."""
    model = own(layers=layers, width=width, ffn=ffn, heads=32, kv_heads=kv_heads, vocab=vocab)
    h200 = h100.model_copy(update={"bandwidth_gbs": 4800})
    layout = Layout(shard="full", micro_batch=micro_batch)
    result = run(
        model, h200, Links(), layout, 1, seq_len=seq_len, recompute=recompute, loss="compiled", attention="flash"
    )
    assert result.tokens_per_second_per_device == pytest.approx(measured, rel=0.13)


def test_bloom_on_jean_zay(a100: Device) -> None:
    """Published: 176B, 384 A100, tensor 4, pipeline 12, micro-batch 2: 107 tokens/s per device."""
    model = classic("bloom", layers=70, width=14336, heads=64, vocab=250680)
    layout = sharded(8, "zero1", tensor=4, pipeline=12, sequence_parallel=False, micro_batch=2, accumulation=128)
    habits = {"engine": "deepspeed", "gradient_precision": "fp32", "recompute": "full", "compile": False}
    links = Links(intra_gbs=240, inter_gbs_per_node=50)
    result = run(model, a100, links, layout, seq_len=2048, attention="math", loss="plain", **habits)
    assert result.tokens_per_second_per_device == pytest.approx(107, rel=0.1)


def test_the_bubble_by_hand() -> None:
    plain = Layout(pipeline=8, accumulation=32)
    assert bubble_share(plain) == 7 / 32
    assert bubble_share(replace(plain, schedule="interleaved", chunks=4)) == 7 / 128
    assert bubble_share(replace(plain, pipeline=1)) == 0
    assert bubble_share(replace(plain, schedule="zbv")) == 7 / 32 / 3


def test_full_sharding_collapses_at_scale_and_hybrid_does_not(llama_8b: ModelSpec, h100: Device) -> None:
    links = Links(intra_gbs=370, inter_gbs_per_node=100)
    full = {n: run(llama_8b, h100, links, sharded(n), 4).tokens_per_second_per_device for n in (4, 64, 2048)}
    hybrid = {
        n: run(llama_8b, h100, links, sharded(n, "hybrid", 4), 4).tokens_per_second_per_device for n in (64, 2048)
    }
    assert full[4] > full[64] > 1.5 * full[2048]
    assert hybrid[2048] > 0.85 * hybrid[64]


@pytest.mark.parametrize(("kept", "freed"), [("zero2", "full"), ("hybrid_zero2", "hybrid")])
def test_weights_that_stay_gathered_are_gathered_once(llama_8b: ModelSpec, h100: Device, kept: str, freed: str) -> None:
    # A link so slow that hardly anything hides: 2 + 4 bytes a parameter instead of 4 + 4.
    params, links = llama_8b.params.stored, Links(intra_gbs=0.1, inter_gbs_per_node=1000.0)
    one, two = (run(llama_8b, h100, links, sharded(4, kind, 4), 4, engine="native").terms for kind in (kept, freed))
    saved = two["data-parallel traffic"] - one["data-parallel traffic"]
    assert saved == pytest.approx(2.0 * params * 0.75 / (0.1e9 * DEFAULTS.network * DEFAULTS.inside), rel=0.01)
    copies = (two["shard copies"], one["shard copies"])
    assert copies[0] / copies[1] == pytest.approx(14 / 10), "unpacked twice and once, packed once"


def test_mn5_publishes_that_collapse() -> None:
    """Published: 6.7B on H100-64GB nodes of four, full sharding, 4096 tokens a device: 6,185 tokens/s at 32 and 3,996 at 512."""
    model = classic("gpt", layers=32, width=4096, heads=32, vocab=50304)
    device = find_device("H100-64GB")
    links = Links(intra_gbs=450, inter_gbs_per_node=100)  # NVLink; four NDR200 InfiniBand cards per node
    for devices, measured in ((32, 6185), (512, 3996)):
        result = run(model, device, links, sharded(devices), 4, compile=False, loss="plain", attention="flash")
        assert result.tokens_per_second_per_device == pytest.approx(measured, rel=0.2)


def test_offload_takes_time_by_hand(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    """8.03B over eight devices: 40 bytes of each parameter pass between device, host memory and cores at 20 GB/s."""
    layouts = [sharded(8, offload=kind) for kind in ("none", "optimizer", "parameters")]
    none, optimizer, parameters = (run(llama_8b, h100, links, layout) for layout in layouts)
    assert "host memory" not in none.terms
    assert optimizer.terms["host memory"] == pytest.approx(40 * llama_8b.params.stored / 8 / 20e9)
    assert parameters.terms["host memory"] == pytest.approx(48 * llama_8b.params.stored / 8 / 20e9)
    assert none.seconds < optimizer.seconds < parameters.seconds
    assert optimizer.terms["optimizer"] < none.terms["optimizer"]


def test_more_recompute_takes_longer(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    seconds = [run(llama_8b, h100, links, recompute=r).seconds for r in ("none", "selective", "full")]
    assert seconds == sorted(seconds)


def test_accumulation_hides_traffic_when_gradients_wait(llama_8b: ModelSpec, h100: Device) -> None:
    slow = Links(intra_gbs=370, inter_gbs_per_node=25)
    every, last = (
        run(llama_8b, h100, slow, sharded(64, sync=kind, accumulation=4)).seconds for kind in ("every", "last")
    )
    assert last < every


def test_more_data_parallelism_beats_accumulation(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    """global batch = micro-batch x accumulation x data-parallel: the same batch on the same devices."""
    wide = run(llama_8b, h100, links, sharded(64))
    deep = run(llama_8b, h100, links, sharded(16, tensor=4, accumulation=4))
    assert wide.tokens_per_second_per_device > deep.tokens_per_second_per_device


def test_compiling_and_fp8_help(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    base = run(llama_8b, h100, links).seconds
    assert run(llama_8b, h100, links, compile=False).seconds > base
    assert 0.55 * base < run(llama_8b, h100, links, precision="fp8").seconds < 0.9 * base


def test_odd_sides_cost_tiles(a100: Device, links: Links) -> None:
    even, odd = (classic("gpt", layers=8, width=w, heads=w // 144, vocab=50304) for w in (13824, 14400))
    layout = Layout(tensor=8, data=8, sequence_parallel=False)
    speeds = [run(s, a100, links, layout, seq_len=2048, compile=False).mfu for s in (even, odd)]
    assert speeds[0] > 1.1 * speeds[1]


def test_a_calibrated_machine_replaces_the_constants(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    slow = run(llama_8b, h100, links, efficiency=Efficiency(matmul=0.35))
    assert slow.terms["matrix products"] == pytest.approx(
        run(llama_8b, h100, links).terms["matrix products"] * sustained_tflops(h100) / (0.35 * 989)
    )
    assert run(llama_8b, h100, links, efficiency=Efficiency()).seconds == run(llama_8b, h100, links).seconds


def test_traffic_of_a_step_hides_behind_one_micro_batch(llama_8b: ModelSpec, h100: Device) -> None:
    """8.03 billion parameters over a network of 8 GB/s a node: 32 GB of fp32 gradients and 16 GB of weights, each
    63/64 of them, at 0.8 of the rate; half of what a node's own links would need, and 0.3 of the other seconds, are
    paid in any case."""
    slow = Links(intra_gbs=450, inter_gbs_per_node=8, intra_latency_us=1e-6, inter_latency_us=1e-6)
    size = llama_8b.params.stored * (4 + 2)
    seconds, local = size * 63 / 64 / 6.4e9, size / (450e9 * 0.8 * 0.84)
    taken = 0.5 * (local + 0.3 * (seconds - local))
    for accumulation, chunks, behind in ((1, 1, 1.0), (16, 1, 1 / 16)):
        layout = sharded(64, "zero1", accumulation=accumulation, chunks=chunks)
        terms = run(llama_8b, h100, slow, layout, engine="megatron").terms
        outside = ("data-parallel traffic", "stragglers", "fixed")
        compute = sum(value for name, value in terms.items() if name not in outside)
        assert terms["data-parallel traffic"] == pytest.approx(
            taken + max(0.0, seconds - taken - 0.95 * compute * behind), rel=1e-3
        )
    # Interleaved stages of a pipeline of 8 hide it behind 8 micro-batches.
    plain = Layout(data=64, pipeline=8, shard="zero1", shard_size=64, accumulation=32)
    split = replace(plain, chunks=4, schedule="interleaved")
    waits = [run(llama_8b, h100, slow, x, engine="megatron").terms["data-parallel traffic"] for x in (plain, split)]
    assert waits[1] < 0.7 * waits[0]


def test_larger_reductions_on_more_ranks(llama_8b: ModelSpec, h100: Device) -> None:
    """Megatron reduces a million values for each rank at least, so that the latency of a ring stays in bounds."""
    far = Links(intra_gbs=450, inter_gbs_per_node=4000, intra_latency_us=1e-6, inter_latency_us=80)

    def seconds(ranks: int, engine: str) -> float:
        layout = sharded(ranks, "zero1", accumulation=10_000)
        return run(llama_8b, h100, far, layout, engine=engine, gradient_precision="fp32").terms["data-parallel traffic"]

    assert seconds(1024, "megatron") < 0.3 * seconds(1024, "torch")
    assert seconds(16, "megatron") == pytest.approx(seconds(16, "torch"), rel=0.02)


def test_a_rack_of_linked_devices_gathers_inside(llama_8b: ModelSpec) -> None:
    gb200, links = find_device("GB200"), Links(intra_gbs=900, inter_gbs_per_node=50)
    assert gb200 is not None
    spec = StepSpec(seq_len=8192, engine="torch", sync=gradient_sync(FULL))
    nodes, rack = Machine(gb200, links, 4), Machine(gb200, links, 4, linked_devices=72)
    apart, joined = (estimate_step(llama_8b, spec, FULL, m).terms["data-parallel traffic"] for m in (nodes, rack))
    assert joined < 0.5 * apart


def test_power_limits_blackwell(h100: Device) -> None:
    """The same peak at 1,200 and 1,400 W; 1.37 products per watt relative to Hopper."""
    weak, strong = find_device("GB200"), find_device("GB300")
    assert weak is not None and strong is not None and weak.bf16_tflops == strong.bf16_tflops == 2500
    assert sustained_tflops(weak) == pytest.approx(1200 * 1.37 * DEFAULTS.tflops_per_watt)
    assert sustained_tflops(strong) / sustained_tflops(weak) == pytest.approx(1400 / 1200, rel=0.02)


def test_power_limits_hopper(h100: Device) -> None:
    weak = h100.model_copy(update={"tdp_watts": 500.0})
    assert sustained_tflops(weak) == pytest.approx(500 * DEFAULTS.tflops_per_watt)
    assert sustained_tflops(h100) == pytest.approx(700 * DEFAULTS.tflops_per_watt)
    assert sustained_tflops(h100.model_copy(update={"arch": "sm_90"})) == sustained_tflops(h100)


def test_retnet_in_chunks_is_faster_on_long_sequences(h100: Device, links: Links) -> None:
    models = retnet(), retnet(retention="chunkwise", chunk=512)
    parallel, chunked = (run(model, h100, links, Layout(), 1, seq_len=8192).seconds for model in models)
    assert parallel > 2 * chunked


@pytest.mark.parametrize(
    ("field", "code"),
    [("bf16_tflops", "cost.matrix-rate-unknown"), ("bandwidth_gbs", "cost.memory-bandwidth-unknown")],
)
def test_unknown_device_figures_are_named(
    llama_8b: ModelSpec, h100: Device, links: Links, field: str, code: str
) -> None:
    with pytest.raises(PlanError) as error:
        run(llama_8b, h100.model_copy(update={field: None}), links)
    assert error.value.code == code and "H100" in error.value.message


def test_an_unknown_network_is_an_error_only_across_nodes(llama_8b: ModelSpec, h100: Device) -> None:
    with pytest.raises(PlanError) as error:
        run(llama_8b, h100, Links(intra_gbs=370))
    assert error.value.code == "cost.network-unknown" and "8 nodes" in error.value.message
    assert run(llama_8b, h100, Links(intra_gbs=370), sharded(8)).seconds > 0


def test_an_uneven_pipeline_is_as_slow_as_its_fullest_rank(h100: Device, links: Links) -> None:
    layout = Layout(pipeline=4, data=2, accumulation=16)
    models = [own(layers=n, width=1024, heads=8, vocab=512) for n in (12, 13, 16)]
    even, uneven, larger = (
        run(model, h100, links, layout, engine="native").terms["matrix products"] for model in models
    )
    assert even < uneven == larger


def test_an_estimate_costs_less_than_150_microseconds(llama_8b: ModelSpec, h100: Device, links: Links) -> None:
    step, layout = StepSpec(seq_len=4096), sharded(16, "zero1", tensor=4, pipeline=2, accumulation=8)
    machine, best = Machine(h100, links, 8), float("inf")
    for _ in range(3):
        started = time.process_time()
        for _ in range(200):
            estimate_step(llama_8b, step, layout, machine)
        best = min(best, (time.process_time() - started) / 200)
    assert best < 150e-6


def test_a_bucket_saves_latency_and_lengthens_the_tail(h100: Device) -> None:
    """64 layers of 30,673,920 values or 123 MB of gradients, on 1,024 devices: 65 collectives, 33 of two layers, 2 of
    all. What the last one holds beyond one layer is not hidden."""
    model = own(layers=64, width=1536, ffn=4608, heads=12, vocab=32000)
    links = Links(intra_gbs=450.0, inter_gbs_per_node=100.0, intra_latency_us=5.0, inter_latency_us=20.0)

    def traffic(shard: str, bucket: int | None, micro_batch: int = 4) -> float:
        layout = sharded(1024, shard, 1 if shard == "none" else None, micro_batch=micro_batch, bucket=bucket)
        return run(model, h100, links, layout, 4, engine="native").terms["data-parallel traffic"]

    layer_bytes = 4 * next(iter(model.layers())).num_params
    assert traffic("full", None) == traffic("full", layer_bytes) == traffic("full", 0)
    # Full sharding pays the latency of a ring for each collective: 1,023 hops of (20 + 3 x 5) / 4 us, 3 x 65 times.
    assert traffic("full", None) - traffic("full", 2 * layer_bytes) > 0.3
    # No sharding: a tree is short, and one bucket of everything is reduced after the backward pass.
    assert traffic("none", 70 * layer_bytes) > 2 * traffic("none", 2 * layer_bytes)


def test_muon_multiplies_each_matrix_fifteen_times_and_shares_the_work(links: Links) -> None:
    """1.1B: 5 x (4 m^2 n + 2 m^3) FLOPs for each m x n matrix of 22 layers are 48 TFLOP."""
    h200, model = find_device("h200"), own(layers=22, width=2048, heads=32, kv_heads=4, ffn=5632, vocab=32000)
    native: dict[str, Any] = {"engine": "native", "optimizer": "muon", "moment_tensors": 1.1}
    alone = run(model, h200, links, Layout(), **native).terms["orthogonalisation"]
    sizes = [(2048, 2048)] * 2 + [(256, 2048)] * 2 + [(2048, 5632)] * 3
    flops = 22 * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sizes)
    assert flops / 48e12 == pytest.approx(1.0, rel=0.1)
    assert flops / (h200.bf16_tflops * 1e12) < alone < 2.5 * flops / (h200.bf16_tflops * 1e12)
    four = run(model, h200, links, sharded(4), **native).terms["orthogonalisation"]
    assert alone / 4 < four < alone / 2, "a fourth of the products, and two messages"
