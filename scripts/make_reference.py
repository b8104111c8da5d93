"""Writes docs/reference/*.md and recipes/*.schema.json from the code. Run by `make docs`; a test checks that the pages are up to date."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference"


UNITS = "Tokens, sizes and durations may be written with units: `450B`, `4Mi`, `94 GiB`, `30m`."


def recipe_page() -> str:
    from windlass.config import Recipe
    from windlass.config.model import hf_aliases
    from windlass.registry import PRESETS

    aliases = ", ".join(f"`{name}` as `{key}`" for name, key in hf_aliases({"hidden_size": None}).items())
    introduction = "A recipe is one TOML file. This page lists every key with type, default and meaning. It is generated from the code."
    tables = {}
    for name, table in _tables(Recipe).items():
        tables |= {name: table} | {f"{name}.{key}": inner for key, inner in _tables(table).items()}
    notes = {
        "layout": "Without this table the planner chooses a layout and prints its reason.",
        "data.stages": "One `[[data.stages]]` per mix.",
        "model": f"Names of Hugging Face's config.json are read as ours, and shown as ours: {aliases}. A family adds its "
        "own. Both names of one key are an error.\n\nA family replaces these defaults by its own:\n",
    }
    for family in PRESETS.builtin:
        defaults = PRESETS.load(family).defaults
        values = ", ".join(f"`{key} = {_as_toml(value)}`" for key, value in defaults.items())
        notes["model"] += f"\n- `{family}`: {values}" if values else ""
    return keys_page("Recipe keys", introduction, Recipe, tables, notes)


def data_file_page() -> str:
    from windlass.config.sources import DataFile, DataSource

    introduction = "The file that `windlass tokenize` reads: [how to use it](../guides/data.md). This page lists every key and is generated from the code."
    return keys_page("Data file keys", introduction, DataFile, {"sources.NAME": DataSource}, {}, hidden=("sources",))


def sweep_file_page() -> str:
    from windlass.config.sweep import LeaderboardConfig, SweepConfig

    introduction = "The file that `windlass sweep` reads: [how to use it](../guides/sweep.md). This page lists every key and is generated from the code."
    return keys_page("Sweep file keys", introduction, SweepConfig, {"leaderboard": LeaderboardConfig}, {})


def cluster_file_page() -> str:
    from windlass.clusters.model import Cluster, Device, FactSource

    introduction = (
        "The file that describes a cluster; your own are `~/.config/windlass/clusters/NAME.toml`. This page lists every key and is "
        "generated from the code. The numbers of each cluster are on [its own page](../clusters/index.md)."
    )
    tables = _tables(Cluster)
    tables.pop("sources", None)
    inner = _table(tables["slurm"].model_fields["partitions"].annotation)
    more = {"slurm.partitions": inner, "sources.KEY": FactSource, "devices.toml: NAME": Device}
    notes = {
        "sources.KEY": "Source of a value. KEY is a dotted key, or a table for all of its keys.",
        "devices.toml: NAME": "Add an unknown accelerator to `~/.config/windlass/clusters/devices.toml`.",
        "slurm.partitions": "One `[[slurm.partitions]]` per queue.",
    }
    return keys_page("Cluster file keys", introduction, Cluster, {**tables, **more}, notes, hidden=("name", "sources"))


def keys_page(
    title: str, introduction: str, top: Any, tables: dict[str, Any], notes: dict[str, str], hidden: tuple[str, ...] = ()
) -> str:
    lines = [f"# {title}", "", introduction, "", UNITS, ""]
    for name, table in {"": top, **tables}.items():
        lines += [f"## `[{name}]`" if name else "## Top level", ""]
        lines += [notes[name], ""] if name in notes else []
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        below = {*tables, *hidden} if not name else set()
        lines += [row for row in _rows(table) if not any(row.startswith(f"| `{t}` ") for t in below)]
        lines.append("")
    return "\n".join(lines)


def _rows(table: Any) -> Iterator[str]:
    for key, field in table.model_fields.items():
        default = "required" if field.is_required() else _default(field)
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{key}` | {_unit(field) or _names(field) or _type(field.annotation)} | {default} | {meaning} |"


def _names(field: Any) -> str | None:
    """The built-in names of a key that an extension can add to."""
    from windlass.config.base import Registered

    registries = [item.registry for item in field.metadata if isinstance(item, Registered)]
    return " or ".join(f"`{name}`" for name in registries[0].builtin) if registries else None


def _unit(field: Any) -> str | None:
    """The kind of a number with a unit, by the note that its type carries for editors."""
    notes = f"{field.annotation} {field.metadata}"
    kinds = {"A token count": "tokens", "A size": "size", "A duration": "duration"}
    return next((kind for note, kind in kinds.items() if note in notes), None)


def _default(field: Any) -> str:
    from pydantic import BaseModel

    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", [], {}) or isinstance(value, BaseModel):
        return "not set" if value is None else "empty"
    from windlass.units import print_bytes

    shown = f'"{print_bytes(value)}"' if _unit(field) == "size" else _as_toml(value)
    return f"`{shown}`".replace("|", "\\|")


def _as_toml(value: Any) -> str:
    """As the reader would write it in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_as_toml(inner)}' for key, inner in value.items())} }}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(annotation: Any) -> Any:
    """The table inside an annotation such as `Slurm | None` or `list[Partition]`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def _tables(top: Any) -> dict[str, Any]:
    return {key: table for key, field in top.model_fields.items() if (table := _table(field.annotation))}


def _type(annotation: Any) -> str:
    from typing import Literal

    if hasattr(annotation, "model_fields"):
        return "table"

    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    inner = [a for a in get_args(annotation) if a is not type(None)]
    if inner and get_origin(annotation) not in (list, dict):
        return " or ".join(dict.fromkeys(_type(a) for a in inner if not _is_constraint(a)))
    if get_origin(annotation) in (list, dict):
        kind = {"dict": "table"}.get(get_origin(annotation).__name__, get_origin(annotation).__name__)
        return f"{kind} of {', '.join(_type(a) for a in inner)}"
    name = getattr(annotation, "__name__", str(annotation))
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "dict": "table"}.get(
        name, name
    )


def _is_constraint(value: Any) -> bool:
    return not isinstance(value, type) and get_origin(value) is None


def names_page(title: str, introduction: str, meanings: dict[str, str]) -> str:
    rows = [f"| `{key}` | {meaning} |" for key, meaning in meanings.items()]
    return "\n".join([f"# {title}", "", introduction, "", "| name | meaning |", "|---|---|", *rows, ""])


def cli_page() -> str:
    import typer.main

    from windlass.cli import build

    root = typer.main.get_command(build())
    lines = [
        "# Commands",
        "",
        'Generated from the code. An error prints one message and a hint and ends with a non-zero exit code; `-v` also prints the error code, the traceback and the files that were read. With `--json` standard output is one JSON document also after an error: `{"error": {"code": ..., "message": ..., "hint": ..., "exit_code": ...}}`, or the command\'s own document if that names what is wrong.',
        "",
    ]
    for name, command in sorted(root.commands.items()):
        lines += _command(f"windlass {name}", command)
    lines += ["## Exit codes", "", "| code | meaning |", "|---:|---|", *exit_codes(), ""]
    return "\n".join(lines)


def exit_codes() -> list[str]:
    """Each class of error has its own code, and so has each way in which training ends."""
    from windlass import errors

    kinds = {
        0: "done",
        1: "any other error, such as a file that cannot be read or a missing package",
        70: "a bug in windlass: please report it",
        errors.EXIT_INTERRUPTED: "Ctrl-C",
        errors.EXIT_TERMINATED: "SIGTERM",
    }
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.WindlassError) and value is not errors.WindlassError:
            kinds[value.exit_code] = str(value.__doc__)
    kinds[2] = "The command line, a recipe, a sweep, data or cluster file has invalid values"
    kinds |= {
        errors.EXIT_OUT_OF_MEMORY: "training: a device ran out of memory; the same layout would run out again",
        errors.EXIT_HANG: "training: a rank made no progress; the error record names it",
        errors.EXIT_DIVERGED: "training: too many non-finite or spiking steps in a row",
        errors.EXIT_RESUMABLE: "training: stopped early after a successful save; the same command continues",
    }
    return [f"| {code} | {' '.join(kinds[code].split()).rstrip('.')} |" for code in sorted(kinds)]


def _command(path: str, command: Any) -> list[str]:
    lines = [f"## `{path}`", "", " ".join((command.help or "").split()), ""]
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        lines += _command(f"{path} {name}", inner)
    rows = [_parameter(p) for p in command.params if p.name not in ("help",)]
    return lines + (["| argument or option | meaning | default |", "|---|---|---|", *rows, ""] if rows else [])


def _parameter(p: Any) -> str:
    is_option = p.param_type_name == "option"
    name = ", ".join([*p.opts, *p.secondary_opts]) if is_option else (p.metavar or p.name.upper())
    value = p.default() if callable(p.default) else p.default
    shown = "" if value in (None, False, (), []) else f"`{p.opts[0] if value is True else value}`"
    cells = (f"`{name}`", " ".join((getattr(p, "help", "") or "").split()), shown)
    # a bar or a line break in a cell would start a new column or row
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), chr(92) + 'n') for cell in cells)} |"


def pages() -> dict[str, str]:
    """Path relative to docs/reference -> text."""
    from windlass.config.schema import file_schemas
    from windlass.runs.events import EVENTS
    from windlass.runs.metrics import METRICS

    return {
        "recipe.md": recipe_page(),
        "data-file.md": data_file_page(),
        "sweep-file.md": sweep_file_page(),
        "cluster-file.md": cluster_file_page(),
        "cli.md": cli_page(),
        "metrics.md": names_page(
            "metrics.jsonl", "One line per logged step. Unknown values are null, never 0.", METRICS
        ),
        "events.md": names_page("events.jsonl", "One line per event of a run, each with `time` and `event`.", EVENTS),
        **{
            f"../../recipes/{kind}.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
            for kind, schema in file_schemas().items()
        },
    }


def main() -> int:
    """Write the pages; with --check only report whether they are up to date."""
    DOCS.mkdir(parents=True, exist_ok=True)
    stale = [name for name, text in pages().items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != text]
    if "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}" if stale else "up to date")
        return 1 if stale else 0
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    print(f"wrote {DOCS} ({len(stale)} changed)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
