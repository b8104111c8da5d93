"""Where do weights begin? Each parameter from a seed and its own name, so that every layout starts from the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

Filler = Callable[[Tensor, torch.Generator], None]


def fill_normal(tensor: Tensor, generator: torch.Generator, std: float = 0.02) -> None:
    tensor.normal_(0.0, std, generator=generator)


def fill_parameter(parameter: Tensor, key: str, fill: Filler) -> None:
    """Fill the whole tensor from `key`, then keep this rank's part of it. One parameter at a time is whole on a device."""
    with torch.no_grad():
        if not hasattr(parameter, "device_mesh"):
            fill(parameter, generator_of(key, parameter.device))
            return
        local = parameter.to_local()
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        fill(whole, generator_of(key, local.device))
        local.copy_(local_part(whole, parameter))


def generator_of(key: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, divided like the DTensor `like`.

    Tensor parallelism divides first and data parallelism divides its parts, although the mesh lists data axes first:
    that is what FSDP2's strided placement means.
    """
    mesh, part = like.device_mesh, whole
    names = mesh.mesh_dim_names or ()
    order = sorted(range(mesh.ndim), key=lambda axis: (0 if names and names[axis] == "tp" else 1, axis))
    for axis in order:
        placement = like.placements[axis]
        if not placement.is_shard() and "Shard" not in type(placement).__name__:
            continue
        dim, size, rank = placement.dim, mesh.size(axis), mesh.get_local_rank(axis)
        chunks = part.chunk(size, dim=dim)
        part = chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)
    return part
