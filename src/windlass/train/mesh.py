"""Where does this rank stand? Devices arranged by pipeline, data, context and tensor; the data coordinate says what it reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.clusters.scheduler import Place, place
from windlass.config import LayoutConfig
from windlass.errors import ConfigError
from windlass.train.supervise import LISTEN_HANDLE


@dataclass(frozen=True)
class Axes:
    """Sizes of the mesh: pipeline x replicate x shard x tensor ranks; `context` of the data ranks share a sequence."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    context: int

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard // self.context


def axes_of(layout: LayoutConfig, world_size: int, devices_per_node: int) -> Axes:
    """How many ranks stand on each axis; refuses a world that the layout does not divide."""
    fixed = layout.tensor * layout.pipeline * layout.context
    if world_size % fixed:
        raise ConfigError(
            "train.device-cannot-hold-layout",
            f"{world_size} device{'s' * (world_size > 1)} cannot hold layout.tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = {fixed}",
            hint=f"use a multiple of {fixed} devices, or smaller degrees",
        )
    ranks = world_size // (layout.tensor * layout.pipeline)
    shard = shard_ranks(layout, ranks, devices_per_node)
    return Axes(layout.pipeline, ranks // shard, shard, layout.tensor, layout.context)


def shard_ranks(layout: LayoutConfig, ranks: int, devices_per_node: int) -> int:
    """Over how many of the data (and context) ranks one copy of the states is divided."""
    if layout.shard == "none":
        return 1
    if layout.shard != "hybrid":
        return ranks
    size = layout.shard_size or max(1, min(ranks, devices_per_node // layout.tensor))
    if ranks % size:
        raise ConfigError(
            "train.layout-shard-size-does",
            f"layout.shard_size ({size}) does not divide the {ranks} data-parallel ranks",
            hint=f"choose one of {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
        )
    return size


@dataclass(frozen=True)
class World:
    """This process in the job: its device, its coordinates, and the mesh (None for a single process)."""

    place: Place
    device: torch.device
    axes: Axes
    mesh: DeviceMesh | None = None
    context_mesh: DeviceMesh | None = None
    """The same ranks with the context axis drawn apart, for its collectives."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def is_main(self) -> bool:
        return self.place.rank == 0

    def coordinate(self, axis: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads; ranks of one context group share it."""
        return (self.coordinate("rep") * self.axes.shard + self.coordinate("fsdp")) // self.axes.context

    @property
    def context_rank(self) -> int:
        return (self.coordinate("rep") * self.axes.shard + self.coordinate("fsdp")) % self.axes.context

    @property
    def counts_loss(self) -> bool:
        """One rank of each tensor group adds its loss to the total."""
        return self.coordinate("tp") == 0

    def context_group(self) -> Any:
        return None if self.context_mesh is None else self.context_mesh.get_group("cp")

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def pick_device(local_rank: int) -> torch.device:
    """The accelerator of this local rank (CUDA and ROCm alike), or the CPU."""
    if not torch.cuda.is_available() or os.environ.get("WINDLASS_DEVICE") == "cpu":
        return torch.device("cpu")
    # A launcher that shows each task only its own device leaves just number 0.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_world(layout: LayoutConfig, where: Place | None = None, timeout_seconds: float = 600.0) -> World:
    """Join the job: process group, device and mesh."""
    where = where or place()
    axes = axes_of(layout, where.world_size, where.local_world_size)
    device = pick_device(where.local_rank)
    if where.world_size == 1:
        return World(where, device, axes)
    if not dist.is_initialized():
        _join(where, device, timeout_seconds)
    mesh = init_device_mesh(
        device.type,
        (axes.pipeline, axes.replicate, axes.shard, axes.tensor),
        mesh_dim_names=("pp", "rep", "fsdp", "tp"),
    )
    context = None
    if axes.context > 1:
        shape = (axes.pipeline, axes.data, axes.context, axes.tensor)
        context = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    return World(where, device, axes, mesh, context)


def leave() -> None:
    """The end of a job: all ranks have finished."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(where: Place, device: torch.device, timeout_seconds: float) -> None:
    os.environ.setdefault("MASTER_ADDR", where.master_addr or "localhost")
    if where.master_port is not None:
        os.environ.setdefault("MASTER_PORT", str(where.master_port))
    # gloo beside nccl: checkpoints and small objects travel on the CPU without a device synchronisation.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=_supervised_store(where, timeout_seconds), rank=where.rank, world_size=where.world_size, timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip


def _supervised_store(where: Place, timeout_seconds: float) -> dist.Store | None:
    """The meeting place on the socket that the local supervisor has bound; None: torch makes its own from MASTER_PORT."""
    handle = os.environ.get(LISTEN_HANDLE)
    if handle is None or where.master_addr is None or where.master_port is None:
        return None
    return dist.TCPStore(
        where.master_addr, where.master_port, where.world_size, is_master=where.rank == 0, timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=int(handle) if where.rank == 0 else None,
    )  # fmt: skip
