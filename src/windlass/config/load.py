"""Recipes from TOML files and `key=value` overrides. Every problem is collected before the error is raised."""

import hashlib
import json
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from windlass.config.base import Table
from windlass.config.model import (
    HYBRID_KINDS,
    LAYER_KINDS,
    REPEATED,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    hf_aliases,
    with_our_names,
)
from windlass.config.ramp import ramp_problems
from windlass.config.recipe import Recipe
from windlass.config.secret import find_secret, redact_text
from windlass.config.shell import RECORDED, SECRET_HINT
from windlass.errors import ConfigError
from windlass.registry import BLOCKS, PRESETS
from windlass.units import divisors, nearest

T = TypeVar("T", bound=Table)
logger = logging.getLogger(__name__)
FileKind = Literal["recipe", "data", "sweep"]
# Kind of file -> its name in messages, and the commands that read it.
KIND_TEXTS = {
    "recipe": ("a recipe", "windlass plan, train and launch take recipes"),
    "data": ("a data file", "windlass tokenize takes data files"),
    "sweep": ("a sweep file", "windlass sweep takes sweep files"),
}
# Model -> its kind of file, if it is one of those, and where its keys are described; the recipe where it is not named.
MODELS: dict[str, tuple[FileKind | None, str]] = {
    "Recipe": ("recipe", "`windlass show --schema` lists every key; see docs/reference/recipe.md"),
    "DataFile": ("data", "docs/reference/data-file.md lists every key"),
    "SweepConfig": ("sweep", "docs/reference/sweep-file.md lists every key"),
    "Cluster": (None, "docs/reference/cluster-file.md lists every key"),
    "Device": (None, "docs/reference/cluster-file.md lists every key"),
    "PlannerQuestion": (None, "correct it in the form above"),
}


@dataclass(frozen=True)
class Loaded:
    """A recipe, the text it came from and where each value came from."""

    recipe: Recipe
    text: str
    path: Path | None
    origins: Mapping[str, str]  # dotted key -> "recipe" or "override"; what is absent is a default

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of all keys, in the order of the recipe's tables."""

        def walk(table: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
            for name in type(table).model_fields:
                value, key = getattr(table, name), f"{prefix}{name}"
                if isinstance(value, BaseModel):
                    yield from walk(value, f"{key}.")
                else:
                    inner = (origin for k, origin in self.origins.items() if k.startswith(f"{key}."))
                    yield key, value, self.origins.get(key) or next(inner, "default")

        return walk(self.recipe, "")


# -- reading --------------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The parsed file and its text, or an error that says where the syntax is wrong."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a mark first
    except FileNotFoundError:
        raise ConfigError("config.file-missing", f"there is no file {path}", hint=missing_hint(path)) from None
    except IsADirectoryError:
        raise ConfigError(
            "config.not-a-file", f"{path} is a folder, not a TOML file", hint="give the path of the file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "config.file-unreadable",
            f"{path} cannot be read: {error}",
            hint="a recipe is a UTF-8 text file: check its encoding and permissions",
        ) from None
    return parse_toml(text, str(path)), text


# Tables inside tables inside tables; no file of ours needs more than six, and functions that walk one call themselves.
MAX_TABLE_DEPTH = 32


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a text, or an error that says where the syntax is wrong. Every reader of TOML calls this."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "strings must be quoted and numbers must not; a table starts with [name]"
        number = int(match[1]) if (match := re.search(r"line (\d+)", str(error))) else 0
        if 0 < number <= len(lines := text.splitlines()):
            hint = (
                f"line {number} reads: {shorten(lines[number - 1].strip())!r}; strings must be quoted, numbers must not"
            )
        raise ConfigError("config.syntax", f"{where} is not valid TOML: {shorten(str(error))}", hint=hint) from None
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:  # Python reads integers of at most 4,300 digits
        raise ConfigError("config.number-too-large", f"{where}: {error}", hint=INTEGER_HINT) from None
    refuse_implausible(raw, where)
    return raw


INTEGER_HINT = "use an integer of at most 64 bits: 9,223,372,036,854,775,807 is the largest"


def refuse_implausible(raw: Mapping[str, Any], where: str) -> None:
    """An error for values that are nested more than MAX_TABLE_DEPTH deep, and for integers of more than 64 bits."""
    level: list[Any] = [raw]
    for _ in range(MAX_TABLE_DEPTH):
        inner = [value for table in level for value in (table if isinstance(table, list) else table.values())]
        if large := [value for value in inner if isinstance(value, int) and abs(value) >= 2**63]:
            message = f"{where} has an integer of {large[0].bit_length()} bits"
            raise ConfigError("config.number-too-large", message, hint=INTEGER_HINT)
        level = [value for value in inner if isinstance(value, (dict, list))]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> ConfigError:
    hint = "check whether the file is damaged: recipes, data, sweep and cluster files have only a few nested tables"
    return ConfigError(
        "config.nested-too-deep", f"{where}: values are nested more than {MAX_TABLE_DEPTH} deep", hint=hint
    )


def shorten(text: str, length: int = 120) -> str:
    """The beginning of a text that a damaged file may have made very long."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"


def kind_of(raw: Mapping[str, Any]) -> FileKind | None:
    """The kind of file, by its tables; None: not one of ours, or not clear."""
    if "sources" in raw:
        return "data"
    return "sweep" if {"matrix", "zip", "include"} & raw.keys() else "recipe" if "model" in raw else None


def missing_hint(path: Path) -> str:
    """Hint for a file that does not exist: a file with a similar name, or a recipe that comes with windlass."""
    # Without the suffix, which would make all of them alike.
    stems = [p.stem for p in path.parent.glob("*.toml")]
    near = get_close_matches(path.name.removesuffix(".toml"), stems, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(str(path.parent / f'{stem}.toml') for stem in near)}?"
    if own := shipped(path):
        return f"windlass ships it as {own}: copy it here and edit the copy"
    folder = shipped(Path("recipes"))
    return "check the path" if folder is None else f"check the path; recipes to start from are in {folder}"


def shipped(path: Path) -> Path | None:
    """`recipes/tiny_cpu.toml`, `tiny_cpu.toml` or `tiny_cpu` among the recipes that come with windlass: beside the
    package in a wheel, at the top of a checkout."""
    if path.is_absolute():
        return None
    package = Path(__file__).resolve().parents[1]
    parts = path.parts[1:] if path.parts[:1] == ("recipes",) else path.parts
    names = [top.joinpath(*parts) for top in (package / "recipes", package.parents[1] / "recipes")]
    return next((p for name in names for p in (name, name.with_name(f"{name.name}.toml")) if p.exists()), None)


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """`layout.micro_batch=4` -> (("layout", "micro_batch"), 4); what is not a TOML value is taken as text."""
    key, equals, value = override.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts) or len(parts) > MAX_TABLE_DEPTH:
        raise ConfigError(
            "config.override-invalid",
            f"{shorten(override)!r} is not an override",
            hint="write key=value, for example layout.micro_batch=4",
        )
    try:
        return parts, parse_toml(f"v = {value}", key)["v"]
    except ConfigError as error:
        if error.code != "config.syntax":
            raise
        return parts, value


def apply_override(raw: dict[str, Any], parts: Sequence[str], value: Any) -> str:
    """Set one dotted key in a raw table and return it by our name; `layout=none` removes that table."""
    if len(parts) == 2 and parts[0] == "model" and isinstance(model := raw.get("model"), dict):
        raw["model"] = with_our_names(model)
        parts = ("model", hf_aliases({**model, parts[1]: value}).get(parts[1], parts[1]))
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError("config.not-a-table", f"{'.'.join(parts)}: {part} is a value, not a table")
    if value == "none" and parts[-1] == "layout":
        table.pop("layout", None)
    else:
        table[parts[-1]] = value
    return ".".join(parts)


def flatten(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted leaves of nested tables, in order."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Loaded:
    """Read, override, check. Raises one ConfigError that lists every problem with its dotted path."""
    path = Path(path)
    raw, text = read_toml(path)
    if isinstance(model := raw.get("model"), dict):
        raw["model"] = with_our_names(model)
    origins = {key: "recipe" for key, _ in flatten(raw)}
    for override in overrides:
        dotted = apply_override(raw, *parse_override(override))
        kept = {key: origin for key, origin in origins.items() if not key.startswith(f"{dotted}.")}
        origins = {**kept, dotted: "override"}
    recipe = validate(Recipe, raw, str(path))
    check(recipe)
    changed = [key for key, origin in origins.items() if origin == "override"]
    logger.info("recipe: %s (overridden: %s)", path.absolute(), ", ".join(changed) or "nothing")
    return Loaded(recipe, text, path, origins)


def recipe_hash(recipe: Recipe) -> str:
    """A short hash of the keys that define a run: two recipes with the same hash may share a run folder."""
    included, excluded = {"name", "seed", "model", "data"}, {"data": {"tokens", "store"}}
    value = recipe.model_dump(mode="json", include=included, exclude=excluded)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# -- problems -------------------------------------------------------------------------------------------------------


def refuse(code: str, where: str, problems: Sequence[str], hint: str) -> None:
    """Raise one ConfigError that lists all problems, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(code, f"{where}: {count}\n" + "\n".join(f"  {p}" for p in problems), hint=hint) from None


def validate(model: type[T], raw: Mapping[str, Any], where: str, *, recorded: bool = False) -> T:
    """A checked table, or one ConfigError naming every problem. `recorded`: of a run folder, not for a job script."""
    refuse_implausible(raw, where)
    try:
        return model.model_validate(raw, context=RECORDED if recorded else None)
    except ValidationError as error:
        (wanted, hint), kind = MODELS.get(model.__name__, (None, MODELS["Recipe"][1])), kind_of(raw)
        if wanted and kind and kind != wanted:  # a list of every key that is wrong would hide the one mistake
            (name, readers), (wanted_name, wanted_readers) = KIND_TEXTS[kind], KIND_TEXTS[wanted]
            message, advice = f"{where} is {name}, not {wanted_name}", f"{readers}; {wanted_readers}"
            raise ConfigError("config.other-kind", message, hint=advice) from None
        refuse("config.invalid", where, [_problem(model, item) for item in error.errors()], hint)
        raise


def _problem(model: type[BaseModel], item: Any) -> str:
    # A hostile key must not reach the terminal as it is.
    loc = [str(part) if str(part).isprintable() else repr(part) for part in item["loc"]]
    dotted, value = ".".join(loc), item.get("input")
    if item["type"] == "extra_forbidden":
        keys = _keys_at(model, loc[:-1])
        elsewhere = [f"{name}.{loc[-1]}" for name in model.model_fields if loc[-1] in _keys_at(model, [name])]
        near = elsewhere or get_close_matches(loc[-1], keys, n=3, cutoff=0.51)
        advice = f"did you mean {' or '.join(near)}?" if near else f"known keys here: {', '.join(sorted(keys))}"
        return f"{dotted}: unknown key; {advice}"
    if item["type"] == "missing":
        return f"{dotted}: missing, and there is no default"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch" and dotted == "name":
        legal = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")
        message = f"letters, digits, dot, dash and underscore only; nearest valid value: {legal or 'my-run'}"
    is_shown = isinstance(value, Mapping) or repr(value) in message
    return redact_text(f"{dotted}: {message}" + ("" if is_shown else f" (got {shorten(repr(value))})"))


def _keys_at(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """Keys of the table at a dotted path; indices and names of entries are skipped."""
    table: Any = model
    for part in loc:
        extra = table.extra_table(part) if issubclass(table, ModelConfig) and part not in table.model_fields else None
        if extra is None and part not in table.model_fields:
            continue
        annotation = extra or table.model_fields[part].annotation
        types = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type)]
        table = next((t for t in types if issubclass(t, BaseModel)), None)
        if table is None:
            return []
    blocks = [name for name in BLOCKS.names() if table.extra_table(name)] if issubclass(table, ModelConfig) else []
    return [*table.model_fields, *blocks]


def check(recipe: Recipe) -> None:
    """Check the rules that involve several keys. Changes nothing; one error lists every problem."""
    data, problems = recipe.data, list(model_problems(recipe.model))
    for key, value in flatten(recipe.model_dump(exclude={"launch"})):  # the launch table has checked its own
        if secret := find_secret(f"{value}"):
            problems.append(f"{key}: holds {secret}, which would be written into config.json; {SECRET_HINT}")
    counts_epochs = recipe.task not in (None, "masked")
    if data.store == "":
        problems.append("data.store: empty; name a token store, or remove the key to train on synthetic tokens")
    if data.tokens is None and recipe.train.steps is None and not counts_epochs:
        problems.append("data.tokens: missing; set it, or train.steps, to say how long to train")
    named = [("data.batch_tokens", data.batch_tokens), *(("data.batch_ramp", size) for _, size in data.batch_ramp)]
    for key, batch in named:
        if batch is not None and (batch == 0 or batch % data.seq_len):
            below = batch // data.seq_len * data.seq_len
            valid = nearest(batch, (size for size in (below, below + data.seq_len) if size))
            problems.append(
                f"{key} ({batch:,}) is not a multiple of data.seq_len ({data.seq_len:,}); nearest valid value: {valid}"
            )
    problems += ramp_problems(data)
    train = recipe.train
    is_loss = recipe.save.metric == "loss" or recipe.save.metric.startswith("val_loss")
    if not is_loss and not recipe.reads_examples:
        problems.append(f"save.metric ({recipe.save.metric}): only available for fine-tuning on examples; use val_loss")
    if recipe.task == "masked":
        refused = {"train.engine": train.engine != "native", "train.goldfish_k": train.goldfish_k}
        problems += [
            f'{key}: not supported with tune.task = "masked"; remove it' for key, is_set in refused.items() if is_set
        ]
    if train.goldfish_k == 1:
        problems.append("train.goldfish_k (1) leaves every token out of the loss; use at least 2, or 0 to turn it off")
    if train.goldfish_k and train.goldfish_h >= data.seq_len:
        most = data.seq_len - 1
        problems.append(f"train.goldfish_h ({train.goldfish_h:,}) is not below data.seq_len; at most {most:,}")
    if train.goldfish_k and train.objective != "next_token":
        problems.append(f"train.goldfish_k: only possible with train.objective = next_token, not {train.objective}")
    if data.reset_positions and not data.mask_documents:
        problems.append("data.reset_positions: needs data.mask_documents = true, or remove it")
    if any(weight < 0 for weight in data.mix.values()) or (data.mix and sum(data.mix.values()) <= 0):
        problems.append("data.mix: weights must be at least 0 and not all 0")
    refuse("config.invalid", recipe.name, problems, "change one of the keys that each line names")


def pattern_problems(model: ModelConfig) -> Iterator[str]:
    """What is wrong with the kinds of layers and their positions."""
    kinds = HYBRID_KINDS if model.family == "nemotron_h" else LAYER_KINDS
    letters = (model.pattern or LAYER_KINDS[0]).removesuffix(REPEATED)
    if not letters or set(letters) - set(kinds):
        rule = f"use one or more of the letters of family {model.family!r}: {', '.join(kinds)}"
        yield f"model.pattern ({shorten(repr(model.pattern))}): {rule}"
    elif model.pattern == letters and len(letters) != model.layers:
        rule = f"{len(letters)} letters for {model.layers} layers"
        advice = f"set model.layers = {len(letters)}, or write {letters}{REPEATED} to repeat them"
        yield f"model.pattern ({letters}): {rule}; {advice}"
    for letter, table, key in (("M", model.mamba, "heads"), ("E", model.experts, "count")):
        name = {"M": "mamba", "E": "experts"}[letter]
        if letter in letters and table is None:
            yield f"model.{name}: missing; the {letter} layers of model.pattern need it (at least model.{name}.{key})"
    if model.mamba is not None and "M" not in letters:
        yield f"model.mamba: model.pattern ({letters}) has no M layer that would use it; write M, or remove the table"
    if model.mamba is not None and model.mamba.heads % model.mamba.groups:
        valid = nearest(model.mamba.groups, divisors(model.mamba.heads))
        rule = f"does not divide model.mamba.heads ({model.mamba.heads}); nearest valid value: {valid}"
        yield f"model.mamba.groups ({model.mamba.groups}) {rule}"
    if "W" in letters and model.window is None:
        yield "model.window: missing; the W layers of model.pattern need it (positions that a query sees)"
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind != "linear" and scaling.old_length is None:
        yield (
            f"model.rope_scaling.old_length: missing; kind {scaling.kind!r} needs the sequence length before the "
            "scaling"
        )
    if scaling is not None and scaling.low_turns >= scaling.high_turns:
        yield (
            f"model.rope_scaling.low_turns ({scaling.low_turns:g}) is not below "
            f"model.rope_scaling.high_turns ({scaling.high_turns:g})"
        )


def experts_problems(model: ModelConfig, experts: ExpertsConfig) -> Iterator[str]:
    """What is wrong with the mixture of experts, each with the nearest legal value."""
    count, top_k, groups = experts.count, experts.top_k, experts.groups
    if model.family == "retnet":
        yield "model.experts: family 'retnet' has a plain feed-forward block; remove the table"
    if model.activation == "xielu":
        yield (
            "model.activation (xielu): experts cannot use it, because it has parameters; use swiglu, geglu, gelu "
            "or relu2"
        )
    if top_k > count:
        yield f"model.experts.top_k ({top_k}) is above model.experts.count ({count}); at most {count}"
    if count % groups:
        legal = min((n for n in range(1, count + 1) if count % n == 0), key=lambda n: abs(n - groups))
        yield f"model.experts.groups ({groups}) does not divide model.experts.count ({count}); the nearest is {legal}"
    elif (kept := experts.groups_kept or groups) > groups:
        yield f"model.experts.groups_kept ({kept}) is above model.experts.groups ({groups}); at most {groups}"
    elif (reach := kept * count // groups) < top_k <= count:
        needed = -(-top_k * groups // count)
        rule = f"{kept} groups of {count // groups} hold {reach} experts, fewer than model.experts.top_k ({top_k})"
        yield f"model.experts.groups_kept ({kept}): {rule}; at least {needed}"
    letters = (model.pattern or LAYER_KINDS[0]).removesuffix(REPEATED)
    if experts.dense_layers and "E" in letters:
        rule = "model.pattern says which layers have experts (E) and which are dense (-)"
        yield f"model.experts.dense_layers ({experts.dense_layers}): {rule}; remove it"
    if set(letters) <= set("M*-"):
        yield f"model.experts: model.pattern ({letters}) has no layer that would use them; write E, or remove the table"
    if model.layers and experts.dense_layers >= model.layers:
        rule = f"leaves none of model.layers ({model.layers}) with experts"
        yield f"model.experts.dense_layers ({experts.dense_layers}) {rule}; at most {model.layers - 1}"
    if experts.bias_step and not experts.bias_strength:
        yield f'model.experts.bias_step: balance = "{experts.balance}" moves no bias; use "bias" or "both", or remove it'
    if experts.shared_ffn and not experts.shared:
        yield "model.experts.shared_ffn: there is no shared expert; set model.experts.shared = 1, or remove it"


def latent_problems(model: ModelConfig, latent: LatentConfig) -> Iterator[str]:
    """Keys that latent attention does not have."""
    if model.family == "retnet":
        yield "model.latent: family 'retnet' has retention instead of attention; remove the table"
    if latent.rope_dim % 2:
        yield f"model.latent.rope_dim ({latent.rope_dim}): positions are rotated in pairs, so it must be even; nearest: {latent.rope_dim + 1}"
    if set((model.pattern or "F").removesuffix(REPEATED)) != {"F"}:
        yield f"model.pattern ({shorten(repr(model.pattern))}): latent attention has full layers only; remove it"
    standards = {
        "kv_heads": (None, model.heads),
        "head_dim": (None,),
        "qk_norm": ("none",),
        "attention_bias": ("none",),
        "attention_sinks": (False,),
        "rope_fraction": (1.0,),
    }
    for key, accepted in standards.items():
        if (value := getattr(model, key)) not in accepted:
            yield f"model.{key} ({value}): latent attention does not use it; remove it"


def model_problems(model: ModelConfig) -> Iterator[str]:
    """What is missing in a [model] table or does not fit together."""
    heads, width = model.heads, model.width
    if model.family == "hf" and model.config is None:
        yield 'model.config: missing; model.family = "hf" needs a folder with config.json'
    if model.family == "hf" or model.family not in PRESETS.builtin:  # families of other packages check their own keys
        return
    for key in ("layers", "width", "heads", "vocab", "ffn"):
        if getattr(model, key) is None:
            yield f"model.{key}: missing, and there is no default for family {model.family!r}"
    if heads and model.kv_heads and heads % model.kv_heads:
        valid = nearest(model.kv_heads, divisors(heads))
        yield f"model.kv_heads ({model.kv_heads}) does not divide model.heads ({heads}); nearest valid value: {valid}"
    if not heads or not width:
        return
    if model.latent is not None:
        yield from latent_problems(model, model.latent)
    elif model.head_dim is None and width % heads:
        valid = nearest(heads, divisors(width))
        yield f"model.heads ({heads}) does not divide model.width ({width}); nearest valid value: {valid}"
    size = model.head_dim or width // heads
    turned = int(size * model.rope_fraction)
    if model.latent is None and (turned % 2 or not turned):
        rule = "rotary positions rotate dimensions in pairs, so their number must be even and positive"
        yield f"model.heads ({heads}): {turned} of the {size} dimensions of each head are rotated; {rule}"
    yield from pattern_problems(model)
    if model.experts is not None:
        yield from experts_problems(model, model.experts)
    if model.family != "retnet":
        return
    values = model.value_width or model.ffn
    if values and values % heads:
        key = "value_width" if model.value_width else "ffn (the default of value_width)"
        up = -(-values // heads) * heads
        yield f"model.heads ({heads}) does not divide model.{key} ({values}); the next larger one is {up}"
    if model.kv_heads not in (None, heads):
        advice = f"remove it, or write model.kv_heads = {heads}"
        yield f"model.kv_heads ({model.kv_heads}): retention has no groups of heads; {advice}"
    if model.head_dim is not None and model.head_dim * heads != width:
        rule = f"retention's heads divide model.width ({width}) by {heads}"
        yield f"model.head_dim ({model.head_dim}): {rule}; remove it"
