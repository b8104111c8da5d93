"""Import of a Hugging Face model as a run to start from: a checkpoint of step 0, a recipe and the tokenizer.

With another tokenizer the vocabulary changes; see `vocabulary.py`.
"""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from windlass.checkpoint import names
from windlass.checkpoint.save import Saver
from windlass.config import Loaded, ModelConfig, Recipe, SaveConfig
from windlass.config.load import apply_override, flatten
from windlass.config.toml_text import to_toml
from windlass.convert.config_json import (
    format_of,
    is_hf_folder,
    match_format,
    max_positions,
    positions_of,
    recipe_name,
    recipe_of_folder,
)
from windlass.convert.source import DTYPES, ModelSource, find_source, find_tokenizer
from windlass.convert.target import check_space, new_folder, refuse_existing
from windlass.convert.tokenizer_files import write_tokenizer
from windlass.convert.verify import LogitComparison, compare_logits
from windlass.convert.vocabulary import grow_vocabulary
from windlass.convert.weights import StoredWeights, open_weights
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.files import read_json
from windlass.models.build import build_model
from windlass.models.hf_format import unmet
from windlass.runs.events import WeightsImported
from windlass.runs.folder import Run, create_run
from windlass.units import print_bytes


@dataclass(frozen=True)
class Imported:
    run: Path
    family: str
    parameters: int
    dtype: str
    vocab: int
    notes: list[str] = field(default_factory=list)
    check: LogitComparison | None = None


def import_model(
    folder: Path | str,
    target: Path | str,
    *,
    tokenizer: Path | None = None,
    seq_len: int | None = None,
    verify: bool = True,
) -> Imported:
    """Read a Hugging Face folder, or a run whose vocabulary should grow, into the new run folder `target`."""
    folder, target = Path(folder), Path(target)
    refuse_existing(target, "--run")
    from_folder = is_hf_folder(folder)
    if from_folder:
        source = ModelSource(None, recipe_of_folder(folder, seq_len=seq_len), folder)
    else:
        refuse_other_folder(folder)
        source = find_source(folder)
    recipe = source.recipe.model_copy(update={"name": recipe_name(target), "layout": None})
    weights = open_weights(source.folder)
    formats = {weights.dtype(name) for name in weights}
    # Several formats become fp32, which holds each of them exactly.
    dtype = next((name for name, torch_dtype in DTYPES.items() if formats == {torch_dtype}), "fp32")
    state = weights_under_our_names(recipe, weights)
    notes = import_notes(folder, recipe, formats) if from_folder else []
    try:
        loaded = (
            find_tokenizer(ModelSource(source.run, recipe, source.folder)) if source.run else load_tokenizer(folder)
        )
    except DataError:
        loaded = None
    if tokenizer is not None:
        if loaded is None:
            raise ConfigError(
                "convert.old-tokenizer-missing",
                f"{folder} has no tokenizer to grow from",
                hint="put its tokenizer.json into the folder",
            )
        old, loaded = loaded, load_tokenizer(tokenizer)
        recipe, state, note = grow_vocabulary(recipe, state, old, loaded)
        notes.append(note)
    check = None
    with new_folder(target, "--run") as temporary:
        run = write_run(recipe, state, temporary, target, loaded, dtype, folder, positions_of(recipe, source.folder))
        if verify and from_folder and tokenizer is None:
            written = run.recipe()  # names files by the paths that they will have
            model = written.model.model_copy(update={"config": recipe.model.config})
            written = written.model_copy(update={"model": model})
            stored = next(iter(state.values())).dtype
            check = compare_logits(written, find_source(run.path).folder, folder, stored, loaded)
            if not check.ok:
                raise CheckpointError(
                    "convert.import-logits-differ",
                    "the imported model does not compute what transformers computes: "
                    f"largest logit difference {check.difference:.3g}",
                    hint="this is a bug in windlass: please report the model's config.json; nothing was written, and "
                    "--no-verify imports it nevertheless",
                )
    parameters = sum(tensor.numel() for tensor in state.values())
    return Imported(target, recipe.model.family, parameters, dtype, recipe.model.vocab or 0, notes, check)


def refuse_other_folder(folder: Path) -> None:
    """Raise an error for a folder that is neither a Hugging Face folder nor a run, with its content."""
    if not (folder / "checkpoints").is_dir():
        entries = sorted(path.name for path in folder.iterdir())[:6] if folder.is_dir() else []
        content = f"holds {', '.join(entries) or 'nothing'}" if folder.is_dir() else "does not exist"
        raise CheckpointError(
            "convert.nothing-to-import",
            f"{folder} {content}: no model to import",
            hint="name a Hugging Face folder (config.json with a model_type, *.safetensors), "
            "or a run whose vocabulary should grow",
        )


def weights_under_our_names(recipe: Recipe, weights: StoredWeights) -> dict[str, Tensor]:
    """Every parameter of our model, from the folder."""
    with torch.device("meta"):
        model = build_model(recipe.model, seq_len=min(recipe.data.seq_len, 128))
    own, twins, format = model.state_dict(), getattr(model, "twins", {}), format_of(recipe.model)
    is_ours = set(own) <= set(weights)
    loaded: Mapping[str, Tensor] = weights if is_ours else names.from_hf(recipe.model.family, weights, own, twins)
    # If the config says that the head is not tied, a missing head is not copied from the embedding.
    untied = [] if is_ours else [name for name in format.tied if format.hf_name(name) not in weights]
    if problems := names.misfits(loaded, own, untied):
        raise CheckpointError(
            "convert.weights-do-not-fit",
            f"the weights do not fit the folder's config.json: {'; '.join(problems)}",
            hint="check that the folder is complete and that its config.json belongs to these weights",
        )
    keep = torch.bfloat16 if all(loaded[name].dtype == torch.bfloat16 for name in own) else torch.float32
    return {name: loaded[name].to(keep) for name in own if name not in twins}


def import_notes(folder: Path, recipe: Recipe, formats: set[torch.dtype]) -> list[str]:
    """What the user should know about the import."""
    config = read_json(folder / "config.json") or {}
    reasons, positions, length = "; ".join(match_format(config)[1]), max_positions(config) or 0, recipe.data.seq_len
    listed = " and ".join(sorted(str(torch_dtype).removeprefix("torch.") for torch_dtype in formats))
    left_out = "; ".join(unmet(format_of(recipe.model).left_out, config))
    notes = (
        (bool(left_out), left_out),
        (bool(reasons), f"family hf: {reasons}. It trains sharded, without tensor or pipeline parallelism."),
        (len(formats) > 1, f"weights of {listed} become fp32, which holds both exactly"),
        (
            positions > length,
            f"the model takes {positions:,} tokens; data.seq_len = {length:,} is recorded (--seq-len), "
            f"and an export keeps {positions:,}",
        ),
    )
    return [note for applies, note in notes if applies]


def write_run(
    recipe: Recipe,
    state: dict[str, Tensor],
    folder: Path,
    target: Path,
    tokenizer: Tokenizer | None,
    dtype: str,
    origin: Path,
    positions: int,
) -> Run:
    """The run in `folder` with one checkpoint, of step 0. Its recipe names files by their paths below `target`."""
    wrapped = format_of(recipe.model).wraps_transformers
    data = {"tokenizer": str(target / "tokenizer")} if tokenizer is not None else {}
    model = {"config": str(target / "hf")} if wrapped else {}
    updates = {"data": recipe.data.model_copy(update=data), "model": recipe.model.model_copy(update=model)}
    recipe = recipe.model_copy(update=updates)
    run = create_run(folder, Loaded(recipe=recipe, text=recipe_text(recipe), path=None, origins={}))
    if wrapped:
        (folder / "hf").mkdir()
        shutil.copyfile(origin / "config.json", folder / "hf" / "config.json")
    if tokenizer is not None:
        (folder / "tokenizer").mkdir(exist_ok=True)
        write_tokenizer(tokenizer, folder / "tokenizer", max_length=recipe.data.seq_len)
    needed_bytes = sum(tensor.nbytes for tensor in state.values())
    check_space(folder, needed_bytes)
    extra = {"tokens": 0, "dtype": dtype, "imported_from": str(origin), "positions": positions}
    with contextlib.closing(Saver(run, SaveConfig(asynchronous=False))) as saver:
        outcome = saver.save(0, {"model": state}, extra, block=True)
    if outcome is None or not outcome.ok:
        raise CheckpointError(
            "convert.checkpoint-not-written",
            f"the checkpoint of {print_bytes(needed_bytes)} could not be written: "
            f"{outcome.error if outcome else 'unknown'}; {print_bytes(shutil.disk_usage(folder).free)} are free",
            hint="check that the disk is not full",
        )
    run.record(WeightsImported(origin=str(origin), dtype=dtype))
    return run


def recipe_text(recipe: Recipe) -> str:
    """The recipe's TOML: what differs from the defaults, of the model from those of its family."""
    standard = ModelConfig(family=recipe.model.family)
    if recipe.model.rope_scaling != standard.rope_scaling:  # replaces that of the family, key by key
        standard = standard.model_copy(update={"rope_scaling": None})
    usual, raw = dict(flatten(standard.model_dump(mode="json"))), recipe.model_dump(mode="json", exclude_defaults=True)
    raw["model"] = {"family": recipe.model.family}
    for key, value in flatten(recipe.model.model_dump(mode="json")):
        if value != usual.get(key):
            apply_override(raw["model"], key.split("."), value)
    return to_toml(raw, "Written by `windlass import`.")
