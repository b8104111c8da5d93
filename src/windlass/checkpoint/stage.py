"""A copy of the training state in host memory, so that training continues while the state is written.

The copy is the only time that training waits. The host memory stays allocated between saves; it is touched once, and on
a GPU page-locked, in the background: both take longer than the copy itself.
"""

import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from windlass.blocks.initial_values import local_tensor

_ALIGN = 64
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Stager:
    """Copies a nested state of tensors to host memory it owns; stage again only when the last copy is not needed."""

    def __init__(self) -> None:
        self._slab: torch.Tensor | None = None
        self._pinned = False
        self._warming: threading.Thread | None = None

    def prepare(self, state: Any) -> None:
        """Allocate and touch the memory in the background, so that the first save waits no longer than the others."""
        size = state_bytes(state)
        if self._slab is not None and self._slab.numel() >= size:
            return
        self.close()
        self._slab = slab = torch.empty(max(size, 1), dtype=torch.uint8)
        device = _device(state)

        def warm() -> None:
            for start in range(0, slab.numel(), 2**26):
                slab[start : start + 2**26].zero_()
            if device is not None:
                with torch.cuda.device(device):  # a new thread would otherwise open a context on the first device
                    code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
                self._pinned = int(code) == 0  # without it the copy is slower, but correct

        self._warming = threading.Thread(target=warm, name="windlass-stage", daemon=True)
        self._warming.start()

    def stage(self, state: Any) -> Any:
        """A copy of `state` whose tensors are in host memory; other values are passed on."""
        self.prepare(state)
        if self._warming is not None:
            self._warming.join()
        assert self._slab is not None
        slab, copies, offset = self._slab, dict[int, torch.Tensor](), 0
        for _, leaf in leaves(state):
            if id(leaf) not in copies:
                local = local_tensor(leaf).detach()
                copy = slab[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
                copy.copy_(local, non_blocking=self._pinned)
                # DTensor.from_local would move the copy back to the mesh's device, so the constructor is used.
                copies[id(leaf)] = DTensor(copy, leaf._spec, requires_grad=False) if isinstance(leaf, DTensor) else copy
                offset += _aligned(local.nbytes)
        if (device := _device(state)) is not None:
            torch.cuda.synchronize(device)
        return _rebuild(state, copies)

    def close(self) -> None:
        """Release the memory."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        if self._pinned and self._slab is not None:
            torch.cuda.cudart().cudaHostUnregister(self._slab.data_ptr())
        self._slab, self._pinned = None, False


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """(path, tensor) of every tensor in nested dicts, lists and tuples, always in the same order."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))


def _rebuild(state: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        return copies[id(state)]
    if isinstance(state, dict):
        return {key: _rebuild(value, copies) for key, value in state.items()}
    return type(state)(_rebuild(value, copies) for value in state) if isinstance(state, (list, tuple)) else state


def state_bytes(state: Any) -> int:
    """Bytes of this rank's part of the state."""
    return sum({id(leaf): _aligned(local_tensor(leaf).nbytes) for _, leaf in leaves(state)}.values())


def state_extent(state: Any) -> tuple[int, int]:
    """(hash of the tensors' names, bytes of the full tensors): equal on ranks that hold parts of the same tensors."""
    items = list(leaves(state))
    names = zlib.crc32("\n".join(str(path) for path, _ in items).encode())
    return names, sum(leaf.numel() * leaf.element_size() for _, leaf in items)


def available_bytes() -> int | None:
    """Host memory that can still be allocated: the smaller of the kernel's and the job's cgroup's figure."""
    sizes = []
    if (meminfo := Path("/proc/meminfo")).exists():
        lines = [line.split() for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
        sizes += [int(fields[1]) * 1024 for fields in lines]
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = (Path(name).read_text().strip() for name in (limit_file, used_file))
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 2**60:
            sizes.append(max(0, int(limit) - int(used)))
            break
    return min(sizes, default=None)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _device(state: Any) -> torch.device | None:
    """The GPU that holds the state, or None."""
    return next((local.device for _, leaf in leaves(state) if (local := local_tensor(leaf)).is_cuda), None)
