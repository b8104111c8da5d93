"""Which model is looked at, and with which tokenizer and held-out text? A run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windlass.checkpoint.load import load_model_weights, weights_source
from windlass.config import Recipe
from windlass.data.store import Store, open_store
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.files import read_json
from windlass.models import build
from windlass.runs.folder import Run, open_run

if TYPE_CHECKING:
    from windlass.models.parts import Model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Opened:
    """A model with its weights, ready to be asked."""

    model: Model
    recipe: Recipe
    source: Path
    """Folder that the weights were read from."""
    step: int | None
    tokens: int | None
    """Tokens it was trained on; None for a model from elsewhere."""
    run: Run | None
    device: torch.device
    dtype: torch.dtype
    note: str | None = None
    """What should be known about the choice of the checkpoint."""

    @property
    def where(self) -> str:
        """For people: device and number format."""
        return f"{self.device.type}, {next(k for k, v in DTYPES.items() if v == self.dtype)}"


def open_model(
    path: Path | str, *, step: int | None = None, device: str | None = None, dtype: str | None = None
) -> Opened:
    """The newest checkpoint of a run (or the one of `step`), or a Hugging Face folder, with weights on the device."""
    run, recipe, source = source_of(Path(path), step)
    where = choose_device(device)
    kind = choose_dtype(recipe, where, dtype)
    made = load(recipe, source, where, kind)
    manifest = (read_json(source / "manifest.json") or {}) if run is not None else {}
    note = passed_over(run, source) if step is None else None
    return Opened(made, recipe, source, manifest.get("step"), manifest.get("tokens"), run, where, kind, note)


def source_of(path: Path, step: int | None) -> tuple[Run | None, Recipe, Path]:
    from windlass.evaluate.foreign import is_hf_folder, recipe_of

    if is_hf_folder(path):
        return None, recipe_of(path), path
    run = open_run(path)
    return run, run.recipe(), checkpoint_of(run, step)


def checkpoint_of(run: Run, step: int | None) -> Path:
    """The folder of one step, or of the newest; nothing in a live run is touched."""
    if step is None:
        return weights_source(run.path)
    folder = run.checkpoint(step)
    if not folder.is_dir():
        from windlass.checkpoint.files import list_saved

        there = ", ".join(f"{saved.step:,}" for saved in list_saved(run)) or "none"
        raise CheckpointError(
            "evaluate.checkpoint-step", f"{run.path} has no checkpoint of step {step:,}", hint=f"it has {there}"
        )
    return folder


def choose_device(asked: str | None) -> torch.device:
    """What was asked, if this machine has it; else a GPU where there is one."""
    try:
        where = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError("evaluate.device", f"{asked!r} is no device", hint="write cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count() if where.type == "cuda" else None
    if count is not None and (where.index or 0) >= count:
        raise ConfigError(
            "evaluate.device-asked-torch-sees",
            f"device {asked} was asked for, and torch sees {count} GPUs here",
            hint="use --device cpu, or a node with one",
        )
    return where


def passed_over(run: Run | None, source: Path) -> str | None:
    """A sentence about newer checkpoints of the run that are not whole; None when the newest was taken."""
    from windlass.checkpoint.files import steps_on_disk

    saved = {path: step for step, path in steps_on_disk(run)} if run is not None else {}
    newer = [f"{step:,}" for path, step in saved.items() if source in saved and step > saved[source]]
    return f"step {saved[source]:,} is used: {', '.join(newer)} is damaged or not finished" if newer else None


def choose_dtype(recipe: Recipe, device: torch.device, asked: str | None) -> torch.dtype:
    """What was asked; else bf16 on a GPU where the run computed in it, and fp32 on a CPU."""
    if asked is not None and asked not in DTYPES:
        raise ConfigError("evaluate.dtype-unknown", f"dtype {asked!r} is unknown", hint=f"choose {' or '.join(DTYPES)}")
    if asked is not None:
        return DTYPES[asked]
    return torch.bfloat16 if device.type != "cpu" and recipe.train.precision != "fp32" else torch.float32


def load(recipe: Recipe, source: Path, device: torch.device, dtype: torch.dtype, *, verify: bool = True) -> Model:
    """Build without memory, give it memory once, on its device and in its number format, then read."""
    with torch.device("meta"):
        model = build(recipe.model, seq_len=recipe.data.seq_len)
    model = model.to(dtype).to_empty(device=device)
    load_model_weights(source, model, verify=verify)
    model.prepare(device)
    return model.eval().requires_grad_(False)


# -- store and tokenizer --------------------------------------------------------------------------------------------------


def find_store(opened: Opened, given: Path | str | None = None) -> Store:
    """The store named here, else the run's own; one whose tokens mean something else to this model is refused."""
    store = open_store(Path(given)) if given is not None else own_store(opened)
    _refuse_tokenizer(opened, store)
    return store


def own_store(opened: Opened) -> Store:
    return _reach(opened.run, opened.recipe)


def _reach(run: Run | None, recipe: Recipe) -> Store:
    named = recipe.data.store
    if named is None and run is None:
        raise DataError(
            "evaluate.model-folder-brings-held",
            "a model folder brings no held-out text",
            hint="name a token store of its tokenizer with --store",
        )
    if named is None:
        raise DataError(
            "evaluate.model-trained-synthetic-tokens",
            "this model was trained on synthetic tokens: it has no token store",
            hint="name a store with --store",
        )
    inside = run.path / "data" if run is not None else None
    for candidate in (Path(named), inside):
        if candidate is not None and candidate.is_dir():
            return open_store(candidate)
    raise DataError(
        "evaluate.run-s-token-store",
        f"the run's token store {named} cannot be reached from here",
        hint="name its copy with --store",
    )


def _refuse_tokenizer(opened: Opened, store: Store) -> None:
    trained = trained_tokenizer(opened)
    if trained and store.tokenizer_hash and trained != store.tokenizer_hash:
        raise DataError(
            "evaluate.tokenized-another-tokenizer-model",
            f"{store.path} was tokenized with another tokenizer ({store.tokenizer_hash[:12]}) than the model's ({trained[:12]})",
            hint="the same numbers mean other text: tokenize the held-out text with the model's tokenizer",
        )
    largest = store.max_token if store.max_token is not None else (store.vocab_size or 0) - 1
    if largest >= opened.model.vocab:
        raise DataError(
            "evaluate.holds-token-but-model",
            f"{store.path} holds token {largest:,}, but the model knows {opened.model.vocab:,}",
            hint="tokenize the held-out text with the model's tokenizer",
        )


def trained_tokenizer(opened: Opened) -> str | None:
    """Hash of the tokenizer that the model was trained with, where that can be known."""
    recorded = (opened.run.manifest().get("data") or {}) if opened.run is not None else {}
    if isinstance(recorded, dict) and (found := recorded.get("tokenizer_hash")):
        return str(found)
    try:
        return own_store(opened).tokenizer_hash
    except DataError:
        return None


def find_tokenizer(opened: Opened, given: Path | str | None = None) -> Tokenizer:
    """The tokenizer named here, else the recipe's, else the store's, else the one beside the weights."""
    return tokenizer_of(opened.run, opened.recipe, opened.source, given)


def tokenizer_of(run: Run | None, recipe: Recipe, source: Path, given: Path | str | None = None) -> Tokenizer:
    """The same, without a model in memory."""
    named: Any = given or recipe.data.tokenizer
    if named is None and run is None:
        named = source
    made = load_tokenizer(named) if named is not None else _of_store(_reach(run, recipe))
    if recipe.model.vocab is not None and made.vocab_size > recipe.model.vocab:
        raise DataError(
            "evaluate.tokenizer-tokens-model",
            f"the tokenizer {made.path} has {made.vocab_size:,} tokens, the model {recipe.model.vocab:,}",
            hint="name the tokenizer that the model was trained with, with --tokenizer",
        )
    return made


def _of_store(store: Store) -> Tokenizer:
    if store.tokenizer_file is None:
        raise DataError(
            "evaluate.does-say-tokenizer", f"{store.path} does not say its tokenizer", hint="name it with --tokenizer"
        )
    return load_tokenizer(store.tokenizer_file, eos=store.eos)


def sample_text(
    recipe: Recipe, words: Tokenizer | None, text: str | None, rows: int, length: int
) -> tuple[torch.Tensor, str]:
    """(rows, length) tokens of real text and what they are: the text given, else Python's own library."""
    if words is None:
        vocab = recipe.model.vocab or 256
        return torch.randint(
            0, vocab, (rows, length), generator=torch.Generator().manual_seed(0)
        ), "random tokens (no tokenizer)"
    if text is None:
        import argparse

        text, what = Path(argparse.__file__).read_text(encoding="utf-8"), "text of Python's library"
    else:
        what = "the given text"
    ids = words.encode(text[: 40 * rows * length])
    if not ids:
        raise DataError(
            "evaluate.text-compare-tokens", "the text to compare on has no tokens", hint="give a longer one with --text"
        )
    whole = (ids * (rows * length // len(ids) + 1))[: rows * length]
    return torch.tensor(whole).view(rows, length), what
