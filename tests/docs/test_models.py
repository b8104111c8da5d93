"""The table of models names recipes and families that exist."""

import re
from pathlib import Path

from windlass.config import load_recipe
from windlass.registry import PRESETS

TOP = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| (?P<model>[^|]+) \| `(?P<family>\w+)` \| (?P<recipes>[^|]*) \| [^|]* \| (?P<state>[^|]+) \|$", re.M
)
ROWS = [match.groupdict() for match in ROW.finditer((TOP / "docs" / "models.md").read_text())]


def test_the_table_has_every_model_once():
    assert len({row["model"] for row in ROWS}) == len(ROWS) == 39


def test_native_models_have_recipes_of_their_family():
    native = [row for row in ROWS if row["state"] == "natively"]
    assert len(native) == 39
    for row in native:
        files = re.findall(r"`(recipes/[^`]+)`", row["recipes"])
        families = {load_recipe(TOP / file).recipe.model.family for file in files}
        assert families == {row["family"]} <= set(PRESETS.builtin) - {"hf"}, row["model"]


def test_the_other_models_name_what_is_missing():
    for row in ROWS:
        if row["state"] != "natively":
            assert row["state"].startswith("through transformers; missing: ") and row["family"] == "hf", row["model"]
            assert not row["recipes"].strip()
