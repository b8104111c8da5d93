"""The JSON schemas that editors use: every file in recipes/ names its own, and is valid by it."""

import json
import tomllib
from pathlib import Path

import pytest

from windlass.config.load import kind_of
from windlass.config.schema import file_schemas, schema_line

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = [path for path in sorted(RECIPES.rglob("*.toml")) if kind_of(tomllib.loads(path.read_text())) is not None]


def test_the_files_hold_the_schemas_of_the_code():
    for kind, schema in file_schemas().items():
        assert json.loads((RECIPES / f"{kind}.schema.json").read_text()) == schema, "run scripts/make_reference.py"


def test_the_first_line_of_every_file_names_the_schema_of_its_kind():
    assert len(FILES) > 60
    for path in FILES:
        text = path.read_text()
        directive, name = text.splitlines()[0].split()
        kind = kind_of(tomllib.loads(text))
        assert (directive, (path.parent / name).resolve()) == ("#:schema", RECIPES / f"{kind}.schema.json"), path
        assert schema_line(kind, path) == f"{directive} {name}\n"


def test_every_file_is_valid_by_its_schema():
    validators = pytest.importorskip("jsonschema.validators")  # of the extra `dev`
    checks = {kind: validators.Draft202012Validator(schema) for kind, schema in file_schemas().items()}
    for path in FILES:
        raw = tomllib.loads(path.read_text())
        assert not [error.message for error in checks[kind_of(raw)].iter_errors(raw)], path
    # A schema that refuses nothing would pass the loop above.
    wrong = {"name": "x", "model": {"layers": "two", "hidden_size": "wide"}, "optim": {"lrr": 1}}
    places = {".".join(map(str, error.absolute_path)) for error in checks["recipe"].iter_errors(wrong)}
    assert places == {"model.layers", "model.hidden_size", "optim"}


def test_outside_the_checkout_the_line_has_the_path_of_the_installation(tmp_path):
    assert schema_line("recipe", tmp_path / "mine.toml") == f"#:schema {RECIPES / 'recipe.schema.json'}\n"
