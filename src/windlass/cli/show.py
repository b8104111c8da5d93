"""`windlass show RECIPE`: every value of a recipe and its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: layout.micro_batch=4.", metavar="KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")] = False,
    all_values: Annotated[
        bool, typer.Option("--all/--set", help="All values, or only those that are not defaults.")
    ] = True,
) -> None:
    """Print every value of a recipe and where it came from."""
    from dataclasses import asdict

    from windlass.cli.output import console, print_json, table
    from windlass.config import load_recipe
    from windlass.config.show import recipe_schema, recipe_values
    from windlass.errors import ConfigError

    if schema:
        print_json(recipe_schema())
        return
    if recipe is None:
        hint = "windlass show recipes/tiny_cpu.toml, or windlass show --schema"
        raise ConfigError("cli.recipe-missing", "missing argument: RECIPE", hint=hint)
    loaded = load_recipe(recipe, overrides or ())
    values = [v for v in recipe_values(loaded) if all_values or v.origin != "default"]
    if as_json:
        print_json({"recipe": str(recipe), "values": [asdict(v) for v in values]})
        return
    rows = [(v.key, _print_value(v.key, v.value), v.origin) for v in values]
    console().print(table(f"{loaded.recipe.name} ({recipe})", ("key", "value", "from"), rows))
    if loaded.recipe.layout is None:
        console().print("layout: not set; `windlass plan` chooses one and says why")


def _print_value(key: str, value: object) -> str:
    from windlass.units import print_tokens

    if value is None:
        return "not set"
    counts_tokens = key.endswith(("tokens", "warmup", "decay"))
    if counts_tokens and isinstance(value, int) and value >= 1000:
        return f"{value:,} ({print_tokens(value)})"
    return str(value)
