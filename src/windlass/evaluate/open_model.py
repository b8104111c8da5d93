"""A model with its weights on a device, ready for evaluation, and the held-out token store that fits it."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.config import Recipe
from windlass.convert.source import DTYPES, ModelSource, dtype_of_name, find_source, load_model, own_store
from windlass.data.store import Store, open_store
from windlass.errors import ConfigError, DataError
from windlass.files import read_json


@dataclass(frozen=True)
class OpenModel:
    model: Any  # windlass.models: `forward`, `body`, `head`, `embed`, `vocab`, `width`
    source: ModelSource
    step: int | None
    tokens: int | None  # trained on; None for a Hugging Face folder
    device: torch.device
    dtype: torch.dtype

    @property
    def recipe(self) -> Recipe:
        return self.source.recipe

    @property
    def max_length(self) -> int:
        return self.source.recipe.data.seq_len

    @property
    def device_text(self) -> str:
        return f"{self.device.type}, {next(name for name, dtype in DTYPES.items() if dtype == self.dtype)}"

    @property
    def batch_tokens(self) -> int:
        """Tokens of one forward pass: enough to fill the device, and little memory."""
        return 32_768 if self.device.type != "cpu" else 2048


def open_model(
    path: Path | str,
    *,
    step: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    weights: bool = True,
) -> OpenModel:
    """The newest checkpoint of a run (or that of `step`), or a Hugging Face folder.

    Without `device`: a GPU where there is one. Without `dtype`: bf16 on a GPU unless the run computed in fp32, and fp32
    on a CPU. Without `weights` the model is None: another engine loads it.
    """
    source = find_source(path, step)
    if (tune := source.recipe.tune) is not None and not tune.predicts_text:
        raise ConfigError(
            "evaluate.no-next-token",
            f"{source.folder} was tuned for task {tune.task!r}: it predicts no next token",
            hint="see eval.jsonl for its scores, or use a model that was tuned for chat or not at all",
        )
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(
            "evaluate.device-unknown", f"{device!r} is not a device", hint="use cpu, cuda or cuda:1"
        ) from None
    count = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= count:
        raise ConfigError(
            "evaluate.device-missing",
            f"device {device} is not available: torch sees {count} GPUs",
            hint="use --device cpu, or a node with a GPU",
        )
    default = "bf16" if place.type != "cpu" and source.recipe.train.precision != "fp32" else "fp32"
    torch_dtype = dtype_of_name(dtype or default)
    model = load_model(source.recipe, source.folder, place, torch_dtype) if weights else None
    manifest = (read_json(source.folder / "manifest.json") or {}) if source.run is not None else {}
    return OpenModel(model, source, manifest.get("step"), manifest.get("tokens"), place, torch_dtype)


def find_store(opened: OpenModel, named: Path | str | None = None) -> Store:
    """The named token store, else the run's own; a store of another tokenizer is refused."""
    store = open_store(Path(named)) if named is not None else own_store(opened.source)
    run, stored = opened.source.run, store.tokenizer_hash
    recorded = run.manifest().get("data") if run is not None else None
    trained = recorded.get("tokenizer_hash") if isinstance(recorded, dict) else None
    if not trained:  # not recorded
        with contextlib.suppress(DataError):
            trained = own_store(opened.source).tokenizer_hash
    if trained and stored and trained != stored:
        raise DataError(
            "evaluate.other-tokenizer",
            f"{store.path} was tokenized with another tokenizer ({stored[:12]}) than the model's ({trained[:12]})",
            hint="the same ids mean other text: tokenize the held-out text with the model's tokenizer",
        )
    largest = store.max_token if store.max_token is not None else (store.vocab_size or 0) - 1
    if largest >= opened.model.vocab:
        raise DataError(
            "evaluate.token-out-of-vocabulary",
            f"{store.path} holds token {largest:,}, but the model's vocabulary has {opened.model.vocab:,}",
            hint="tokenize the held-out text with the model's tokenizer",
        )
    return store
