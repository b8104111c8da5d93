from __future__ import annotations

import pytest

from windlass.clusters.load import load_cluster
from windlass.config.observe import EnergyConfig
from windlass.energy.carbon import car_equivalent, carbon, equivalent, print_carbon


def test_by_hand_with_the_cluster_files_factors():
    result = carbon(3.6e9, load_cluster("snellius-h100"))  # 1 MWh
    assert result.it_kwh == pytest.approx(1000.0)
    assert result.kwh == pytest.approx(1190.0)
    assert result.location_kg == pytest.approx(1190 * 0.2676)
    assert result.location_it_only_kg == pytest.approx(267.6)
    assert "Our World in Data" in result.grid.source


def test_gptnls_energy_is_14_t_without_pue():
    result = carbon(52.3e3 * 3.6e6, load_cluster("snellius-h100"))
    assert result.location_it_only_kg == pytest.approx(14_000, rel=0.001)


def test_gptnls_14_t_are_40000_km_by_car():
    assert "1.3 m by car" in car_equivalent(0.00045), "a run of minutes is not 0.0 km"
    assert "40,000 km by car" in car_equivalent(14_000) and "350 g CO2e per km" in car_equivalent(14_000)
    result = carbon(52.3e3 * 3.6e6, load_cluster("snellius-h100"), overrides={"pue": 1.0})
    assert "39,987 km by car" in result.co2_equivalent
    # No distance where the emissions are unknown or nothing: an energy is not a CO2 figure.
    assert carbon(3.6e9, None).co2_equivalent is None and "km" not in carbon(3.6e9, None).equivalent


def test_the_recipes_override_wins_and_is_named():
    result = carbon(
        3.6e6, load_cluster("snellius-h100"), EnergyConfig(pue=1.05, grid_g_per_kwh=100, market_g_per_kwh=10)
    )
    assert result.kwh == pytest.approx(1.05)
    assert (result.location_kg, result.market_kg) == (pytest.approx(0.105), pytest.approx(0.0105))
    assert result.pue.source == "recipe (energy.pue)"


def test_unknown_factors_stay_unknown():
    result = carbon(3.6e6, None)
    assert (result.kwh, result.location_kg, result.market_kg, result.pue.value) == (None, None, None, None)


@pytest.mark.parametrize(
    ("kwh", "text"),
    [
        (0.002, "12 minutes of a 10 W lamp"),
        (0.02, "2 hours of a 10 W lamp"),
        (2.0, "20 litres"),
        (82.0, "10 days of electricity"),
        (60_000.0, "20 years of electricity"),
    ],
)
def test_equivalents(kwh, text):
    assert text in equivalent(kwh)


@pytest.mark.parametrize(
    ("kg", "text"),
    [
        (None, "unknown"),
        (14_000.0, "14 t CO2e"),
        (2.5, "2.5 kg CO2e"),
        (0.004, "4 g CO2e"),
        (0.0, "0 g CO2e"),
        (999.9, "1 t CO2e"),
        (1_043_700.0, "1,044 t CO2e"),
    ],
)
def test_print_carbon(kg, text):
    assert print_carbon(kg) == text and print_carbon(kg, unit="") == text.removesuffix(" CO2e")
