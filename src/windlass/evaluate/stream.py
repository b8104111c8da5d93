"""How are weights moved that do not fit into memory? One tensor at a time, from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from windlass.checkpoint.files import MANIFEST
from windlass.checkpoint.load import safetensors_files
from windlass.errors import CheckpointError


class Weights(Mapping[str, Tensor]):
    """Names known at once, tensors read when asked for and then forgotten."""

    def dtype(self, name: str) -> torch.dtype:
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError


class Checkpoint(Weights):
    """The model's part of a checkpoint of any layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self.entries = {
            n.removeprefix("model."): e for n, e in found.items() if n.startswith("model.") and hasattr(e, "size")
        }
        if not self.entries:
            raise CheckpointError(
                "evaluate.holds-model-weights",
                f"{folder} holds no model weights",
                hint="was it written by another program?",
            )

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        state = {"model": {name: torch.empty(entry.size, dtype=entry.properties.dtype)}}
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        return state["model"][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].properties.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name].size)


class Safetensors(Weights):
    """A Hugging Face folder's *.safetensors, mapped and not read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.files = {}
        for part in safetensors_files(folder):
            try:
                opened = safe_open(part, framework="pt")
            except Exception as error:
                raise CheckpointError(
                    "evaluate.cannot-read",
                    f"{part} cannot be read: {error}",
                    hint="it was cut or changed: copy it again",
                ) from None
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def dtype(self, name: str) -> torch.dtype:
        kind = self.files[name].get_slice(name).get_dtype()
        if kind not in _DTYPES:
            raise CheckpointError(
                "evaluate.weight-stored-format-train",
                f"the weight {name} is stored as {kind}, which is not a format to train from",
                hint="take the model's folder of bf16 or fp16 weights",
            )
        return _DTYPES[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())


_DTYPES: dict[str, Any] = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_weights(folder: Path) -> Weights:
    return (
        Checkpoint(folder)
        if (folder / MANIFEST).is_file() and (folder / ".metadata").is_file()
        else Safetensors(folder)
    )
