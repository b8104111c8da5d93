"""Every recipe that ships is loaded, counts the parameters its name promises, and can be planned."""

import re
from pathlib import Path

import pytest

from windlass.clusters import load_cluster
from windlass.config import load_recipe
from windlass.config.sources import load_data_file
from windlass.models.presets import model_spec
from windlass.planner import plan

FOLDER = Path(__file__).parents[2] / "recipes"
FILES = sorted(path for path in FOLDER.glob("*.toml") if not path.stem.endswith("_data"))
# What was published, in billions; worked out by hand from the published shapes where they are known.
SIZES = {
    "gptnl_1b_snellius": 1.10, "gptnl_8b_snellius": 8.03, "gptnl_30b_snellius": 30.0, "italia_9b_leonardo": 9.0,
    "italia_cpt_leonardo": 9.0, "poro_34b_lumi": 34.2, "viking_7b_lumi": 7.55, "viking_13b_lumi": 14.0, "viking_33b_lumi": 33.0,
    "olmo_7b_lumi": 6.89, "study_140b_lumi": 140.0, "retnet_300m_lumi": 0.30, "salamandra_7b_marenostrum5": 7.768,
    "teuken_7b_juwels": 7.45, "llama_70b_jupiter": 70.55, "tiny_cpu": 0.004,
}  # fmt: skip


def test_every_recipe_has_a_published_size_here():
    assert {path.stem for path in FILES} == set(SIZES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_recipe_loads_for_a_known_cluster_and_has_its_published_size(path):
    recipe = load_recipe(path).recipe
    assert load_cluster(recipe.cluster).name == recipe.cluster
    assert model_spec(recipe.model).params.total / 1e9 == pytest.approx(SIZES[path.stem], rel=0.025)
    assert set(recipe.model.assumed) <= set(type(recipe.model).model_fields)


def test_salamandra_counts_exactly_what_its_card_says():
    recipe = load_recipe(FOLDER / "salamandra_7b_marenostrum5.toml").recipe
    assert model_spec(recipe.model).params.total == 7_768_117_248


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_recipe_is_planned_and_its_own_layout_fits(path):
    recipe = load_recipe(path).recipe
    plans = plan(recipe, load_cluster(recipe.cluster))
    best = plans.best
    assert best.fits and best.days > 0 and best.reason
    assert best.step.mfu is not None and 0.05 < best.step.mfu < 0.85
    assert recipe.layout is None or any(p.from_recipe for p in plans.plans)


@pytest.mark.parametrize("name", ["italia_9b", "italia_cpt"])
def test_the_data_files_of_italia_make_the_stores_of_its_recipes(name):
    recipe = load_recipe(FOLDER / f"{name}_leonardo.toml").recipe
    data = load_data_file(FOLDER / f"{name.removesuffix('_9b')}_data.toml")
    assert data.output == recipe.data.store and set(data.sources) == set(recipe.data.mix)
    wanted = {n: float(re.search(r"([\d.]+)T tokens wanted", s.notes)[1]) * 1e12 for n, s in data.sources.items()}
    assert wanted == {n: pytest.approx(share * recipe.data.tokens) for n, share in recipe.data.mix.items()}
    assert data.policy == "lawful" and all(s.licence and s.origin and s.kind for s in data.sources.values())
