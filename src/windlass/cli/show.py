"""`windlass show RECIPE`: every value and where it came from."""

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
    from windlass.cli.output import console, print_json, table
    from windlass.config import load_recipe
    from windlass.config.show import schema as schema_of
    from windlass.config.show import values
    from windlass.errors import ConfigError

    if schema:
        print_json(schema_of())
        return
    if recipe is None:
        raise ConfigError(
            "cli.recipe", "which recipe?", hint="windlass show recipes/tiny_cpu.toml, or windlass show --schema"
        )
    loaded = load_recipe(recipe, overrides or ())
    rows = [v for v in values(loaded) if all_values or v.origin != "default"]
    if as_json:
        print_json(
            {"recipe": str(recipe), "values": [{"key": v.key, "value": v.value, "origin": v.origin} for v in rows]}
        )
        return
    console().print(
        table(
            f"{loaded.recipe.name} ({recipe})",
            ("key", "value", "from"),
            [(v.key, _text(v.key, v.value), v.origin) for v in rows],
        )
    )
    if loaded.recipe.layout is None:
        console().print("layout: not given; `windlass plan` fills it in and says why")


def _text(key: str, value: object) -> str:
    from windlass.units import print_tokens

    if value is None:
        return "not set"
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and key.endswith(("tokens", "warmup", "decay"))
        and value >= 1000
    ):
        return f"{value:,} ({print_tokens(value)})"
    return str(value)
