"""Every recipe that ships is loaded, and counts the parameters that were published."""

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
# Billions of parameters of recipes whose shape is an example, or known only by its size.
EXAMPLES = {
    "gptnl_1b_snellius": 1.10, "gptnl_30b_snellius": 30.0, "italia_9b_leonardo": 9.0, "italia_cpt_leonardo": 9.0, "poro_34b_lumi": 34.2,
    "study_140b_lumi": 140.0, "retnet_300m_lumi": 0.30, "tiny_cpu": 0.004,
}  # fmt: skip
# As printed: billions of parameters (of a card, a paper or the sum of a published shape), or the exact number.
PUBLISHED = {
    "apertus_8b_jupiter": "8.05", "apertus_70b_jupiter": "70.6", "bielik_11b_jupiter": "11.17", "eurollm_9b_marenostrum5": "9.15",
    "eurollm_22b_marenostrum5": "22.64", "gemma3_4b_leonardo": "3.9", "gptnl_8b_snellius": "8.03", "llama31_8b_jupiter": "8.03",
    "llama32_1b_snellius": "1.24", "llama32_3b_snellius": "3.21", "llama_70b_jupiter": "70.55", "lucie_7b_jupiter": "6,706,958,336",
    "luciole_1b_jupiter": "1.32", "luciole_23b_jupiter": "23.2", "minerva_7b_leonardo": "7.40", "olmo2_7b_jupiter": "7.30",
    "luciole_8b_jupiter": "8.08", "nemotron_h_8b_jupiter": "8.1", "nemotron3_nano_jupiter": "31.6",
    "olmo3_7b_jupiter": "7.30", "olmo3_32b_jupiter": "32.2", "olmo_7b_lumi": "6.89", "openeurollm_9b_leonardo": "9.09",
    "mixtral_8x7b_jupiter": "46.7", "olmoe_7b_jupiter": "6.92", "qwen3_30b_a3b_jupiter": "30.5", "qwen3_235b_a22b_jupiter": "235",
    "gpt_oss_20b_jupiter": "20.9", "deepseek_v2_lite_jupiter": "15.7", "deepseek_v3_jupiter": "671",
    "pllum_12b_lumi": "12.25", "poro2_8b_lumi": "8.03", "poro2_8b_sft_lumi": "8.03", "qwen3_600m_jupiter": "0.60", "qwen3_8b_jupiter": "8.19",
    "salamandra_2b_marenostrum5": "2.25", "salamandra_7b_marenostrum5": "7,768,117,248",
    "salamandra_40b_marenostrum5": "40,433,885,184", "smollm3_3b_marenostrum5": "3.08", "teuken_7b_juwels": "7.45",
    "tildeopen_30b_lumi": "30.68", "viking_7b_lumi": "7.55", "viking_13b_lumi": "14.03", "viking_33b_lumi": "33.12",
}  # fmt: skip
# Sizes without a recipe of their own: the recipe of another size, and layers, width, ffn, heads, kv_heads, head_dim, tied.
OTHER_SIZES = [
    ("qwen3_600m_jupiter", (28, 2048, 6144, 16, 8, 128, True), "1.72"),
    ("qwen3_600m_jupiter", (36, 2560, 9728, 32, 8, 128, True), "4.02"),
    ("qwen3_8b_jupiter", (40, 5120, 17408, 40, 8, 128, False), "14.8"),
    ("qwen3_8b_jupiter", (64, 5120, 25600, 64, 8, 128, False), "32.8"),
    ("gemma3_4b_leonardo", (26, 1152, 6912, 4, 1, 256, True), "1.0"),
    ("gemma3_4b_leonardo", (48, 3840, 15360, 16, 8, 256, True), "11.8"),
    ("gemma3_4b_leonardo", (62, 5376, 21504, 32, 16, 128, True), "27.0"),
]


def printed_size(recipe, published):
    """The recipe's number of parameters with as many digits as the published number."""
    total = model_spec(recipe.model).params.total
    if "," in published:
        return f"{total:,}"
    return f"{total / 1e9:.{len(published.partition('.')[2])}f}"


def test_every_recipe_has_a_size_here():
    assert sorted(path.stem for path in FILES) == sorted([*PUBLISHED, *EXAMPLES])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_recipe_loads_for_a_known_cluster_and_has_its_published_size(path):
    recipe = load_recipe(path).recipe
    assert load_cluster(recipe.cluster).name == recipe.cluster
    if path.stem in PUBLISHED:
        assert printed_size(recipe, PUBLISHED[path.stem]) == PUBLISHED[path.stem]
    else:
        assert model_spec(recipe.model).params.total / 1e9 == pytest.approx(EXAMPLES[path.stem], rel=0.025)
    assert set(recipe.model.assumed) <= set(type(recipe.model).model_fields)


@pytest.mark.parametrize(("name", "shape", "published"), OTHER_SIZES)
def test_other_sizes_of_a_family_have_their_published_size(name, shape, published):
    keys = ("layers", "width", "ffn", "heads", "kv_heads", "head_dim", "tied")
    values = [f"model.{key}={str(value).lower()}" for key, value in zip(keys, shape, strict=True)]
    assert printed_size(load_recipe(FOLDER / f"{name}.toml", values).recipe, published) == published


# tests/launch/test_dry_run.py plans every recipe once.
OWN_LAYOUT = [path for path in FILES if "[layout]" in path.read_text()]


@pytest.mark.parametrize("path", OWN_LAYOUT, ids=lambda p: p.stem)
def test_a_layout_of_the_recipe_itself_is_among_the_plans(path):
    recipe = load_recipe(path).recipe
    plans = plan(recipe, load_cluster(recipe.cluster))
    best = plans.best
    assert best.fits and best.days > 0 and best.reason
    assert best.step.mfu is not None and 0.05 < best.step.mfu < 0.85
    assert any(p.from_recipe for p in plans.plans)


@pytest.mark.parametrize("name", ["italia_9b", "italia_cpt"])
def test_the_data_files_of_italia_make_the_stores_of_its_recipes(name):
    recipe = load_recipe(FOLDER / f"{name}_leonardo.toml").recipe
    data = load_data_file(FOLDER / f"{name.removesuffix('_9b')}_data.toml")
    assert data.output == recipe.data.store and set(data.sources) == set(recipe.data.mix)
    wanted = {n: float(re.search(r"([\d.]+)T tokens wanted", s.notes)[1]) * 1e12 for n, s in data.sources.items()}
    assert wanted == {n: pytest.approx(share * recipe.data.tokens) for n, share in recipe.data.mix.items()}
    assert data.policy == "lawful" and all(s.licence and s.origin and s.kind for s in data.sources.values())
