"""How does a model from elsewhere become a run to start from? Its weights as a checkpoint, its config as a recipe, its tokenizer beside them.

With another tokenizer the vocabulary grows (or changes): a token that the old tokenizer had keeps its row, a new one begins as the
mean of the rows of the pieces that the old tokenizer cuts it into.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint import names
from windlass.checkpoint.save import Saver
from windlass.config import Loaded, Recipe, SaveConfig
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import CheckpointError, ConfigError, RunError
from windlass.evaluate.export import positions_of
from windlass.evaluate.foreign import is_hf_folder, longest_of, recipe_of, unlike_llama
from windlass.evaluate.opened import DTYPES, source_of, tokenizer_of
from windlass.evaluate.stream import Weights, open_weights
from windlass.evaluate.vocabulary import grow
from windlass.evaluate.words import write_tokenizer
from windlass.files import read_json
from windlass.models import build
from windlass.runs.events import WeightsImported
from windlass.runs.folder import Run, create_run

STEP = 0


@dataclass(frozen=True)
class Imported:
    run: Path
    family: str
    parameters: int
    dtype: str
    vocab: int
    notes: list[str] = field(default_factory=list)
    check: Any = None


def import_model(
    folder: Path | str,
    target: Path | str,
    *,
    tokenizer: Path | None = None,
    seq_len: int | None = None,
    verify: bool = True,
) -> Imported:
    """Read `folder` into the new run folder `target`. Tensors are mapped and written one by one."""
    folder, target = Path(folder), Path(target)
    if target.exists():
        raise RunError(
            "evaluate.exists", f"{target} exists", hint="choose another folder with --run: an import never overwrites"
        )
    foreign = is_hf_folder(folder)
    if not foreign and not (folder / "checkpoints").is_dir():
        refuse_config(folder)
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing" if folder.is_dir() else None
        raise CheckpointError(
            "evaluate.model-import",
            f"{folder} {'does not exist' if there is None else f'holds {there}'}: no model to import",
            hint="name a Hugging Face folder (config.json with a model_type, *.safetensors), or a run whose vocabulary is to grow",
        )
    _, recipe, source = (
        (None, recipe_of(folder, name=target.name, seq_len=seq_len), folder) if foreign else source_of(folder, None)
    )
    recipe = recipe.model_copy(update={"name": _plain(target.name), "layout": None})
    weights = open_weights(source)
    dtype = dtype_of(weights)
    state = under_our_names(recipe, weights)
    notes = notes_of(folder, recipe, weights) if foreign else []
    words = _tokenizer(folder, recipe, foreign)
    if tokenizer is not None:
        new = load_tokenizer(tokenizer)
        if words is None:
            raise ConfigError(
                "evaluate.tokenizer-grow",
                f"{folder} has no tokenizer to grow from",
                hint="put its tokenizer.json into the folder",
            )
        recipe, state, said = grow(recipe, state, words, new)
        notes.append(said)
        words = new
    run = write_run(recipe, state, target, words, dtype, folder, positions_of(recipe, source))
    check = _check(run, folder, recipe, words) if verify and foreign and tokenizer is None else None
    count = sum(t.numel() for t in state.values())
    return Imported(run.path, recipe.model.family, count, dtype, recipe.model.vocab or 0, notes, check)


def refuse_config(folder: Path) -> None:
    """Weights with a config.json that says nothing: the reader looks for the fault there and not in the folder."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        known = read_json(folder / "config.json") is not None
        raise ConfigError(
            "evaluate.config-json",
            f"{folder}/config.json {'names no model_type' if known else 'is not JSON: it was cut or changed'}",
            hint="take the config.json that came with the weights",
        )


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip("._-") or "imported"


def dtype_of(weights: Weights) -> str:
    """The one number format of the folder; fp32 where there are several, which holds each of them exactly."""
    kinds = {weights.dtype(name) for name in weights}
    return next((name for name, kind in DTYPES.items() if kinds == {kind}), "fp32")


def under_our_names(recipe: Recipe, weights: Weights) -> dict[str, Tensor]:
    """Every parameter of our model, mapped from the folder."""
    with torch.device("meta"):
        made = build(recipe.model, seq_len=min(recipe.data.seq_len, 128))
    own = made.state_dict()
    ours = set(own) <= set(weights)
    found: Mapping[str, Tensor] = weights if ours else names.from_hf(weights, own, getattr(made, "twins", None))
    missing = [name for name in own if name not in found]
    if not ours and "head.weight" in own and names.TOP["head.weight"] not in weights:
        missing.append("head.weight")  # the config says that it is not the embedding
    wrong = [name for name in own if name in found and found[name].shape != own[name].shape]
    if missing or wrong:
        raise CheckpointError(
            "evaluate.weights-do-fit-folder",
            f"the weights do not fit the folder's own config: {'; '.join(_unfit(missing, wrong, found, own))}",
            hint="is the folder whole, and is its config.json the one of these weights?",
        )
    keep = torch.bfloat16 if all(found[n].dtype == torch.bfloat16 for n in own) else torch.float32
    return {name: found[name].to(keep) for name in own if name not in getattr(made, "twins", {})}


def _unfit(missing: list[str], wrong: list[str], found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    said = [f"{len(missing)} missing ({', '.join(missing[:3])})"] if missing else []
    if wrong:
        first = wrong[0]
        shapes = f"{tuple(found[first].shape)} there, {tuple(own[first].shape)} by the config"
        said.append(f"{len(wrong)} of another shape ({first}: {shapes})")
    return said


def notes_of(folder: Path, recipe: Recipe, weights: Weights) -> list[str]:
    config = read_json(folder / "config.json") or {}
    said, kinds = [], sorted({str(weights.dtype(name)).removeprefix("torch.") for name in weights})
    if recipe.model.family == "hf":
        reasons = "; ".join(unlike_llama(config))
        said.append(f"family hf: {reasons}. It trains sharded, without tensor or pipeline parallelism.")
    if len(kinds) > 1:
        said.append(f"weights of {' and '.join(kinds)} become fp32, which holds both")
    if (longest := longest_of(config) or 0) > recipe.data.seq_len:
        said.append(
            f"the model takes {longest:,} tokens; data.seq_len = {recipe.data.seq_len:,} is noted (--seq-len), and an export keeps {longest:,}"
        )
    return said


def _tokenizer(folder: Path, recipe: Recipe, foreign: bool) -> Tokenizer | None:
    from windlass.errors import DataError

    try:
        return load_tokenizer(folder) if foreign else tokenizer_of(Run(folder), recipe, folder)
    except DataError:
        return None


def write_run(
    recipe: Recipe,
    state: dict[str, Tensor],
    target: Path,
    words: Tokenizer | None,
    dtype: str,
    origin: Path,
    positions: int,
) -> Run:
    """The run folder with its one checkpoint, of step 0."""
    if words is not None:
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"tokenizer": str(target / "tokenizer")})}
        )
    if recipe.model.family == "hf":
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": str(target / "hf")})})
    run = create_run(target, Loaded(recipe=recipe, text=toml_of(recipe), path=None, origins={}))
    if recipe.model.family == "hf":
        (target / "hf").mkdir()
        shutil.copyfile(origin / "config.json", target / "hf" / "config.json")
    if words is not None:
        (target / "tokenizer").mkdir(exist_ok=True)
        write_tokenizer(words, target / "tokenizer", longest=recipe.data.seq_len)
    saver = Saver(run, SaveConfig(asynchronous=False))
    extra = {"tokens": 0, "dtype": dtype, "imported_from": str(origin), "positions": positions}
    outcome = saver.save(STEP, {"model": state}, extra, block=True)
    saver.close()
    if outcome is None or not outcome.ok:
        raise CheckpointError(
            "evaluate.checkpoint-could-written",
            f"the checkpoint could not be written: {outcome.error if outcome else 'unknown'}",
            hint="is the disk full?",
        )
    run.record(WeightsImported(origin=str(origin), dtype=dtype))
    return run


def toml_of(recipe: Recipe) -> str:
    """What differs from the defaults, as a recipe; JSON's values are TOML's."""
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    top = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [
        f"[{key}]\n" + "\n".join(f"{inner} = {json.dumps(v)}" for inner, v in value.items() if not isinstance(v, dict))
        for key, value in values.items() if isinstance(value, dict)
    ]  # fmt: skip
    return "# Written by `windlass import`.\n" + "\n".join([*top, *tables]) + "\n"


def _check(run: Run, folder: Path, recipe: Recipe, words: Tokenizer | None) -> Any:
    from windlass.evaluate.opened import checkpoint_of
    from windlass.evaluate.verify import check_export

    recipe, source = run.recipe(), checkpoint_of(run, None)
    kind = next(
        name for name, value in DTYPES.items() if value == open_weights(source).dtype(next(iter(open_weights(source))))
    )
    check = check_export(recipe, source, folder, kind, words)
    if not check.ok:
        raise CheckpointError(
            "evaluate.imported-model-does-compute",
            f"the imported model does not compute what transformers computes: largest difference of logits {check.difference:.3g}",
            hint="this is a fault in windlass: report the model's config.json; the run folder is kept for a look",
        )
    return check
