"""Ranking, times, reasons and marks of a plan agree with each other, in the text, the JSON and the pages."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from windlass.clusters import cluster_names, load_cluster
from windlass.config import load_recipe
from windlass.errors import WindlassError
from windlass.planner import plan
from windlass.planner.budget import Budget, budget
from windlass.planner.budget_page import budget_json
from windlass.planner.measured import mfu_beyond, tokens_beyond
from windlass.planner.page import mfu_text, plan_page
from windlass.planner.record import plans_json
from windlass.planner.search import EQUAL, RANKED_BY, TIE, TIGHT, TIGHT_PENALTY
from windlass.report.dash.planner import ask, question
from windlass.units import print_share

RECIPES = Path(__file__).parents[2] / "recipes"
# Every kind of device, layouts of the recipe, and one whose second and third are faster than the first (Viking 33B).
NAMES = (
    "viking_33b_lumi", "gptnl_8b_snellius", "llama32_1b_snellius", "italia_9b_leonardo",
    "teuken_7b_juwels", "salamandra_2b_marenostrum5", "poro_34b_lumi", "tiny_cpu",
)  # fmt: skip


def plans_of(name, cluster=None):
    recipe = load_recipe(RECIPES / f"{name}.toml").recipe
    return plan(recipe, load_cluster(cluster or recipe.cluster))


def check_agreement(plans):
    first, *others = plans.plans
    assert [p.rank for p in plans.plans] == sorted({p.rank for p in plans.plans})
    assert [p.days for p in others] == sorted(p.days for p in others)
    ranked = min(p.days * (TIGHT_PENALTY if p.memory_share > TIGHT else 1) for p in plans.plans)
    assert first.days <= ranked * 1.0305  # e**0.03
    claims_fastest = "fastest of" in first.reason
    assert not claims_fastest or all(first.days <= p.days for p in others)
    for p in others:
        stated = re.match(r"(?:the recipe's layout; )?([\d.]+) % (faster|slower)", p.reason)
        assert p.slower == pytest.approx(p.days / first.days - 1)
        if abs(p.slower) <= EQUAL:
            assert stated is None and "as fast" in p.reason
        else:
            assert stated is not None
            assert float(stated[1]) == pytest.approx(abs(p.slower) * 100, abs=0.051)
            assert (stated[2] == "slower") == (p.slower > 0)
        if p.slower <= 0:  # the ranking is then by something else, and the reason names it
            assert p.ranked_by in (*RANKED_BY[1:], "tight memory") and not claims_fastest
            assert p.memory_share > TIGHT or -p.slower <= TIE
            assert any(word in p.reason for word in ("replicas", "in a row", "mechanisms", "GiB of memory", "tight"))
        term = re.search(r"([+-][\d.,e-]+) s/step in ([^,;]+)", p.reason)
        if term is not None:
            scale = first.batch_tokens / p.batch_tokens
            difference = p.step.terms[term[2]] * scale - first.step.terms.get(term[2], 0.0)
            assert difference > 0 and float(term[1].replace(",", "")) == pytest.approx(difference, rel=0.06)
        for mine, other in re.findall(r"([\d,]+) replicas instead of ([\d,]+)", p.reason):
            assert (int(mine.replace(",", "")), int(other.replace(",", ""))) == (p.layout.data, first.layout.data)
            assert p.layout.data < first.layout.data


@pytest.mark.parametrize("name", NAMES)
def test_order_percentages_and_reasons_agree(name):
    plans = plans_of(name)
    check_agreement(plans)
    document = plans_json(plans)["plans"]
    assert [row["reason"] for row in document] == [p.reason for p in plans.plans]
    assert document[0]["rank"] == 1 and document[0]["ranked_by"] is None
    assert all(row["ranked_by"] == "time" for row in document if row["slower_than_first"] > 0)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [name for name in cluster_names() if name != "workstation"])
def test_order_percentages_and_reasons_agree_for_every_recipe_on_every_cluster(cluster):
    checked = 0
    for path in sorted(RECIPES.glob("*.toml")):
        try:
            plans = plans_of(path.stem, cluster)
        except WindlassError:  # a data file, a batch that no layout divides here, more nodes than there are
            continue
        if plans.plans:
            check_agreement(plans)
            checked += 1
    assert checked >= 5


def test_a_layout_far_down_keeps_its_rank_in_a_short_list():
    recipe = load_recipe(RECIPES / "italia_9b_leonardo.toml").recipe
    complete, short = (plan(recipe, load_cluster(recipe.cluster), top=top).plans for top in (None, 2))
    (own,) = (p for p in complete if p.from_recipe)
    assert own.rank == complete.index(own) + 1 > 3
    assert [p.rank for p in short] == [1, 2, own.rank]


def test_the_planner_page_of_the_dash_ranks_and_explains_like_the_plan():
    document, sections = ask(question({"size": ["8B"], "nodes": ["16"]}))
    (ranking,) = next(section for section in sections if section.id == "ranking").items
    assert document["best"]["reason"] == ranking.rows[0][-1]
    claims_fastest = "fastest of" in ranking.rows[0][-1]
    assert not claims_fastest or not any("% faster" in row[-1] for row in ranking.rows)


def test_figures_that_nobody_has_measured_are_marked():
    a100, h100 = (load_cluster(name) for name in ("snellius-a100", "snellius-h100"))
    plans = plans_of("gptnl_8b_snellius", "snellius-a100")
    p = plans.plans[0]
    assert not p.outside_measured and mfu_text(p) == print_share(p.step.mfu)
    beyond = mfu_beyond(0.75, plans.task.device, "bf16")
    assert len(beyond) == 1 and "75.0 %" in beyond[0] and "72.4 %" in beyond[0]
    marked = replace(p, step=replace(p.step, mfu=0.75), outside_measured=tuple(beyond))
    assert mfu_text(marked) == "75.0 %*"
    shown = replace(plans, plans=(marked, *plans.plans[1:]))
    assert plans_json(shown)["plans"][0]["outside_measured"] == beyond and "72.4 %" in plan_page(shown)
    assert mfu_beyond(0.75, plans.task.device, "fp8") == []  # no fp8 run on such a device is known
    assert tokens_beyond(36e12, 0.6e9) == [] and len(tokens_beyond(39e12, 0.6e9)) == 1
    assert len(tokens_beyond(185e12, 1e9)) == 2
    result = budget(Budget(cluster=h100, nodes=4, days=30, mfu=0.75), [1e9, 30e9])
    rows = budget_json(result)["sizes"]
    assert [len(row["outside_measured"]) for row in rows] == [1, 1]
    assert sum("66.0 %" in text for text in result.warnings) == 1
    assert budget(Budget(cluster=a100, nodes=1, days=1, mfu=0.4), [1e9]).rows[0].outside_measured == ()


def test_more_tokens_than_any_run_has_seen_are_a_warning_of_the_plan():
    recipe = load_recipe(RECIPES / "llama32_1b_snellius.toml", ["data.tokens=185T"]).recipe
    document = plans_json(plan(recipe, load_cluster(recipe.cluster), top=1))
    assert len(document["outside_measured"]) == 2 and "185T" in document["outside_measured"][0]
    assert set(document["outside_measured"]) <= set(document["warnings"])
