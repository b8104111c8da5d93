import dataclasses
import time

import pytest
from windlass.cost.params import count
from windlass.cost.shapes import make_shape
from windlass.cost.work import Degrees, Work

from windlass.clusters.model import Efficiency, Links
from windlass.cost.step import DEFAULTS, bubble_share, estimate, sustained_tflops
from windlass.errors import PlanError

FULL = Degrees(data=64, shard="full")


def run(shape, device, links, layout=FULL, per_node=8, efficiency=None, **work):
    return estimate(shape, Work(**{"seq_len": 4096, **work}), layout, device, links, per_node, efficiency)


def test_terms_sum_to_the_step(llama_8b, h100, links):
    found = run(llama_8b, h100, links)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.tokens_per_second_per_device == pytest.approx(4096 / found.seconds)
    assert 0.2 < found.mfu < 0.6 and found.mfu_convention == "6N+attention"


@pytest.mark.parametrize(
    ("layers", "width", "ffn", "kv_heads", "vocab", "seq_len", "micro_batch", "recompute", "measured"),
    [
        (22, 2048, 5632, 4, 32000, 4096, 8, "none", 65_825),
        (16, 4096, 14336, 8, 128256, 8192, 2, "none", 19_266),
        (16, 4096, 14336, 8, 128256, 8192, 2, "selective", 17_516),
        (32, 4096, 14336, 8, 128256, 8192, 1, "full", 6_815),
    ],
)  # fmt: skip
def test_torchtitan_on_one_h200(h100, layers, width, ffn, kv_heads, vocab, seq_len, micro_batch, recompute, measured):
    """Measured on an H200 with torch 2.11; nothing is calibrated here."""
    shape = make_shape(layers=layers, width=width, ffn=ffn, heads=32, kv_heads=kv_heads, vocab=vocab)
    h200 = h100.model_copy(update={"bandwidth_gbs": 4800})
    found = run(shape, h200, Links(), Degrees(shard="full"), 1, seq_len=seq_len, micro_batch=micro_batch, recompute=recompute, loss="compiled", kernel="flash")  # fmt: skip
    assert found.tokens_per_second_per_device == pytest.approx(measured, rel=0.13)


def test_bloom_on_jean_zay(a100):
    """Published: 176B, 384 A100, tensor 4, pipeline 12, micro-batch 2: 107 tokens/s per device."""
    shape = make_shape(arch="bloom", layers=70, width=14336, heads=64, vocab=250680)
    layout = Degrees(data=8, tensor=4, pipeline=12, shard="zero1", sequence_parallel=False)
    found = run(shape, a100, Links(intra_gbs=240, inter_gbs_per_node=50), layout, seq_len=2048, micro_batch=2, accumulation=128,
                recompute="full", compile=False, flash=False, engine="deepspeed", gradients="fp32", loss="plain")  # fmt: skip
    assert found.tokens_per_second_per_device == pytest.approx(107, rel=0.1)


def test_the_bubble_by_hand():
    assert bubble_share(Degrees(pipeline=8), 32) == 7 / 32
    assert bubble_share(Degrees(pipeline=8, schedule="interleaved", chunks=4), 32) == 7 / 128
    assert bubble_share(Degrees(pipeline=1), 32) == 0
    assert bubble_share(Degrees(pipeline=8, schedule="zbv"), 32) < bubble_share(Degrees(pipeline=8), 32)


def test_full_sharding_collapses_at_scale_and_hybrid_does_not(llama_8b, h100):
    links = Links(intra_gbs=370, inter_gbs_per_node=100)
    full = {
        n: run(llama_8b, h100, links, Degrees(data=n, shard="full"), 4).tokens_per_second_per_device
        for n in (4, 64, 2048)
    }
    hybrid = {
        n: run(llama_8b, h100, links, Degrees(data=n, shard="hybrid"), 4).tokens_per_second_per_device
        for n in (64, 2048)
    }
    assert full[4] > full[64] > 1.5 * full[2048]
    assert hybrid[2048] > 0.85 * hybrid[64]


def test_mn5_publishes_that_collapse():
    """Published: 6.7B on H100-64GB nodes of four, full sharding, 4096 tokens a device: 6,185 tokens/s at 32 and 3,996 at 512."""
    from windlass.clusters import find_device

    shape = make_shape(arch="gpt", layers=32, width=4096, heads=32, vocab=50304)
    device = find_device("H100-64GB")
    links = Links(intra_gbs=450, inter_gbs_per_node=100)  # NVLink; four NDR200 InfiniBand cards per node
    for devices, measured in ((32, 6185), (512, 3996)):
        found = run(
            shape, device, links, Degrees(data=devices, shard="full"), 4, compile=False, loss="plain", kernel="flash"
        )
        assert found.tokens_per_second_per_device == pytest.approx(measured, rel=0.2)


def test_offload_takes_time_by_hand(llama_8b, h100, links):
    """8.03B over eight devices: 40 bytes of each parameter pass between device, host memory and cores at 20 GB/s."""
    layouts = [Degrees(data=8, shard="full", offload=kind) for kind in ("none", "optimizer", "parameters")]
    none, optimizer, parameters = (run(llama_8b, h100, links, layout) for layout in layouts)
    assert "host memory" not in none.terms
    assert optimizer.terms["host memory"] == pytest.approx(40 * count(llama_8b).stored / 8 / 20e9)
    assert parameters.terms["host memory"] == pytest.approx(48 * count(llama_8b).stored / 8 / 20e9)
    assert none.seconds < optimizer.seconds < parameters.seconds
    assert optimizer.terms["optimizer"] < none.terms["optimizer"]


def test_more_recompute_takes_longer(llama_8b, h100, links):
    seconds = [run(llama_8b, h100, links, recompute=r).seconds for r in ("none", "selective", "full")]
    assert seconds == sorted(seconds)


def test_accumulation_hides_traffic_when_gradients_wait(llama_8b, h100):
    slow = Links(intra_gbs=370, inter_gbs_per_node=25)
    every, last = (
        run(llama_8b, h100, slow, Degrees(data=64, shard="full", sync=s), accumulation=4).seconds
        for s in ("every", "last")
    )
    assert last < every


def test_more_data_parallelism_beats_accumulation(llama_8b, h100, links):
    """global batch = micro-batch x accumulation x data-parallel: the same batch on the same devices."""
    wide = run(llama_8b, h100, links, Degrees(data=64, shard="full"), accumulation=1)
    deep = run(llama_8b, h100, links, Degrees(data=16, tensor=4, shard="full"), accumulation=4)
    assert wide.tokens_per_second_per_device > deep.tokens_per_second_per_device


def test_compiling_and_fp8_help(llama_8b, h100, links):
    base = run(llama_8b, h100, links).seconds
    assert run(llama_8b, h100, links, compile=False).seconds > base
    assert 0.55 * base < run(llama_8b, h100, links, precision="fp8").seconds < 0.9 * base


def test_odd_sides_cost_tiles(a100, links):
    even, odd = (make_shape(arch="gpt", layers=8, width=w, heads=w // 144, vocab=50304) for w in (13824, 14400))
    layout = Degrees(tensor=8, data=8, sequence_parallel=False)
    speeds = [run(s, a100, links, layout, seq_len=2048, compile=False).mfu for s in (even, odd)]
    assert speeds[0] > 1.1 * speeds[1]


def test_a_calibrated_machine_replaces_the_constants(llama_8b, h100, links):
    slow = run(llama_8b, h100, links, efficiency=Efficiency(matmul=0.35))
    assert slow.terms["matrix products"] == pytest.approx(
        run(llama_8b, h100, links).terms["matrix products"] * sustained_tflops(h100) / (0.35 * 989)
    )
    assert run(llama_8b, h100, links, efficiency=Efficiency()).seconds == run(llama_8b, h100, links).seconds


def test_power_limits_hopper(h100):
    weak = h100.model_copy(update={"tdp_watts": 500.0})
    assert sustained_tflops(weak) == pytest.approx(500 * DEFAULTS.tflops_per_watt)
    assert sustained_tflops(h100) == pytest.approx(700 * DEFAULTS.tflops_per_watt)
    assert sustained_tflops(h100.model_copy(update={"arch": "sm_90"})) == sustained_tflops(h100)


def test_retnet_in_chunks_is_faster_on_long_sequences(h100, links):
    common = {
        "arch": "retnet",
        "layers": 16,
        "width": 1024,
        "ffn": 1728,
        "heads": 4,
        "vocab": 50000,
        "value_width": 1728,
    }
    parallel, chunked = (
        run(make_shape(**common, chunk=c), h100, links, Degrees(), 1, seq_len=8192).seconds for c in (0, 512)
    )
    assert parallel > 2 * chunked


@pytest.mark.parametrize(
    ("field", "message"), [("bf16_tflops", "matrix rate of H100"), ("bandwidth_gbs", "memory bandwidth of H100")]
)
def test_unknown_device_figures_are_named(llama_8b, h100, links, field, message):
    with pytest.raises(PlanError, match=message):
        run(llama_8b, h100.model_copy(update={field: None}), links)


def test_an_unknown_network_is_an_error_only_across_nodes(llama_8b, h100):
    with pytest.raises(PlanError, match="8 nodes, but the network"):
        run(llama_8b, h100, Links(intra_gbs=370))
    assert run(llama_8b, h100, Links(intra_gbs=370), Degrees(data=8, shard="full")).seconds > 0


def test_an_estimate_costs_less_than_100_microseconds(llama_8b, h100, links):
    work, layout = Work(seq_len=4096, accumulation=8), Degrees(data=16, tensor=4, pipeline=2, shard="zero1")
    started = time.process_time()
    for _ in range(500):
        estimate(llama_8b, work, layout, h100, links, 8)
    assert (time.process_time() - started) / 500 < 100e-6


def test_work_is_a_value():
    assert dataclasses.replace(Work(seq_len=8), micro_batch=2) == Work(seq_len=8, micro_batch=2)
