"""How many bytes live at once? A mode that sees every operator and adds up the storages that it returns."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from windlass.train.optimizers.base import local


@dataclass(slots=True)
class _Held:
    size: int
    label: str


class Tracker(TorchDispatchMode):
    """Adds up the storages that live, by label, and remembers the highest sum. A storage is counted once, when an operator first
    returns it, until it is collected; FSDP frees and fills by resizing, which is followed too."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, int] = {}
        self.total = self.peak = 0
        self.phase = "forward"
        self.phases: dict[str, tuple[int, dict[str, int]]] = {}
        """Highest sum of each phase, and its labels."""
        self._held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()

    def enter_phase(self, phase: str) -> None:
        self.phase = phase

    def watch(self, label: str, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._take(tensor, label)

    def relabel(self, label: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            held = self._held.get(local(tensor).untyped_storage())
            if held is not None:
                self._add(held.label, -held.size)
                held.label = label
                self._add(label, held.size)

    def _take(self, tensor: Tensor, label: str) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage in self._held:
            return
        held = _Held(storage.nbytes(), label)
        self._held[storage] = held
        self._add(label, held.size)
        weakref.finalize(storage, self._drop, held)

    def _drop(self, held: _Held) -> None:
        self._add(held.label, -held.size)
        held.size = 0

    def _add(self, label: str, size: int) -> None:
        self.now[label] = self.now.get(label, 0) + size
        self.total += size
        self.peak = max(self.peak, self.total)
        if self.total > self.phases.get(self.phase, (0,))[0]:
            self.phases[self.phase] = self.total, dict(self.now)

    def _resized(self, storage: Any, size: int) -> None:
        held = self._held.get(storage)
        if held is not None:
            self._add(held.label, size - held.size)
            held.size = size

    def __enter__(self) -> Tracker:
        self._mode = active_fake_mode()
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            out = original(storage, size)
            self._resized(storage, size)
            return out

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._patch.stop()
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # DTensor first turns into operations on its local parts
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:  # not what DTensor tries out to find its placements
            label = "activations" if self.phase == "forward" else "gradients on their way"
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor):
                    self._take(tensor, label)
        return out
