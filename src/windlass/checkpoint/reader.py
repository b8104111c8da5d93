"""Reads checkpoints of torch.distributed.checkpoint without running code that is in them.

Three parts of such a checkpoint are pickles. `.metadata` is read here by an unpickler that knows only the classes that
describe tensors. Tensors are read by `torch.load(weights_only=True)`, as FileSystemReader does. Other values (numbers,
lists), which torch's planner would unpickle without a limit, are read in the same way.
"""

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType

from windlass.checkpoint import files
from windlass.errors import CheckpointError

# Every class in the .metadata of windlass 0.1 and later, and of plain DCP checkpoints; dtypes and paths come on top.
SAFE_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
UNSAFE_HINT = (
    "loading it could run a program: do not use this checkpoint; ask its author for an export (*.safetensors), "
    "or use an earlier checkpoint"
)


def pickled_object(folder: str | os.PathLike[str], name: str) -> CheckpointError:
    message = f"{folder} has a pickled Python object instead of the tensor {name}"
    return CheckpointError("checkpoint.unsafe", message, hint=UNSAFE_HINT)


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in SAFE_CLASSES or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        # Where the checkpoint was written. Python 3.13 names another module, and the text is enough.
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":
            return os.path.join
        raise CheckpointError("checkpoint.unsafe", f"contains {module}.{name}, which no description of tensors needs")


class CheckpointReader(FileSystemReader):
    """The only reader of checkpoints. It reads `.metadata` once, and tensors with several threads: one alone does not
    saturate a fast disk, and the tensors are independent."""

    _metadata: Metadata | None = None

    def load_metadata(self) -> None:
        if self._metadata is not None:
            return
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = MetadataUnpickler(file).load()
        except CheckpointError as error:
            raise CheckpointError(error.code, f"{path} {error.message}", hint=UNSAFE_HINT) from None
        except OSError:
            raise
        except Exception as error:  # a damaged pickle ends in almost any exception
            raise CheckpointError(
                "checkpoint.damaged", f"{path} cannot be read: {error}", hint=files.EARLIER_HINT
            ) from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                "checkpoint.damaged", f"{path} does not describe a checkpoint", hint=files.EARLIER_HINT
            )
        self._metadata = metadata

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        self.load_metadata()
        assert self._metadata is not None
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            is_tensor = isinstance(planner.state_dict.get(item.dest_index.fqn), torch.Tensor)
            if is_tensor and item.type == LoadItemType.BYTE_IO:
                raise pickled_object(self.path, item.dest_index.fqn)
        stored = {id(item): self.storage_data[item.storage_index] for item in plan.items}
        items = sorted(plan.items, key=lambda item: (stored[id(item)].relative_path, stored[id(item)].offset))
        read, threads = super().read_data, files.worker_threads()
        # Every thread takes each n-th item, so that the large ones are spread evenly.
        shares = [items[first::threads] for first in range(min(threads, len(items)))]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda share: read(replace(plan, items=share), planner), shares))
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class ValuePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read a value that is not a tensor; what weights_only=True accepts is written again for torch's planner."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
