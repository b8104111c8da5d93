"""`windlass init`: a few questions -> a recipe that plans at once, and the next command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from windlass.clusters import Cluster
    from windlass.config.starter import Answers
    from windlass.data.store import Store
    from windlass.planner.search import Plans

SMALLEST = 2e7
T = TypeVar("T")


def register(app: typer.Typer) -> None:
    app.command("init")(init)


def init(
    file: Annotated[
        Path | None, typer.Argument(help="Recipe to write; named after size and cluster when left out.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Machine (windlass clusters lists them).")] = None,
    account: Annotated[str | None, typer.Option(help="The project that is charged.")] = None,
    size: Annotated[str | None, typer.Option(help='Parameters: "300M", "8B".')] = None,
    data: Annotated[
        str | None, typer.Option(help="Token store, or texts to make one from (a data file is then written, too).")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help='Tokens to train on: "450B". The store\'s, or 20 per parameter.')
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; enough for a month at most when left out.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=16, help="Sequence length; 4096, or 1024 without a scheduler.")
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=2, help="Vocabulary; the store's when it is known.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults and print them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; asks nothing.")] = False,
) -> None:
    """Ask a few questions (cluster, account, size, data), write a recipe, plan it and say what comes next."""
    import sys

    from windlass.cli.output import print_json

    asks = sys.stdin.isatty() and not (yes or as_json)
    _refuse(file)
    machine, chosen = _machine(cluster, asks)
    account = _account(account, machine, asks)
    wanted = _size(size, machine, asks)
    data = _data(data, asks)
    result = _write(
        file, machine, account, wanted, data, tokens, nodes, seq_len or (4096 if machine.slurm else 1024), vocab, chosen
    )
    if as_json:
        print_json(result)
    else:
        _print(result)


# -- the questions ----------------------------------------------------------------------------------------------------


def _refuse(file: Path | None) -> None:
    from windlass.errors import ConfigError

    if file is not None and file.suffix != ".toml":
        raise ConfigError(
            "cli.recipe-s-name",
            f"{file} is no recipe's name",
            hint=f"recipes are TOML files: windlass init {file}.toml",
        )
    if file is not None and file.exists():
        raise ConfigError(
            "cli.already", f"{file} is already there", hint="init overwrites nothing: give another name, or edit it"
        )


def _machine(name: str | None, asks: bool) -> tuple[Cluster, str]:
    """The machine and how it was chosen."""
    from windlass.clusters import cluster_names, load_cluster
    from windlass.clusters.probe import recognise
    from windlass.errors import LaunchError

    if name is not None:
        return load_cluster(name), "given"
    try:
        here, how = recognise().name, "this host's name"
    except LaunchError:
        here, how = "workstation", "no cluster file knows this host"
    if asks:
        return _until(f"Cluster ({', '.join(cluster_names())})", here, load_cluster), "answered"
    return load_cluster(here), how


def _account(given: str | None, cluster: Cluster, asks: bool) -> str | None:
    if given is not None or not asks or cluster.slurm is None:
        return given
    return _ask("Account (the project that is charged; empty: later)", "") or None


def _size(given: str | None, cluster: Cluster, asks: bool) -> float:
    default = "1B" if cluster.slurm else "20M"
    if given is None and asks:
        return _until("Model size in parameters", default, _read_size)
    return _read_size(given or default)


def _read_size(text: str) -> float:
    from windlass.errors import ConfigError, WindlassError
    from windlass.units import parse_tokens

    try:
        size = float(parse_tokens(text))
    except WindlassError:
        raise ConfigError(
            "cli.number-parameters", f"{text!r} is not a number of parameters", hint='write it like "300M" or "8B"'
        ) from None
    if not SMALLEST <= size <= 1e12:
        small = "recipes/tiny_cpu.toml is a smaller one to start from" if size < SMALLEST else 'write it like "8B"'
        raise ConfigError(
            "cli.model-parameters-outside-what",
            f"a model of {text} parameters is outside what init can shape (20M to 1T)",
            hint=small,
        )
    return size


def _read_tokens(text: str) -> int:
    from windlass.errors import ConfigError
    from windlass.units import parse_tokens

    tokens = parse_tokens(text)
    if tokens <= 0:
        raise ConfigError(
            "cli.tokens-nothing-train",
            f"{text} tokens are nothing to train on",
            hint="leave --tokens out for 20 per parameter",
        )
    return tokens


def _data(given: str | None, asks: bool) -> str | None:
    if given is not None or not asks:
        return given
    return _ask("Token store, or texts to make one from (empty: later)", "") or None


def _until(question: str, default: str, read: Callable[[str], T]) -> T:
    """Ask again after a slip, with the reason: a typing error should not cost the answers before it."""
    from windlass.errors import WindlassError

    while True:
        try:
            return read(_ask(question, default))
        except WindlassError as error:
            typer.echo(f"  {error}", err=True)


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default, show_default=bool(default), err=True)).strip()


# -- the recipe -------------------------------------------------------------------------------------------------------


def _write(
    file: Path | None, cluster: Cluster, account: str | None, size: float, data: str | None, tokens: str | None, nodes: int | None,
    seq_len: int, vocab: int | None, how: str,
) -> dict[str, Any]:  # fmt: skip
    from windlass.config.starter import data_text, default_name, holds_texts, recipe_text
    from windlass.files import write_atomic

    name = (_run_name(file.stem) if file else "") or default_name(size, cluster.name)
    target = file or Path(f"{name}.toml")
    texts = data if data and holds_texts(data) else None
    store_path = f"data/{name}" if texts else data
    store = _open(store_path)
    data_file = target.with_name(f"{name}-data.toml") if texts else None
    _refuse(target)
    _refuse(data_file)
    answers, found, reasons = _settle(
        name, cluster, account, size, store_path, store, tokens, nodes, seq_len, vocab or (32_768 if texts else None)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, recipe_text(answers))
    if texts and data_file:
        write_atomic(data_file, data_text(name, texts, f"tokenizers/{name}/tokenizer.json", store_path or ""))
    reasons = {"cluster": how, **reasons}
    return _result(target, data_file, answers, found, reasons, store is not None)


def _run_name(stem: str) -> str:
    """A file's name as a run's: "mein größtes" -> "mein-grotes". A run folder's name travels through shells and job scripts."""
    import re
    import unicodedata

    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:120]


def _settle(
    name: str, cluster: Cluster, account: str | None, size: float, store_path: str | None, store: Store | None, tokens: str | None,
    nodes: int | None, seq_len: int, vocab: int | None,
) -> tuple[Answers, Plans, dict[str, str]]:  # fmt: skip
    """Every value and its reason; the nodes come last, because the plan decides them."""
    from windlass.config.starter import TOKENS_PER_PARAMETER, Answers
    from windlass.models.presets import model_spec

    shape = _shape(size, vocab or (store.vocab_size if store else None))
    parameters = model_spec(shape).params.total
    inside = sum(i.splits.get("train", i.tokens) for i in store.sources.values()) if store else None
    wanted = _read_tokens(tokens) if tokens else inside or _two_digits(size * TOKENS_PER_PARAMETER)
    why = {
        "tokens": "given" if tokens else "what the store holds" if inside else f"{TOKENS_PER_PARAMETER} per parameter",
        "vocab": "given" if vocab else "the store's" if store and store.vocab_size else "usual at this size",
    }
    model = {key: getattr(shape, key) for key in ("layers", "width", "ffn", "heads", "kv_heads", "vocab")}

    def on(count_nodes: int) -> Answers:
        return Answers(
            name=name, cluster=cluster.name, nodes=count_nodes, devices_per_node=cluster.node.devices, account=account,
            parameters=parameters, model=model, store=store_path, tokens=wanted, seq_len=seq_len,
        )  # fmt: skip

    answers, found, why["nodes"] = _on_nodes(on, cluster, nodes)
    return answers, found, why


def _two_digits(value: float) -> int:
    from math import floor, log10

    step = int(10 ** (floor(log10(value)) - 1))
    return round(value / step) * step


def _shape(size: float, vocab: int | None) -> Any:

    from windlass.planner.budget import model_near

    # Eight key/value heads, so that tensor parallelism up to 8 divides them; models that need none may have fewer.
    shape = model_near(size, heads_multiple=8 if size >= 1e9 else 1)
    return shape if vocab is None else shape.model_copy(update={"vocab": vocab})


def _open(path: str | None) -> Store | None:
    """The store, when it is there already."""
    if path is None or not Path(path).exists():
        return None
    from windlass.data.store import open_store

    return open_store(path)


def _on_nodes(on: Any, cluster: Cluster, nodes: int | None) -> tuple[Answers, Plans, str]:
    """The given nodes, or as few (doubling) as finish within a month."""
    from windlass.config.starter import PATIENCE_DAYS
    from windlass.planner.search import nowhere

    if nodes is not None:
        found = _plan(on(nodes), cluster)
        if not found.plans:
            raise nowhere(found)
        return on(nodes), found, "given"
    most = _most_nodes(cluster)
    count = 1
    while True:
        found = _plan(on(count), cluster)
        if found.plans and found.best.days <= PATIENCE_DAYS:
            return on(count), found, f"the fewest that take at most {PATIENCE_DAYS:g} days"
        if count >= most:
            break
        count = min(2 * count, most)
    if not found.plans:
        raise nowhere(found)
    return on(count), found, f"the most that one job may take; it is longer than {PATIENCE_DAYS:g} days all the same"


def _most_nodes(cluster: Cluster) -> int:
    limits = [p.max_nodes for p in cluster.slurm.partitions if p.gpus and p.max_nodes] if cluster.slurm else [1]
    return min(max(limits, default=cluster.nodes or 64), cluster.nodes or 10**6)


def _plan(answers: Answers, cluster: Cluster) -> Plans:
    """Plans of the very text that will be written."""
    import tomllib

    from windlass.config import Recipe, check, validate
    from windlass.config.starter import recipe_text
    from windlass.planner import plan

    recipe = validate(Recipe, tomllib.loads(recipe_text(answers)), f"{answers.name}.toml")
    check(recipe)
    return plan(recipe, cluster, top=1)


# -- the answer -------------------------------------------------------------------------------------------------------


def _result(
    target: Path, data_file: Path | None, a: Answers, found: Plans, reasons: dict[str, str], has_store: bool
) -> dict[str, Any]:
    import shlex

    from windlass.planner import plan_json

    recipe, texts = shlex.quote(str(target)), shlex.quote(str(data_file))
    steps = [f"windlass plan {recipe}"]
    if data_file:
        steps.append(f"windlass tokenizer train {texts} --vocab {a.model['vocab']} --out tokenizers/{a.name}")
        steps.append(f"windlass tokenize {texts}")
    elif not has_store:
        then = f'with output = "{a.store}"' if a.store else "then set data.store"
        steps.append(f"windlass tokenize DATA.toml   # {then}; docs/guides/data.md")
    steps.append(f"windlass launch {recipe} --dry-run" if found.task.cluster.slurm else f"windlass train {recipe}")
    return {
        "recipe": str(target),
        "data_file": None if data_file is None else str(data_file),
        "name": a.name,
        "cluster": a.cluster,
        "account": a.account,
        "nodes": a.nodes,
        "parameters": a.parameters,
        "tokens": a.tokens,
        "store": a.store,
        "store_exists": has_store,
        "reasons": reasons,
        "plan": plan_json(found.best, found.task),
        "next": steps,
    }


def _print(result: dict[str, Any]) -> None:
    from windlass.cli import with_pages
    from windlass.cli.output import console, table
    from windlass.units import print_tokens

    plan, why = result["plan"], result["reasons"]
    mfu = "MFU unknown" if plan["mfu"] is None else f"MFU {plan['mfu']:.0%}"
    store = result["store"] or "none yet: training would read synthetic tokens"
    rows = [
        ("cluster", result["cluster"], why["cluster"]),
        ("nodes", result["nodes"], why["nodes"]),
        ("account", result["account"] or "not set", ""),
        ("parameters", print_tokens(result["parameters"]), "shaped like Llama 3"),
        ("tokens", print_tokens(result["tokens"]), why["tokens"]),
        ("store", store, "" if result["store_exists"] or not result["store"] else "not there yet"),
    ]
    out = console()
    out.print(table(f"wrote {result['recipe']}", ("", "value", "why"), rows))
    if result["data_file"]:
        out.print(f"wrote {result['data_file']}: add licence and origin of the texts there")
    layout = {k: v for k, v in plan["layout"].items() if k in ("shard", "micro_batch", "tensor", "pipeline")}
    words = ", ".join(f"{k}={v}" for k, v in layout.items() if v != 1)
    out.print(f"best layout: {words}: {plan['reason']}", soft_wrap=True)
    out.print(
        f"it needs {plan['memory_gib']:.1f} of {plan['memory_limit_gib']:.1f} GiB, "
        f"{plan['tokens_per_second']:,.0f} tokens/s ({mfu}), {plan['days']:.3g} days, {plan['node_hours']:,.0f} node-hours"
    )
    out.print("next:")
    for step in result["next"]:
        out.print(f"  {with_pages(step)}", soft_wrap=True)
