"""Norms under tensor parallelism: along the sequence, over some heads, or over a divided width."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from windlass.blocks.divide import gather_with_gradient, place_parameters
from windlass.blocks.norm.module import Norm, mean_square


def parallelize(norm: nn.Module, tensor_mesh: DeviceMesh, *, ends_branch: bool = False) -> None:
    """`ends_branch`: the result is added to the residual stream, which is a plain tensor, and not read by a block."""
    parallelize_module(norm, tensor_mesh, SequenceParallel(use_local_output=ends_branch))


def parallelize_heads(norm: Norm, tensor_mesh: DeviceMesh) -> None:
    """A norm of each head: every rank has the weight and some of the heads."""
    place_parameters(norm, tensor_mesh, divided=False)


def divide_width(norm: Norm, tensor_mesh: DeviceMesh) -> None:
    """A norm over all heads: each rank has its part of the width and adds the others' squares."""
    place_parameters(norm, tensor_mesh, divided=True)
    norm.mean_square = partial(divided_mean_square, mesh=tensor_mesh)


def divided_mean_square(x: Tensor, mesh: DeviceMesh) -> Tensor:
    parts: Tensor = gather_with_gradient(mean_square(x).contiguous(), x.ndim - 1, mesh.get_group())
    return parts.mean(-1, keepdim=True)
