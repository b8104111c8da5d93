"""Export of a checkpoint as a Hugging Face folder: streamed tensor by tensor, verified by logits, and only then named.

A family that transformers does not have (RetNet) gets the same files with our own parameter names; `find_source` and
every command read such a folder.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint import files
from windlass.checkpoint.load import read_extra
from windlass.checkpoint.names import TRANSFORMS
from windlass.config import ModelConfig
from windlass.convert.config_json import config_json, format_of, positions_of
from windlass.convert.source import DTYPES, ModelSource, ProgressCallback, dtype_of_name, find_source, find_tokenizer
from windlass.convert.tokenizer_files import special_ids, write_tokenizer
from windlass.convert.verify import LogitComparison, compare_logits
from windlass.convert.weights import StoredWeights, exported_names, open_weights
from windlass.data.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, DataError, RunError
from windlass.files import read_json, write_atomic, write_json

SHARD_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Exported:
    folder: Path
    dtype: str
    files: int
    bytes: int
    tensors: int
    tokenizer: str  # description of what was written for it
    step: int | None  # of the checkpoint; None for a Hugging Face folder
    note: str | None  # newer checkpoints that could not be used
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
    if target.exists():
        raise RunError("convert.target-exists", f"{target} exists", hint="choose another folder with --to")
    source = find_source(path, step)
    refuse_inexpressible(source.recipe.model)
    if shard_bytes < 1:
        raise ConfigError(
            "convert.shard-too-small",
            f"a file of at most {shard_bytes} bytes holds nothing",
            hint='write for example --shard "4 GB"',
        )
    if (source.folder / files.MANIFEST).is_file():  # a flipped bit must not be published: compare every checksum
        files.complete(source.folder, verify=True)
    dtype = export_dtype(source, dtype)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        weights = open_weights(source.folder)
        sizes, tensors = write_weights(source.recipe.model, weights, temporary, dtype, shard_bytes, progress)
        loaded = _write_tokenizer_and_config(source, temporary, dtype, tokenizer)
        title = f"# {source.recipe.name}\n\nTrained with windlass. No run folder was at hand for a fuller card.\n"
        write_atomic(temporary / "README.md", card or title)
        check = compare_logits(source.recipe, source.folder, temporary, DTYPES[dtype], loaded, text) if verify else None
        if check is not None and not check.ok:
            raise CheckpointError(
                "convert.export-logits-differ",
                f"the exported model does not compute what ours does: largest logit difference {check.difference:.3g}, "
                f"same top-1 token at {check.agreement:.2%} of {check.positions:,} positions",
                hint="nothing was written; this is a bug in windlass: report the recipe's [model] table",
            )
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    described = f"{loaded.path.name} ({loaded.vocab_size:,} tokens)" if loaded else "none: the run names no tokenizer"
    saved_step = (read_json(source.folder / files.MANIFEST) or {}).get("step")
    total_bytes = sum(sizes.values())
    return Exported(target, dtype, len(sizes), total_bytes, tensors, described, saved_step, source.note, check)


def refuse_inexpressible(model: ModelConfig) -> None:
    for key, value in format_of(model).fixed.items():
        if getattr(model, key) != value:
            raise ConfigError(
                "convert.not-expressible",
                f"model.{key} = {getattr(model, key)!r} cannot be written as a Hugging Face {model.family}, "
                f"which always has {value!r}",
                hint="evaluate and generate work on the run itself",
            )


def export_dtype(source: ModelSource, named: str | None) -> str:
    """The named format; an imported model as it came; else bf16 unless the run computed in fp32."""
    if named is not None:
        dtype_of_name(named)
        return named
    extra = read_extra(source.folder)["extra"] if (source.folder / files.EXTRA).is_file() else {}
    default = "fp32" if source.recipe.train.precision == "fp32" else "bf16"
    return extra["dtype"] if extra.get("dtype") in DTYPES else default


def write_weights(
    model: ModelConfig, weights: StoredWeights, folder: Path, dtype: str, shard_bytes: int, progress: ProgressCallback
) -> tuple[dict[str, int], int]:
    """Write shards of at most `shard_bytes`, one in memory at a time: file -> bytes, and the number of tensors."""
    from safetensors.torch import save_file

    names, format, torch_dtype = exported_names(model, weights), format_of(model), DTYPES[dtype]
    shards: list[list[str]] = [[]]
    shard_size = 0
    for hf_name, own_name in names.items():
        tensor_bytes = math.prod(weights.shape(own_name)) * torch_dtype.itemsize
        if shards[-1] and shard_size + tensor_bytes > shard_bytes:
            shards.append([])
            shard_size = 0
        shards[-1].append(hf_name)
        shard_size += tensor_bytes
    sizes: dict[str, int] = {}
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for hf_name in shard:
            tensor = weights[names[hf_name]]
            if kind := format.transform(hf_name):
                tensor = TRANSFORMS[kind][1](tensor, model.vocab or len(tensor))
            tensors[hf_name] = tensor.to(torch_dtype).contiguous()
            file_of[hf_name] = name
            progress(len(file_of), len(names))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes the file readable for its owner only
        sizes[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)
    return sizes, len(file_of)


def _write_tokenizer_and_config(source: ModelSource, folder: Path, dtype: str, named: Path | None) -> Tokenizer | None:
    """Write the tokenizer, config.json and generation_config.json; None when the model has no tokenizer."""
    try:
        tokenizer = find_tokenizer(source, named)
    except DataError:
        if named is not None:
            raise
        tokenizer = None
    ids = {}
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder, max_length=source.recipe.data.seq_len)
        ids = special_ids(tokenizer)
    positions = positions_of(source.recipe, source.folder)
    config = config_json(source.recipe, str(DTYPES[dtype]).removeprefix("torch."), positions)
    write_json(folder / "config.json", {**config, **ids})
    write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.8, "top_p": 0.95, **ids})
    return tokenizer
