"""Which file was meant? The likely slips of a newcomer, each with the answer that helps."""

from pathlib import Path

import pytest

from windlass.config.load import kind_of, load_recipe, missing_hint, read_toml, shipped
from windlass.config.sources import load_data_file
from windlass.config.sweep import load_sweep
from windlass.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"


def test_kinds_by_their_tables():
    assert kind_of({"name": "a", "model": {}}) == "recipe"
    assert kind_of({"output": "a", "sources": {}}) == "data"
    assert kind_of({"recipe": {"model": {}}, "matrix": {}}) == "sweep"
    assert kind_of({"tool": {}}) is None
    for path in RECIPES.rglob("*.toml"):
        kind = kind_of(read_toml(path)[0])
        assert kind == (
            None
            if path.parent.name == "lepiszcze"  # tasks of `windlass finetune`
            else "sweep"
            if path.parent.name == "sweeps" or path.stem in ("grid", "finetune", "lepiszcze", "retnet_vs_llama")
            else "data"
            if path.stem.endswith("data")
            else "recipe"
        )


@pytest.mark.parametrize(
    "load, file, said",
    [
        (load_data_file, "tiny_cpu.toml", "is a recipe, not a data file"),
        (load_sweep, "tiny_cpu.toml", "is a recipe, not a sweep file"),
        (load_recipe, "small/data.toml", "is a data file, not a recipe"),
        (load_recipe, "sweeps/cpu_grid.toml", "is a sweep file, not a recipe"),
    ],
)
def test_a_file_of_another_kind_is_one_mistake_and_not_twelve(load, file, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load(RECIPES / file)
    assert "\n" not in caught.value.message and "windlass" in caught.value.hint


def test_a_missing_file_names_a_neighbour_of_like_name(tmp_path):
    for name in ("mine.toml", "other.toml"):
        (tmp_path / name).touch()
    assert missing_hint(tmp_path / "mien.toml").endswith("mine.toml?")
    assert missing_hint(tmp_path / "mine").endswith("mine.toml?")
    assert "other.toml" not in missing_hint(tmp_path / "zzz.toml")


def test_a_recipe_that_comes_with_windlass_is_named_but_not_taken_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in ("recipes/tiny_cpu.toml", "tiny_cpu.toml", "tiny_cpu"):
        assert shipped(Path(words)) == RECIPES / "tiny_cpu.toml"
        with pytest.raises(ConfigError, match="there is no file") as caught:
            load_recipe(words)
        assert str(RECIPES / "tiny_cpu.toml") in caught.value.hint
    assert shipped(tmp_path / "tiny_cpu.toml") is None
    assert str(RECIPES) in missing_hint(Path("nothing-like-it.toml"))
