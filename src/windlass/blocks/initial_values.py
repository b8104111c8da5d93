"""Initial weights: each parameter from a seed and its own name, so that every layout starts from the same numbers."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Filler = Callable[[Tensor, torch.Generator], None]


def fill_normal(tensor: Tensor, generator: torch.Generator, std: float = 0.02) -> None:
    tensor.normal_(0.0, std, generator=generator)


def fill_parameter(parameter: Tensor, key: str, fill: Filler) -> None:
    """Fill the full tensor from `key`, then keep this rank's part. Only one full parameter exists on a device at a
    time."""
    local = local_tensor(parameter)
    generator = generator_of(key, local.device)
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
            fill(full, generator)
            local.copy_(local_part(full, parameter))
        else:
            fill(parameter, generator)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def generator_of(key: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a full tensor, divided like the DTensor `like`."""
    return full[tuple(slice(start, start + length) for start, length in local_bounds(like))]


def local_bounds(like: Tensor) -> list[tuple[int, int]]:
    """Where this rank's part of a tensor lies in the full one: first index and length of each dimension.

    Tensor and expert parallelism divide first and data parallelism divides their parts, although the mesh lists data
    axes first: that is what FSDP2's strided placement means.
    """
    bounds = [(0, size) for size in like.shape]
    if not isinstance(like, DTensor):
        return bounds
    mesh = like.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis] not in ("tp", "ep")):
        placement: Any = like.placements[axis]
        if "Shard" in type(placement).__name__:  # also the strided one, which is not always a subclass of Shard
            start, length = bounds[placement.dim]
            size = -(-length // mesh.size(axis))
            offset = min(length, size * mesh.get_local_rank(axis))
            bounds[placement.dim] = start + offset, min(size, length - offset)
    return bounds


def fill_constant(tensor: Tensor, generator: torch.Generator, value: float) -> None:
    tensor.fill_(value)


def fill_xavier(tensor: Tensor, generator: torch.Generator, gain: float) -> None:
    bound = gain * (6.0 / sum(tensor.shape)) ** 0.5
    tensor.uniform_(-bound, bound, generator=generator)


def residual_filler(ends_branch: bool, std: float, num_layers: int) -> Filler:
    """Normal; matrices that end a residual branch begin smaller, by the number of branches."""
    return partial(fill_normal, std=std / (2 * num_layers) ** 0.5 if ends_branch else std)
