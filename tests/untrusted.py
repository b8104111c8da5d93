"""Checkpoints that try to run code when they are read; the code makes the folder `canary`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from windlass.checkpoint import files
from windlass.files import write_json

HIDING_PLACES = ("metadata", "inside metadata", "object", "tensor")


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def plant_code(folder: Path, place: str, canary: Path) -> None:
    """Change a checkpoint so that a trusting reader makes `canary`; the manifest agrees with the changed files."""
    metadata_file, hidden = folder / ".metadata", folder / "__7_0.distcp"
    metadata = pickle.loads(metadata_file.read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    if place == "metadata":
        metadata = Canary(canary)
    elif place == "inside metadata":
        metadata.planner_data = {**metadata.planner_data, "x": Canary(canary)}
    else:
        torch.save(Canary(canary), hidden)
        index = next(index for index in metadata.storage_data if index.fqn == name)
        if place == "object":
            del metadata.storage_data[index]
            metadata.state_dict_metadata[name], index = BytesStorageMetadata(), MetadataIndex(name)
        metadata.storage_data[index] = _StorageInfo(hidden.name, 0, hidden.stat().st_size)
    metadata_file.write_bytes(pickle.dumps(metadata))
    manifest = files.read_manifest(folder)
    names = set(manifest["files"]) | ({hidden.name} if hidden.exists() else set())
    write_json(folder / files.MANIFEST, files.sealed({**manifest, "files": files.describe(folder, sorted(names))}))
