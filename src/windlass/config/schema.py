"""JSON schemas of recipe, data and sweep files, for editors that check TOML (Even Better TOML, taplo)."""

import os
from pathlib import Path
from typing import Any

from windlass.config.load import FileKind, shipped
from windlass.config.recipe import recipe_schema
from windlass.config.sources import DataFile
from windlass.config.sweep import SweepConfig


def file_schemas() -> dict[FileKind, dict[str, Any]]:
    """Kind of file -> its schema; `recipes/<kind>.schema.json` holds it."""
    recipe = recipe_schema()
    dialect = {"$schema": recipe["$schema"]}
    return {
        "recipe": recipe,
        "data": {**dialect, **DataFile.model_json_schema(), "title": "windlass data file"},
        "sweep": {**dialect, **SweepConfig.model_json_schema(), "title": "windlass sweep file"},
    }


def schema_line(kind: FileKind, file: Path) -> str:
    """First line of a file, by which editors find its schema: relative inside a checkout, so that the file can be
    committed, else the path of the installation. Empty where no schema is installed."""
    schema, folder = shipped(Path(f"{kind}.schema.json")), file.absolute().parent
    if schema is None:
        return ""
    is_near = folder.is_relative_to(schema.parents[1])
    return f"#:schema {os.path.relpath(schema, folder) if is_near else schema}\n"
