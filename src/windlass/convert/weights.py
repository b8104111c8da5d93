"""Weights of a checkpoint or a Hugging Face folder, read one tensor at a time: the model need not fit in memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from windlass.checkpoint.files import MANIFEST
from windlass.checkpoint.load import (
    ADAPTER,
    DAMAGED_HINT,
    PICKLED,
    current_name,
    read_adapter,
    read_pickled,
    read_tensors,
    weight_files,
)
from windlass.checkpoint.reader import CheckpointReader, pickled_object
from windlass.config import Recipe
from windlass.convert.config_json import format_of
from windlass.errors import CheckpointError
from windlass.models.hf import build_hf
from windlass.models.presets.hf import read_config_json
from windlass.models.task_head import tuned_model

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # str: a safetensors format that we do not train from
    read: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class StoredWeights(Mapping[str, Tensor]):
    """Names, shapes and formats are known at once; a tensor is read each time it is asked for."""

    tensors: dict[str, StoredTensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = self.tensors[name].dtype
        if isinstance(dtype, str):
            raise CheckpointError(
                "convert.weight-format",
                f"the weight {name} is stored as {dtype}, which cannot be trained from",
                hint="use the bf16 or fp16 checkpoint instead",
            )
        return dtype


def open_weights(folder: Path) -> StoredWeights:
    """Weights of a checkpoint of any layout, or of the files of a Hugging Face folder."""
    tensors = {}
    if (folder / MANIFEST).is_file() and (folder / ".metadata").is_file():
        reader = CheckpointReader(folder)

        def read(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
            state = {"model": {name: torch.empty(size, dtype=dtype)}}
            read_tensors(reader, state)
            return state["model"][name]

        for full_name, entry in reader.read_metadata().state_dict_metadata.items():
            if not full_name.startswith("model."):
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise pickled_object(folder, full_name)
            name, dtype = full_name.removeprefix("model."), entry.properties.dtype
            tensors[name] = StoredTensor(tuple(entry.size), dtype, partial(read, name, entry.size, dtype))
        shapes = {name: torch.Size(tensor.shape) for name, tensor in tensors.items()}

        def merged(layer: str, weight: StoredTensor) -> Tensor:
            return (weight.read().float() + read_adapter(folder, layer, shapes)).to(weight.dtype)

        for layer in [name.removesuffix(".adapter.a") for name in shapes if name.endswith(".adapter.a")]:
            weight = tensors[f"{layer}.weight"]
            tensors[f"{layer}.weight"] = replace(weight, read=partial(merged, layer, weight))
        tensors = {name: tensor for name, tensor in tensors.items() if ADAPTER not in name}
        if not tensors:
            raise CheckpointError(
                "convert.no-model-weights",
                f"{folder} holds no model weights",
                hint="use a folder that transformers or windlass wrote",
            )
        return StoredWeights(tensors)
    for part in weight_files(folder):
        if part.suffix == PICKLED:
            for name, tensor in read_pickled(part).items():
                tensors[current_name(name)] = StoredTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)
            continue
        try:
            file: Any = safe_open(part, framework="pt")
        except Exception as error:
            raise CheckpointError(
                "convert.weights-unreadable",
                f"{part} cannot be read: {error}",
                hint=DAMAGED_HINT,
            ) from None
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            slice_ = file.get_slice(name)
            format = SAFETENSORS_DTYPES.get(slice_.get_dtype(), slice_.get_dtype())
            read_slice = partial(file.get_tensor, name)
            tensors[current_name(name)] = StoredTensor(tuple(slice_.get_shape()), format, read_slice)
    return StoredWeights(tensors)


# Names in the checkpoint of one tensor of a folder (several: `HFFormat.joined`), and, where the checkpoint has a stack
# of experts, which of them.
Origin = tuple[list[str], int | None]


def exported_names(recipe: Recipe, weights: StoredWeights) -> dict[str, Origin]:
    """Name in the exported folder -> where it comes from; in the folder's order."""
    model, format = recipe.model, format_of(recipe.model)
    twins: Mapping[str, str] = {}
    older: Mapping[str, str] = {}
    if format.wraps_transformers:
        with torch.device("meta"):  # only transformers knows which of its names stand for one weight
            twins = (tuned_model(recipe) or build_hf(model, seq_len=1)).twins
        model_type = read_config_json(model).get("model_type") or ""
        older = next((table for start, table in format.older_names.items() if model_type.startswith(start)), {})
    # As save_pretrained does: a weight with two names is written under its first.
    single = [name for name in weights if name not in twins and format.prefix + name not in twins]
    exported: dict[str, Origin] = {}
    for hf_name, names in format.folder_tensors(single).items():
        if "{expert}" in hf_name:
            count = weights.shape(names[0])[0]
            exported |= {hf_name.replace("{expert}", str(expert)): (names, expert) for expert in range(count)}
        else:
            exported[older.get(hf_name, hf_name)] = (names, None)
    return exported or {name: ([name], None) for name in weights}  # already under Hugging Face's names
