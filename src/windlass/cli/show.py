"""`windlass show RECIPE`: every value of a recipe and its origin."""

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import JsonOption, OverridesArgument
from windlass.cli.output import print_json, table
from windlass.cli.output import show as show_result
from windlass.errors import ConfigError
from windlass.units import print_tokens


def show(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file.")] = None,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")] = False,
    all_values: Annotated[
        bool, typer.Option("--all/--set", help="Print all values, or only those that differ from the defaults.")
    ] = True,
) -> None:
    """Print every value of a recipe and where it came from."""
    from windlass.config import load_recipe
    from windlass.config.recipe import recipe_schema

    if schema:
        print_json(recipe_schema())
        return
    if recipe is None:
        raise ConfigError(
            "cli.argument-missing",
            "missing argument: RECIPE",
            hint="windlass show recipes/tiny_cpu.toml, or windlass show --schema",
        )
    loaded = load_recipe(recipe, overrides or ())
    values = [value for value in loaded.values() if all_values or value[2] != "default"]
    rows = []
    for key, value, origin in values:
        is_count = key.endswith(("tokens", "warmup", "decay")) and isinstance(value, int) and value >= 1000
        text = "not set" if value is None else f"{value:,} ({print_tokens(value)})" if is_count else str(value)
        rows.append((key, text, origin))
    document = {
        "recipe": str(recipe),
        "values": [{"key": key, "value": value, "origin": origin} for key, value, origin in values],
    }
    no_layout = "layout: not set; `windlass plan` chooses one and says why" if loaded.recipe.layout is None else None
    show_result(as_json, document, table(f"{loaded.recipe.name} ({recipe})", ("key", "value", "from"), rows), no_layout)
