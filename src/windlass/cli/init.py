"""`windlass init`: write a first recipe from a few answers, plan it and print the next commands."""

from __future__ import annotations

import re
import shlex
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from windlass.cli.output import show, table, working
from windlass.errors import ConfigError, LaunchError, WindlassError
from windlass.files import write_atomic
from windlass.units import (
    DAY,
    GIB,
    parse_tokens,
    print_bytes,
    print_node_hours,
    print_rate,
    print_seconds,
    print_share,
    print_tokens,
)

if TYPE_CHECKING:
    from windlass.clusters import Cluster
    from windlass.config.starter import StarterRecipe
    from windlass.planner.search import Plans

MIN_PARAMETERS, MAX_PARAMETERS = 2e7, 1e12
T = TypeVar("T")


def init(
    file: Annotated[
        Path | None, typer.Argument(help="Recipe to write (default: named after size and cluster).")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster name (windlass clusters lists them).")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM account to charge.")] = None,
    size: Annotated[str | None, typer.Option(help='Number of parameters, such as "300M" or "8B".')] = None,
    data: Annotated[
        str | None, typer.Option(help="Token store, or texts to tokenize (a data file is then written as well).")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help='Tokens to train on, such as "450B" (default: those of the store, or 20 per parameter).'),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of nodes (default: the first of 1, 2, 4, ... on which the run takes at most 30 days)."
        ),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=16, help="Sequence length (default: 4096, or 1024 without a scheduler).")
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=2, help="Vocabulary size (default: the store's).")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: use the defaults and print them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; implies --yes.")] = False,
) -> None:
    """Ask a few questions (cluster, account, size, data), write a recipe, plan it and print the next commands."""

    from windlass.clusters import cluster_names, load_cluster
    from windlass.clusters.probe import recognise

    interactive = _is_interactive() and not (yes or as_json)
    if file is not None and file.suffix != ".toml":
        raise ConfigError(
            "init.file-not-toml",
            f"{file} is not a recipe name",
            hint=f"recipes are TOML files: windlass init {file}.toml",
        )
    _refuse_existing(file)
    if cluster is not None:
        machine, how_chosen = load_cluster(cluster), "given"
    else:
        try:
            detected, how_chosen = recognise().name, "this host's name"
        except LaunchError:
            detected, how_chosen = "workstation", "no cluster file matches this host"
        if interactive:
            question, how_chosen = f"Cluster ({', '.join(cluster_names())})", "answered"
            machine = _ask_until_valid(question, detected, load_cluster)
        else:
            machine = load_cluster(detected)
    default_size = "1B" if machine.slurm else "20M"
    if interactive and account is None and machine.slurm:
        account = _ask("SLURM account to charge (empty: set it later)", "") or None
    if interactive and size is None:
        parameters = _ask_until_valid("Model size in parameters", default_size, _read_size)
    else:
        parameters = _read_size(size or default_size)
    if interactive and data is None:
        data = _ask("Token store, or texts to tokenize (empty: later)", "") or None
    with working("planning the recipe", quiet=as_json):
        result = _create_recipe(
            file, machine, how_chosen, account=account, parameters=parameters, data=data,
            tokens=tokens, nodes=nodes, seq_len=seq_len or (4096 if machine.slurm else 1024), vocab=vocab,
        )  # fmt: skip
    show(as_json, result, *_parts(result))


# -- questions --------------------------------------------------------------------------------------------------------


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _refuse_existing(file: Path | None) -> None:
    if file is not None and file.exists():
        raise ConfigError(
            "init.file-exists",
            f"{file} already exists",
            hint="choose another name, or edit the file: init overwrites nothing",
        )


def _read_size(text: str) -> float:
    try:
        size = float(parse_tokens(text))
    except WindlassError:
        raise ConfigError(
            "init.size-invalid", f"{text!r} is not a number of parameters", hint='write it like "300M" or "8B"'
        ) from None
    if not MIN_PARAMETERS <= size <= MAX_PARAMETERS:
        raise ConfigError(
            "init.size-out-of-range",
            f"init cannot choose a shape for {text} parameters (20M to 1T)",
            hint="start from recipes/tiny_cpu.toml for a smaller model"
            if size < MIN_PARAMETERS
            else 'write it like "8B"',
        )
    return size


def _ask_until_valid(question: str, default: str, read: Callable[[str], T]) -> T:
    """Ask again after an invalid answer, with the reason, so that the earlier answers are not lost."""
    while True:
        try:
            return read(_ask(question, default))
        except WindlassError as error:
            typer.echo(f"  {error}", err=True)


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default, show_default=bool(default), err=True)).strip()


# -- the recipe -------------------------------------------------------------------------------------------------------


def _create_recipe(
    file: Path | None, cluster: Cluster, how_chosen: str, *, account: str | None, parameters: float, data: str | None,
    tokens: str | None, nodes: int | None, seq_len: int, vocab: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Choose the remaining values, plan, and write the recipe and, for texts, a data file. Returns the JSON result."""
    from windlass.config import starter
    from windlass.config.schema import schema_line
    from windlass.data.store import open_store
    from windlass.models.presets import model_spec
    from windlass.planner import budget, plan_json

    # The name of a run folder goes through shells and job scripts: "mein größtes" -> "mein-grotes".
    ascii_stem = unicodedata.normalize("NFKD", file.stem if file else "").encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_stem).strip("-._")[:120] or starter.default_name(
        parameters, cluster.name
    )
    target = file or Path(f"{name}.toml")
    has_texts = data is not None and starter.is_text_path(data)
    data_file = target.with_name(f"{name}-data.toml") if has_texts else None
    for new_file in (target, data_file):
        _refuse_existing(new_file)
    store_path = f"data/{name}" if has_texts else data
    store = open_store(store_path) if store_path and Path(store_path).exists() else None
    stored_tokens = sum(s.splits.get("train", s.tokens) for s in store.sources.values()) if store else None
    stored_vocab = store.vocab_size if store else None
    vocab = vocab or (32_768 if has_texts else None)
    if tokens is not None and parse_tokens(tokens) <= 0:
        raise ConfigError(
            "init.tokens-not-positive", f"cannot train on {tokens} tokens", hint="omit --tokens for 20 per parameter"
        )
    # Eight key/value heads, so that tensor parallelism up to 8 divides them; small models need no tensor parallelism.
    model = budget.model_near(parameters, heads_multiple=8 if parameters >= 1e9 else 1)
    if known_vocab := vocab or stored_vocab:
        model = model.model_copy(update={"vocab": known_vocab})
    recipe, plans, why_nodes = _choose_nodes(
        starter.StarterRecipe(
            name=name,
            cluster=cluster.name,
            nodes=nodes or 1,
            devices_per_node=cluster.node.devices,
            account=account,
            parameters=model_spec(model).params.total,
            model={key: getattr(model, key) for key in ("layers", "width", "ffn", "heads", "kv_heads", "vocab")},
            store=store_path,
            tokens=parse_tokens(tokens)
            if tokens
            else stored_tokens or starter.round_to_two_digits(parameters * starter.TOKENS_PER_PARAMETER),
            seq_len=seq_len,
        ),
        cluster,
        fixed=nodes is not None,
    )
    write_atomic(target, schema_line("recipe", target) + starter.recipe_text(recipe))
    if data_file:
        tokenizer = f"tokenizers/{name}/tokenizer.json"
        text = starter.data_text(name, str(data), tokenizer, str(store_path))
        write_atomic(data_file, schema_line("data", data_file) + text)
    default_tokens = "what the store holds" if stored_tokens else f"{starter.TOKENS_PER_PARAMETER} per parameter"
    reasons = {
        "cluster": how_chosen,
        "tokens": "given" if tokens else default_tokens,
        "vocab": "given" if vocab else "the store's" if stored_vocab else "usual at this size",
        "nodes": why_nodes,
    }
    recipe_path, data_path = shlex.quote(str(target)), shlex.quote(str(data_file))
    commands = [f"windlass plan {recipe_path}"]
    if data_file:
        options = f"--vocab {recipe.model['vocab']} --out tokenizers/{recipe.name}"
        commands += [f"windlass tokenizer train {data_path} {options}", f"windlass tokenize {data_path}"]
    elif store is None:
        then = f'with output = "{recipe.store}"' if recipe.store else "then set data.store"
        commands.append(f"windlass tokenize DATA.toml   # {then}; docs/guides/data.md")
    commands.append(f"windlass launch {recipe_path} --dry-run" if cluster.slurm else f"windlass train {recipe_path}")
    recipe_keys = ("name", "cluster", "account", "nodes", "parameters", "tokens", "store")
    return {
        "recipe": str(target),
        "data_file": None if data_file is None else str(data_file),
        **{key: getattr(recipe, key) for key in recipe_keys},
        "store_exists": store is not None,
        "reasons": reasons,
        "first_layout": plans.best.candidate.describe(),
        "plan": plan_json(plans.best, plans.task),
        "outside_measured": list(plans.best.outside_measured),
        "next": commands,
    }


def _choose_nodes(recipe: StarterRecipe, cluster: Cluster, *, fixed: bool) -> tuple[StarterRecipe, Plans, str]:
    """The recipe on its own number of nodes if `fixed`, else on as few (doubling) as finish within a month."""
    import tomllib

    from windlass.config import Recipe, check, starter, validate
    from windlass.planner import changes, search

    limits = [p.max_nodes for p in cluster.slurm.partitions if p.gpus and p.max_nodes] if cluster.slurm else [1]
    most = min(max(limits, default=cluster.nodes or 64), cluster.nodes or 10**6)
    while True:
        # The plan is that of the text that will be written.
        resolved = validate(Recipe, tomllib.loads(starter.recipe_text(recipe)), f"{recipe.name}.toml")
        check(resolved)
        plans = search.plan(resolved, cluster, top=1)
        fast_enough = bool(plans.plans) and plans.best.days <= starter.MAX_DAYS
        if fixed or fast_enough or recipe.nodes >= most:
            break
        recipe = replace(recipe, nodes=min(2 * recipe.nodes, most))
    if not plans.plans:
        raise changes.nothing_fits(plans)
    fewest = f"the first of 1, 2, 4, ... that takes at most {starter.MAX_DAYS:g} days"
    most_nodes = f"the most that one job may use; training still takes more than {starter.MAX_DAYS:g} days"
    return recipe, plans, "given" if fixed else fewest if fast_enough else most_nodes


def _parts(result: dict[str, Any]) -> list[Table | str | None]:
    """The chosen values, the first layout and the next commands."""
    from windlass.cli import with_pages

    plan, reasons = result["plan"], result["reasons"]
    mfu = (
        "MFU unknown"
        if plan["mfu"] is None
        else f"MFU {print_share(plan['mfu'])}{'*' * bool(result['outside_measured'])}"
    )
    missing_store = "" if result["store_exists"] or not result["store"] else "does not exist yet"
    rows = [
        ("cluster", result["cluster"], reasons["cluster"]),
        ("nodes", result["nodes"], reasons["nodes"]),
        ("account", result["account"] or "not set", ""),
        ("parameters", print_tokens(result["parameters"]), "shaped like Llama 3"),
        ("tokens", print_tokens(result["tokens"]), reasons["tokens"]),
        ("store", result["store"] or "none yet: training would read synthetic tokens", missing_store),
    ]
    data_file = result["data_file"] and f"wrote {result['data_file']}: add licence and origin of the texts there"
    return [
        table(f"wrote {result['recipe']}", ("", "value", "reason"), rows),
        data_file,
        f"first layout: {result['first_layout']}: {plan['reason']}",
        f"it needs {print_bytes(plan['memory_gib'] * GIB)} of {print_bytes(plan['memory_limit_gib'] * GIB)}, "
        f"{print_rate(plan['tokens_per_second'])} on all devices ({mfu}), {print_seconds(plan['days'] * DAY)}, "
        f"{print_node_hours(plan['node_hours'])}",
        *(f"* {text}" for text in result["outside_measured"]),
        "next:",
        *(f"  {with_pages(command)}" for command in result["next"]),
    ]
