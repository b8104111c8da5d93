"""Norms under tensor parallelism: each rank normalises its stretch of the sequence."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module


def parallelize(norm: nn.Module, tensor_mesh: DeviceMesh, *, ends_branch: bool = False) -> None:
    """`ends_branch`: the result is added to the residual stream, which is a plain tensor, and not read by a block."""
    parallelize_module(norm, tensor_mesh, SequenceParallel(use_local_output=ends_branch))
