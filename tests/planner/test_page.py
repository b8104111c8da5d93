"""The page of a plan shows memory, ranking, steps, scaling and energy; scaling bends where full sharding collapses."""

import pytest

from windlass.planner import plan
from windlass.planner.page import carbon, energy_parts, plan_page, stacked
from windlass.planner.scaling import node_counts, scaling


@pytest.fixture
def case(small, cluster_of):
    return small(), cluster_of("snellius-h100")


def test_page_has_its_sections(case):
    plans = plan(*case)
    points = scaling(*case, node_counts(2, 88))
    html = plan_page(plans, points, scaling(*case, node_counts(2, 88), weak=True))
    for word in (
        "What fills the memory",
        "Ranking",
        "Where the time of a step goes",
        "Strong scaling",
        "Energy and carbon",
        "93.1 GiB usable",
        "MFU (6N",
    ):
        assert word in html
    assert "Strong scaling" not in plan_page(plans)


def test_recipe_texts_are_escaped(small, cluster_of):
    recipe = small(model={"assumed": ["<b>x"]})
    assert "<b>x" not in plan_page(plan(recipe, cluster_of("snellius-h100")))


def test_energy_parts_sum_to_the_meter(case):
    plans = plan(*case)
    assert sum(energy_parts(plans.best).values()) == pytest.approx(plans.best.energy.kwh / 1000)


def test_small_terms_are_gathered():
    chart = stacked("t", ["a"], [{"big": 99.0, "tiny": 0.4, "other": 0.6}], "GiB")
    assert [s.name for s in chart.series] == ["big", "other"]
    assert chart.series[-1].y[0] == pytest.approx(1.0)


def test_carbon_words():
    assert carbon(None) == "unknown" and carbon(3.21) == "3.21 t" and carbon(0.583) == "583 kg"


def test_node_counts_surround_the_recipe():
    counts = node_counts(20, 88)
    assert {1, 2, 4, 5, 10, 20, 40, 80} <= set(counts) and max(counts) <= 88


def test_strong_scaling_loses_efficiency_and_weak_scaling_less(recipe_of, cluster_of):
    recipe = recipe_of("viking_7b_lumi")
    cluster = cluster_of("lumi-g")
    strong, weak = (scaling(recipe, cluster, [8, 64, 128], weak=w) for w in (False, True))
    assert [p.nodes for p in strong] == [8, 64, 128]

    def per_device(p):
        return p.tokens_per_second() / p.devices

    assert per_device(strong[-1]) < per_device(strong[0])
    assert per_device(weak[-1]) >= per_device(strong[-1])
    assert strong[0].tokens_per_second("no such kind") is None


def test_sizes_that_cannot_be_planned_are_left_out(recipe_of, cluster_of):
    recipe = recipe_of("gptnl_8b_snellius")
    assert [p.nodes for p in scaling(recipe, cluster_of("snellius-h100"), [20, 89])] == [20]  # it has 88 nodes
