import pytest

from windlass.clusters import load_device
from windlass.clusters.model import Billing, Grid, Node
from windlass.config import ModelConfig
from windlass.cost.power import (
    allocation_units,
    busy_share,
    compute_mfu,
    device_watts,
    energy,
    energy_of,
    node_power,
)
from windlass.cost.step import StepEstimate
from windlass.models.presets import model_spec


@pytest.mark.parametrize(
    ("model", "mwh", "pue", "kg_per_kwh", "tonnes"),
    [
        ("Gopher-280B", 1066, 1.08, 0.330, 380), ("BLOOM-176B", 433, 1.2, 0.057, 30), ("OPT-175B", 324, 1.1, 0.231, 82),
        ("T5-11B", 77, 1.12, 0.545, 47), ("LLaMA-7B", 33, 1.1, 0.385, 14), ("LLaMA2-7B", 74, 1.1, 0.385, 31),
    ],
)  # fmt: skip
def test_the_olmo_papers_energy_table(model, mwh, pue, kg_per_kwh, tonnes):
    found = energy_of(mwh * 1000, Grid(pue=pue, g_per_kwh=kg_per_kwh * 1000))
    assert round(found.tco2e) == tonnes, model


def test_gptnls_14_tonnes_are_52_mwh():
    assert energy_of(52_300, Grid(pue=1.0, g_per_kwh=267.6)).tco2e == pytest.approx(14.0, rel=0.01)


def test_location_and_market_are_kept_apart():
    found = energy_of(1000, Grid(pue=1.1, g_per_kwh=267.6, market_g_per_kwh=0.0))
    assert found.tco2e == pytest.approx(0.29436) and found.market_tco2e == 0.0
    assert energy_of(1000, Grid(pue=1.1)).tco2e is None and energy_of(1000, Grid(pue=1.1)).market_tco2e is None


def test_an_unknown_pue_is_said():
    found = energy_of(1000, Grid(g_per_kwh=100.0))
    assert found.kwh == 1000 and any("PUE unknown" in a for a in found.assumed)


def test_power_rises_with_busy_time_to_the_limit(h100):
    watts = [device_watts(h100, busy) for busy in (0.0, 0.3, 0.7, 1.0, 1.4)]
    assert watts == sorted(watts) and watts[-1] == watts[-2]
    # Measured: 23 training steps on an H200, 36 to 86 % MFU, draw 670 to 705 W, median 688.
    assert watts[-1] == pytest.approx(688, rel=0.01)


def spec(layers, width, ffn, heads):
    config = {"layers": layers, "width": width, "ffn": ffn, "heads": heads, "kv_heads": heads, "vocab": 50304}
    return model_spec(ModelConfig.model_validate(config))


@pytest.mark.parametrize(
    ("model", "mfu", "precision", "watts"),
    [
        # Luciole 1B and 23B on Jean Zay: the larger one computes more, waits more and draws less.
        (spec(24, 2048, 8192, 16), 0.346, "bf16", 546),
        (spec(40, 6144, 20480, 48), 0.362, "bf16", 414),
        # MLPerf's GPT-3 in FP8: 75.5 % of the bf16 peak, 656 of 856 W at the node's meter are the device's.
        (spec(96, 12288, 49152, 96), 0.755, "fp8", 648),
    ],
    ids=["luciole-1b", "luciole-23b", "gpt3-fp8"],
)
def test_measured_runs_draw_what_their_busy_time_says(model, mfu, precision, watts):
    h100 = load_device("h100-80")
    busy = mfu / compute_mfu(model, h100, 4096, precision)
    assert device_watts(h100, busy) == pytest.approx(watts, rel=0.2)


def test_a_small_model_draws_more_than_its_mfu_suggests():
    h100 = load_device("h100-80")
    small, large = spec(24, 1024, 2816, 16), spec(32, 4096, 14336, 32)
    assert compute_mfu(small, h100, 2048) < 0.6 * compute_mfu(large, h100, 2048)
    assert device_watts(h100, 0.14 / compute_mfu(small, h100, 2048)) == pytest.approx(531, rel=0.2)


def test_a_planned_step_waits_for_traffic_and_bubbles():
    step = StepEstimate(10.0, {}, 1.0, 0.4, "6N", None, exposed_communication=2.0, bubble=1.0)
    assert busy_share(step) == pytest.approx(0.7)


def test_a_node_is_more_than_its_devices(h100):
    device = device_watts(h100, 0.5)
    stated = node_power(h100, Node(devices=4, cores=64, cpu_watts=600, other_watts=300), 0.5)
    assert stated.node_watts == 4 * device + 300 + 300 and stated.assumed == ()
    # The rest of the node is the same at any load: 124 W per device in small nodes, 208 W in servers of eight.
    for busy in (0.2, 1.0):
        for devices, each in ((4, 124), (8, 208)):
            guess = node_power(h100, Node(devices=devices, cores=64), busy)
            assert guess.node_watts == pytest.approx(devices * (device_watts(h100, busy) + each)) and guess.assumed
    capped = node_power(h100, Node(devices=4, cores=64, cpu_watts=600, other_watts=300, ceiling_watts=2000), 0.5)
    assert capped.node_watts == 2000


def test_unknown_power_gives_no_energy(h100):
    blind = h100.model_copy(update={"tdp_watts": None})
    found = energy(node_power(blind, Node(devices=4, cores=64), 0.4), 10, 24, Grid(pue=1.2, g_per_kwh=100))
    assert found.kwh is None and found.tco2e is None


def test_energy_of_a_run_by_hand(h100):
    power = node_power(h100, Node(devices=4, cores=64, cpu_watts=600, other_watts=300), 1.0)
    found = energy(power, 22, 24 * 34, Grid(pue=1.2, g_per_kwh=267.6, euro_per_kwh=0.2), tokens=450e9)
    # 84 + 616 x 0.98 = 687.7 W per device, and 600 W of the node.
    assert found.it_kwh == pytest.approx(3.35072 * 22 * 24 * 34)
    assert found.kwh == pytest.approx(found.it_kwh * 1.2)
    assert found.kwh_per_billion_tokens == pytest.approx(found.kwh / 450)
    assert found.euros == pytest.approx(found.kwh * 0.2)


def test_allocation_units():
    assert allocation_units(Billing(unit="SBU", per_node_hour=768), 22, 10) == 168_960
    assert allocation_units(Billing(), 22, 10) is None
