"""Export of a checkpoint as a Hugging Face folder: streamed tensor by tensor, verified by logits, and only then renamed
to its target.

A family that transformers does not have (RetNet) gets the same files with our own parameter names; `find_source` and
every command read such a folder.
"""

import contextlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from windlass.checkpoint import files
from windlass.checkpoint.load import read_extra
from windlass.checkpoint.names import TRANSFORMS, join_parts
from windlass.config import ModelConfig, Recipe
from windlass.convert.config_json import config_json, format_of, positions_of
from windlass.convert.source import DTYPES, ModelSource, ProgressCallback, dtype_of_name, find_source, find_tokenizer
from windlass.convert.target import check_space, new_folder, refuse_existing
from windlass.convert.tokenizer_files import write_tokenizer
from windlass.convert.verify import LogitComparison, compare_logits
from windlass.convert.weights import Origin, StoredWeights, exported_names, open_weights
from windlass.data.chat import load_chat_template
from windlass.data.example_batches import tokenizer_of_transformers
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.files import read_json, write_atomic, write_json
from windlass.models.task_head import tuned_model
from windlass.registry import PRESETS
from windlass.units import print_share

SHARD_BYTES = 4 * 10**9
# The loss that transformers takes where an exported model is trained further.
PROBLEM_TYPES = {
    "classify": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regress": "regression",
}


@dataclass(frozen=True)
class Exported:
    folder: Path
    dtype: str
    files: int
    bytes: int
    tensors: int
    tokenizer: str  # description of what was written for it
    step: int | None  # of the checkpoint; None for a Hugging Face folder
    note: str | None  # why it is not the newest checkpoint
    check: LogitComparison | None  # None: not verified


def export(
    path: Path | str,
    to: Path | str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    card: str | None = None,
    verify: bool = True,
    text: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback = lambda done, total: None,
) -> Exported:
    """Write the folder under a temporary name, verify it, then rename it. An existing folder is never overwritten."""
    target = Path(to)
    refuse_existing(target, "--to")
    source = find_source(path, step)
    model = source.recipe.model
    for key, value, standard in PRESETS.load(model.family).inexpressible(model):
        raise ConfigError(
            "convert.not-expressible",
            f"model.{key} = {value!r} cannot be written as a Hugging Face {model.family}, which always has {standard!r}",
            hint="use `windlass eval` and `windlass generate` on the run itself",
        )
    if shard_bytes < 1:
        raise ConfigError(
            "convert.shard-too-small",
            f"a file of at most {shard_bytes} bytes is too small for any weight",
            hint='write for example --shard "4 GB"',
        )
    if (source.folder / files.MANIFEST).is_file():  # a flipped bit must not be published: compare every checksum
        files.complete(source.folder, verify=True)
    dtype = export_dtype(source, dtype)
    with new_folder(target, "--to") as temporary:
        sizes, tensors = write_weights(
            source.recipe, open_weights(source.folder), temporary, dtype, shard_bytes, progress
        )
        ids: dict[str, int] = {}
        tune = source.recipe.tune
        if tokenizer is None and tune is not None and tune.reads_examples:  # as in training, by transformers
            theirs = tokenizer_of_transformers(source.recipe)
            theirs.save_pretrained(temporary)
            loaded: Tokenizer | None = load_tokenizer(temporary)
            ids = {"pad_token_id": theirs.pad_token_id}
        else:
            try:
                loaded = find_tokenizer(source, tokenizer)
            except DataError:
                if tokenizer is not None:
                    raise
                loaded = None
            if loaded is not None:
                ids = write_tokenizer(loaded, temporary, max_length=source.recipe.data.seq_len)
        positions = positions_of(source.recipe, source.folder)
        config = config_json(source.recipe, str(DTYPES[dtype]).removeprefix("torch."), positions)
        head_keys = task_keys(source.recipe)
        write_json(temporary / "config.json", {**config, **ids, **head_keys})
        if not head_keys:
            sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, **ids}
            if loaded is not None and tune is not None and tune.predicts_text:
                with contextlib.suppress(DataError):  # a tokenizer without a template
                    # An answer ends with the template's token; programs that read this file stop at either.
                    ends = (load_chat_template(loaded).end_token, loaded.eos)
                    sampling["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
            write_json(temporary / "generation_config.json", sampling)
        title = (
            f"# {source.recipe.name}\n\nTrained with windlass. No run folder was available, so this card is short.\n"
        )
        write_atomic(temporary / "README.md", card or title)
        check = compare_logits(source.recipe, source.folder, temporary, DTYPES[dtype], loaded, text) if verify else None
        if check is not None and not check.ok:
            raise CheckpointError(
                "convert.export-logits-differ",
                f"the exported model does not compute what ours does: largest logit difference {check.difference:.3g}, "
                f"same top-1 token at {print_share(check.agreement, digits=2)} of {check.positions:,} positions",
                hint="this is a bug in windlass: please report the recipe's [model] table; nothing was written",
            )
    described = f"{loaded.path.name} ({loaded.vocab_size:,} tokens)" if loaded else "none: the run names no tokenizer"
    saved_step = (read_json(source.folder / files.MANIFEST) or {}).get("step")
    return Exported(target, dtype, len(sizes), sum(sizes.values()), tensors, described, saved_step, source.note, check)


def export_dtype(source: ModelSource, named: str | None) -> str:
    """The requested dtype; for an imported model its own; otherwise bf16, or fp32 if the run computed in fp32."""
    if named is not None:
        dtype_of_name(named)  # refuses an unknown one
        return named
    extra = read_extra(source.folder)["extra"] if (source.folder / files.EXTRA).is_file() else {}
    default = "fp32" if source.recipe.train.precision == "fp32" else "bf16"
    return extra["dtype"] if extra.get("dtype") in DTYPES else default


def write_weights(
    recipe: Recipe, weights: StoredWeights, folder: Path, dtype: str, shard_bytes: int, progress: ProgressCallback
) -> tuple[dict[str, int], int]:
    """Write shards of at most `shard_bytes`, one in memory at a time: file -> bytes, and the number of tensors."""
    model, format, torch_dtype = recipe.model, format_of(recipe.model), DTYPES[dtype]
    names = exported_names(recipe, weights)
    shards: list[dict[str, Origin]] = [{}]
    total_size = shard_size = 0
    for hf_name, (own_names, expert) in names.items():
        shapes = [weights.shape(name) if expert is None else weights.shape(name)[1:] for name in own_names]
        tensor_bytes = sum(math.prod(shape) for shape in shapes) * torch_dtype.itemsize
        if shards[-1] and shard_size + tensor_bytes > shard_bytes:
            shards.append({})
            shard_size = 0
        shards[-1][hf_name] = (own_names, expert)
        shard_size += tensor_bytes
        total_size += tensor_bytes
    check_space(folder, total_size)
    sizes: dict[str, int] = {}
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        if number == len(shards):
            tensors |= constant_tensors(model, torch_dtype)
            file_of |= dict.fromkeys(tensors, name)
        stacked = ("", torch.empty(0))  # read once for all its experts
        for hf_name, (own_names, expert) in shard.items():
            parts = []
            for own_name in own_names:
                stacked = stacked if expert is not None and stacked[0] == own_name else (own_name, weights[own_name])
                tensor = stacked[1] if expert is None else stacked[1][expert]
                kind = format.transform(own_name)
                parts.append(TRANSFORMS[kind][1](tensor, model.vocab or len(tensor)) if kind else tensor)
            tensor = join_parts(parts, format.joined)
            tensors[hf_name] = tensor.to(torch_dtype).clone(memory_format=torch.contiguous_format)
            file_of[hf_name] = name
            progress(len(file_of), len(names))
        try:
            save_file(tensors, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            if (match := re.search(r"os error (\d+)", str(error))) is None:
                raise
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(folder / name)) from None
        # safetensors makes the file readable for its owner only; the folder's mode follows the umask.
        (folder / name).chmod(folder.stat().st_mode & 0o666)
        sizes[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(shards) > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of},
        )
    return sizes, len(file_of)


def task_keys(recipe: Recipe) -> dict[str, Any]:
    """Keys of config.json for a model with a task's head: the class that transformers loads, the names of its
    outputs."""
    with torch.device("meta"):
        model = tuned_model(recipe)
    if model is None or recipe.tune is None:
        return {}
    keys: dict[str, Any] = {"architectures": [type(model.net).__name__]}
    if recipe.tune.reads_examples:
        labels = dict(enumerate(recipe.tune.labels or ["LABEL_0"]))  # as transformers names the output of a number
        keys |= {"id2label": labels, "label2id": {name: number for number, name in labels.items()}}
    if (problem := PROBLEM_TYPES.get(recipe.tune.task)) is not None:
        keys["problem_type"] = problem
    return keys


def constant_tensors(model: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of the folder that hold a number of the family and not a weight."""
    return {
        name.replace("{layer}", str(layer)): torch.tensor(value, dtype=dtype)
        for name, value in format_of(model).constants.items()
        for layer in range(model.layers or 0)
    }
