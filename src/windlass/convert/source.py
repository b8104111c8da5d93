"""The model that a command works on: its recipe, the folder with its weights, its tokenizer and its token store."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from windlass.blocks.cpu_products import use_onednn
from windlass.checkpoint.files import list_saved, steps_on_disk
from windlass.checkpoint.load import find_best, load_model_weights, weights_source
from windlass.config import Recipe
from windlass.convert.config_json import is_hf_folder, recipe_of_folder
from windlass.data.store import Store, open_store
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.models.build import build_model
from windlass.runs.folder import Run, open_run

ProgressCallback = Callable[[int, int], None]  # called with the work done and the total
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint of a run, or a Hugging Face folder (run is None)."""

    run: Run | None
    recipe: Recipe
    folder: Path
    note: str | None = None  # why it is not the newest checkpoint of the run


def find_source(path: Path | str, step: int | None = None) -> ModelSource:
    """The newest complete checkpoint of a run (of fine-tuning on examples the best one, whose scores the run has), or
    that of `step`, or a Hugging Face folder. Changes nothing on disk."""
    path = Path(path)
    if is_hf_folder(path):
        return ModelSource(None, recipe_of_folder(path), path)
    run = open_run(path)
    tune = run.recipe().tune
    if step is None and tune is not None and tune.reads_examples and (best := find_best(run)) is not None:
        reason = f"step {best.step:,} is used: the best by {tune.selected_metric}"
        return ModelSource(run, run.recipe(), best.path, reason)
    if step is None:
        folder = weights_source(run.path)
        steps = {saved: number for number, saved in steps_on_disk(run)}
        newer = [f"{number:,}" for number in steps.values() if number > steps.get(folder, number)]
        note = f"step {steps[folder]:,} is used: {', '.join(newer)} is damaged or not finished" if newer else None
        return ModelSource(run, run.recipe(), folder, note)
    folder = run.checkpoint(step)
    if not folder.is_dir():
        available = ", ".join(f"{saved.step:,}" for saved in list_saved(run)) or "none"
        raise CheckpointError(
            "convert.step-missing",
            f"{run.path} has no checkpoint of step {step:,}",
            hint=f"available steps: {available}",
        )
    return ModelSource(run, run.recipe(), folder)


def dtype_of_name(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError("convert.dtype-unknown", f"unknown dtype {name!r}", hint=f"use {' or '.join(DTYPES)}")
    return DTYPES[name]


def load_model(
    recipe: Recipe, folder: Path, device: torch.device, dtype: torch.dtype, *, verify: bool = True
) -> nn.Module:
    """The model with the weights of a folder, in evaluation mode. Memory is allocated once, on the device."""
    if device.type == "cpu":
        use_onednn()
    with torch.device("meta"):
        model = build_model(recipe.model, seq_len=recipe.data.seq_len)
    model = model.to(dtype).to_empty(device=device)
    load_model_weights(folder, model, verify=verify)
    model.prepare(device)
    return model.eval().requires_grad_(False)


def own_store(source: ModelSource) -> Store:
    """The token store that the model was trained on."""
    named = source.recipe.data.store
    if named is None:
        raise DataError(
            "convert.no-token-store",
            f"{source.folder} names no token store",
            hint="for eval, give a token store made with its tokenizer (--store); for generate, chat and export, "
            "give its tokenizer (--tokenizer)",
        )
    for candidate in (Path(named), *([source.run.path / "data"] if source.run else [])):
        if candidate.is_dir():
            return open_store(candidate)
    raise DataError(
        "convert.token-store-unreachable",
        f"the run's token store {named} does not exist on this machine",
        hint="for eval, give a copy of it (--store); for generate, chat and export, give its tokenizer (--tokenizer)",
    )


def find_tokenizer(source: ModelSource, named: Path | str | None = None) -> Tokenizer:
    """The tokenizer named by the caller, else by the recipe, else that of the store or of the Hugging Face folder."""
    path = named or source.recipe.data.tokenizer or (source.folder if source.run is None else None)
    eos = None
    if path is None:
        store = own_store(source)
        path, eos = store.tokenizer_file, store.eos
        if path is None:
            raise DataError(
                "convert.tokenizer-unknown",
                f"the token store {store.path} does not record its tokenizer",
                hint="name it with --tokenizer",
            )
    tokenizer = load_tokenizer(path, eos=eos)
    vocab = source.recipe.model.vocab
    if vocab is not None and tokenizer.vocab_size > vocab:
        raise DataError(
            "convert.tokenizer-too-large",
            f"the tokenizer {tokenizer.path} has {tokenizer.vocab_size:,} tokens, but the model only {vocab:,}",
            hint="name the tokenizer that the model was trained with: --tokenizer",
        )
    return tokenizer
