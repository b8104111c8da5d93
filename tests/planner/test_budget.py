"""Budgets in days, node-hours, kWh and euros; what fits; prices and powers that are unknown."""

import pytest

from windlass.clusters import load_cluster
from windlass.errors import ConfigError
from windlass.models.presets import model_spec
from windlass.planner.budget import Budget, budget, budget_days, model_near
from windlass.planner.budget_page import budget_json, budget_page, curves, fit_map


def ask(**changes):
    base = {"cluster": load_cluster("snellius-h100"), "nodes": 22, "mfu": 0.4}
    return budget(Budget(**{**base, **changes}))


def test_node_hours_end_when_they_are_spent():
    row = ask(node_hours=22 * 24 * 10.0).rows[0]
    assert row.days == pytest.approx(10) and row.bound_by == "node-hours"
    assert row.node_hours == pytest.approx(5280)
    assert row.units == pytest.approx(5280 * 768)  # SBU


def test_the_tightest_limit_binds():
    row = ask(days=30.0, node_hours=22 * 24 * 10.0).rows[0]
    assert row.days == pytest.approx(10) and row.bound_by == "node-hours"


def test_kwh_are_counted_at_the_meter():
    result = ask(kwh=50_000.0)
    for row in result.rows:
        assert row.bound_by == "kWh"
        assert row.energy.kwh == pytest.approx(50_000)


def test_euros_need_a_price():
    with pytest.raises(ConfigError) as error:
        ask(euros=1e6)
    assert error.value.code == "planner.price-missing" and "--euro-per-kwh" in (error.value.hint or "")
    by_hour = ask(euros=22 * 24 * 10.0 * 12, euro_per_node_hour=12.0).rows[0]
    assert by_hour.days == pytest.approx(10)
    by_kwh = ask(euros=10_000.0, euro_per_kwh=0.2).rows[0]
    assert by_kwh.energy.kwh == pytest.approx(50_000)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "planner.budget-without-limit"),
        ({"days": 0.0}, "planner.budget-not-positive"),
        ({"days": 1.0, "nodes": 0}, "planner.too-few-nodes"),
        ({"days": 1.0, "nodes": 89}, "planner.too-many-nodes"),
        ({"days": 1.0, "mfu": 1.5}, "planner.mfu-out-of-range"),
    ],
)
def test_impossible_budgets(changes, code):
    with pytest.raises(ConfigError) as error:
        ask(**changes)
    assert error.value.code == code


def test_no_sizes():
    with pytest.raises(ConfigError) as error:
        budget(Budget(cluster=load_cluster("snellius-h100"), nodes=1, days=1.0), [])
    assert error.value.code == "planner.no-model-size"


def test_unknown_power_is_said_not_zero(monkeypatch):
    from windlass.clusters import load_device

    device = load_device("h100-94").model_copy(update={"tdp_watts": None})
    b = Budget(cluster=load_cluster("snellius-h100"), nodes=1, kwh=100.0, mfu=0.4)
    assert budget_days(b, device, 0.4) == (None, "kWh, but the device's power is unknown")


def test_full_recompute_counts_8n():
    plain, again = ask(days=10.0).rows[0], ask(days=10.0, flops_per_parameter=8.0).rows[0]
    assert again.tokens == pytest.approx(plain.tokens * 6 / 8)


def test_planned_rates_fall_with_size_and_a_model_that_does_not_fit_says_so():
    result = budget(Budget(cluster=load_cluster("snellius-a100"), nodes=1, days=30.0), [1e9, 7e9, 400e9])
    small, middle, huge = result.rows
    assert small.tokens > middle.tokens > 0
    assert 0.1 < middle.mfu < 0.8
    assert huge.tokens is None and "no layout of" in huge.layout
    assert any("400B does not fit on 1 nodes" in text for text in result.warnings)
    assert budget_json(result)["sizes"][2]["tokens"] is None


def test_pairs_fit_up_to_the_budget():
    result = ask(days=34.0)
    for pair in result.pairs:
        assert pair.fits == (pair.days <= 34.0)
    assert any(p.fits for p in result.pairs) and any(not p.fits for p in result.pairs)


@pytest.mark.parametrize("size", [0.3e9, 1e9, 2e9, 7e9, 13e9, 30e9, 70e9, 140e9])
def test_shapes_come_near_their_size(size):
    model = model_near(size)
    assert model_spec(model).params.total == pytest.approx(size, rel=0.06)
    assert 40 <= model.width / model.layers <= 190


@pytest.mark.parametrize("size", [1e6, 19e6, 1e15])
def test_a_size_without_a_shape_is_refused(size):
    with pytest.raises(ConfigError) as error:
        budget(Budget(cluster=load_cluster("snellius-h100"), nodes=1, days=1.0), [size])
    assert error.value.code == "planner.size-out-of-range" and f"{size:,.0f}" in error.value.message
    assert model_near(20e6).layers >= 4 and model_near(10e12).width == 16384


def test_json_has_the_curve_data_laws_and_caveats():
    value = budget_json(ask(days=34.0, unique_tokens=450e9))
    assert value["devices"] == 88 and len(value["sizes"]) == 6
    row = value["sizes"][0]
    assert row["loss"]["low"] < row["loss"]["Besiroglu 2024"] < row["loss"]["high"]
    assert row["loss"]["effective_tokens"] < row["tokens"]
    assert value["caveats"] and len(value["laws"]) == 2
    assert value["lowest_expected_loss"] in [r["parameters"] for r in value["sizes"]]


def test_picture_page_and_map(tmp_path):
    result = ask(days=120.0)
    chart = curves(result, 450e9)
    assert [s.name for s in chart.series] == ["1B", "2B", "7B", "13B", "30B", "70B"]
    assert chart.series[4].y[-1] == pytest.approx(2.005e12, rel=1e-3)
    assert chart.marks[0].at == 450e9
    heat = fit_map(result)
    assert heat.values[5][-1] is None and heat.labels[5][-1].startswith("(")
    html = budget_page(result, 450e9)
    assert "What fits" in html and "Besiroglu" in html and "MassiveText" in html
