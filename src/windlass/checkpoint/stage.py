"""How does training go on while its state is written? One copy into host memory that stays allocated between saves.

The copy is the only time that training waits. The host memory is touched once, and on a GPU page-locked, in the background:
both take longer than the copy itself.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_ALIGN = 64
Leaf = tuple[tuple[Any, ...], torch.Tensor]


class Stager:
    """Copies a nested state of tensors to host memory it owns; call `stage` again only when the last copy is no longer needed."""

    def __init__(self) -> None:
        self._slab: torch.Tensor | None = None
        self._pinned = False
        self._warming: threading.Thread | None = None

    def prepare(self, state: Any) -> None:
        """Allocate the memory and make it ready in the background, so that the first save stalls no longer than the others."""
        size = state_bytes(state)
        if self._slab is not None and self._slab.numel() >= size:
            return
        self.close()
        self._slab = torch.empty(max(size, 1), dtype=torch.uint8)
        self._warming = threading.Thread(
            target=self._warm, args=(self._slab, _device(state)), name="windlass-stage", daemon=True
        )
        self._warming.start()

    def stage(self, state: Any) -> Any:
        """A copy of `state` whose tensors are in host memory; other values are passed on as they are."""
        self.prepare(state)
        if self._warming is not None:
            self._warming.join()
        assert self._slab is not None
        copies: dict[int, torch.Tensor] = {}
        offset = 0
        for _, leaf in leaves(state):
            local = _local(leaf)
            if id(leaf) in copies:
                continue
            size = local.numel() * local.element_size()
            target = self._slab[offset : offset + size].view(local.dtype).view(local.shape)
            target.copy_(local, non_blocking=self._pinned)
            copies[id(leaf)] = _like(leaf, target)
            offset += _rounded(size)
        if (device := _device(state)) is not None:
            torch.cuda.synchronize(device)
        return _rebuild(state, copies)

    def _warm(self, slab: torch.Tensor, device: torch.device | None) -> None:
        for start in range(0, slab.numel(), 2**26):
            slab[start : start + 2**26].zero_()
        if device is not None:
            with torch.cuda.device(device):  # a new thread would otherwise open a context on the first device
                code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
            self._pinned = int(code) == 0  # without it the copy is slower, and as correct

    def close(self) -> None:
        """Let the memory go."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        if self._pinned and self._slab is not None:
            torch.cuda.cudart().cudaHostUnregister(self._slab.data_ptr())
        self._slab, self._pinned = None, False


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """Every tensor in nested dicts, lists and tuples, with its path, always in the same order."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from leaves(value, (*path, index))


def state_bytes(state: Any) -> int:
    """Bytes of this rank's part of the state."""
    seen = {id(leaf): _local(leaf) for _, leaf in leaves(state)}
    return sum(_rounded(t.numel() * t.element_size()) for t in seen.values())


def state_extent(state: Any) -> tuple[int, int]:
    """(a hash of the tensors' names, bytes of the whole tensors): equal on ranks that hold parts of the same tensors."""
    found = list(leaves(state))
    names = zlib.crc32("\n".join(str(path) for path, _ in found).encode())
    return names, sum(leaf.numel() * leaf.element_size() for _, leaf in found)


def available_bytes() -> int | None:
    """Host memory that can still be taken: the smaller of what the kernel and the job's cgroup say."""
    found = [size for size in (_from_meminfo(), _from_cgroup()) if size is not None]
    return min(found) if found else None


def _from_meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _from_cgroup() -> int | None:
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            texts = Path(limit).read_text().strip(), Path(used).read_text().strip()
        except OSError:
            continue
        if texts[0].isdigit() and int(texts[0]) < 2**60:
            return max(0, int(texts[0]) - int(texts[1]))
    return None


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _local(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach()


def _like(leaf: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The copy in the same sharding. DTensor.from_local would move it back to the mesh's device, so the constructor is used."""
    return DTensor(local, leaf._spec, requires_grad=False) if isinstance(leaf, DTensor) else local


def _device(state: Any) -> torch.device | None:
    """The GPU that holds the state, or None."""
    return next((local.device for _, leaf in leaves(state) if (local := _local(leaf)).is_cuda), None)


def _rebuild(state: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        return copies[id(state)]
    if isinstance(state, dict):
        return {key: _rebuild(value, copies) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_rebuild(value, copies) for value in state)
    return state
