"""Norms under tensor parallelism: each rank normalises its stretch of the sequence."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module


def parallelize(norm: nn.Module, tensor_mesh: DeviceMesh) -> None:
    parallelize_module(norm, tensor_mesh, SequenceParallel())
