import pytest

from windlass.clusters.model import Billing, Grid, Node
from windlass.cost.power import allocation_units, device_watts, energy, energy_of, node_power


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


def test_power_rises_with_utilisation_to_the_limit(h100):
    watts = [device_watts(h100, m) for m in (0.0, 0.1, 0.3, 0.45, 0.6)]
    assert watts == sorted(watts) and watts[-1] == watts[-2] == 700
    # Measured: an H200 draws 638 W at an MFU of 0.40 and 690 W at 0.56.
    assert device_watts(h100, 0.40) == pytest.approx(638, rel=0.06)


def test_a_node_is_more_than_its_devices(h100):
    full = node_power(h100, Node(devices=4, cores=64, cpu_watts=600, other_watts=300), 0.5)
    assert full.node_watts == 4 * 700 + 300 + 300 and full.assumed == ()
    guess = node_power(h100, Node(devices=4, cores=64), 0.5)
    assert guess.node_watts == 4 * 700 * 1.25 and guess.assumed
    capped = node_power(h100, Node(devices=4, cores=64, cpu_watts=600, other_watts=300, ceiling_watts=3000), 0.5)
    assert capped.node_watts == 3000


def test_unknown_power_gives_no_energy(h100):
    blind = h100.model_copy(update={"tdp_watts": None})
    found = energy(node_power(blind, Node(devices=4, cores=64), 0.4), 10, 24, Grid(pue=1.2, g_per_kwh=100))
    assert found.kwh is None and found.tco2e is None


def test_energy_of_a_run_by_hand(h100):
    power = node_power(h100, Node(devices=4, cores=64, cpu_watts=600, other_watts=300), 0.5)  # 3.4 kW
    found = energy(power, 22, 24 * 34, Grid(pue=1.2, g_per_kwh=267.6, euro_per_kwh=0.2), tokens=450e9)
    assert found.it_kwh == pytest.approx(3.4 * 22 * 24 * 34)
    assert found.kwh == pytest.approx(found.it_kwh * 1.2)
    assert found.kwh_per_billion_tokens == pytest.approx(found.kwh / 450)
    assert found.euros == pytest.approx(found.kwh * 0.2)


def test_allocation_units():
    assert allocation_units(Billing(unit="SBU", per_node_hour=768), 22, 10) == 168_960
    assert allocation_units(Billing(), 22, 10) is None
