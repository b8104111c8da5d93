"""Sum of live tensor storages by label, followed through every operator."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from windlass.blocks.initial_values import local_tensor as local


@dataclass(slots=True)
class _Storage:
    size: int
    label: str


class Tracker(TorchDispatchMode):
    """Adds up live storages by label and keeps the highest sum. A storage counts from the operator that first returns it until it is
    collected; resizing, by which FSDP frees and refills storages, is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, int] = {}
        self.total = self.peak = 0
        self.phase = "forward"
        self.phases: dict[str, tuple[int, dict[str, int]]] = {}
        """Highest sum of each phase, and its labels."""
        self._storages: weakref.WeakKeyDictionary[Any, _Storage] = weakref.WeakKeyDictionary()
        self._is_trial = False
        """DTensor tries an operator on tensors of the undivided shape, to learn the shape of its result."""

    def enter_phase(self, phase: str) -> None:
        self.phase = phase

    def watch(self, label: str, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._take(tensor, label)

    def relabel(self, label: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            record = self._storages.get(local(tensor).untyped_storage())
            if record is not None:
                self._add(record.label, -record.size)
                record.label = label
                self._add(label, record.size)

    def _take(self, tensor: Tensor, label: str) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage in self._storages:
            return
        record = _Storage(storage.nbytes(), label)
        self._storages[storage] = record
        self._add(label, record.size)
        weakref.finalize(storage, self._drop, record)

    def _drop(self, record: _Storage) -> None:
        self._add(record.label, -record.size)
        record.size = 0

    def _add(self, label: str, size: int) -> None:
        self.now[label] = self.now.get(label, 0) + size
        self.total += size
        self.peak = max(self.peak, self.total)
        if self.total > self.phases.get(self.phase, (0,))[0]:
            self.phases[self.phase] = self.total, dict(self.now)

    def _resized(self, storage: Any, size: int) -> None:
        record = self._storages.get(storage)
        if record is not None:
            self._add(record.label, size - record.size)
            record.size = size

    def __enter__(self) -> Tracker:
        original, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: Any, size: int) -> Any:
            out = original(storage, size)
            self._resized(storage, size)
            return out

        def try_out(*args: Any) -> Any:
            self._is_trial = True
            try:
                return propagate(*args)
            finally:
                self._is_trial = False

        self._patches = (
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", try_out),
        )
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        for patch in self._patches:
            patch.stop()
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # DTensor first turns into operations on its local parts
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if not self._is_trial:
            label = "activations" if self.phase == "forward" else "gradients on their way"
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor):
                    self._take(tensor, label)
        return out
