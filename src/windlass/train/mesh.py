"""This process in the job: its device, its coordinates, and the device mesh of the layout."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.blocks.divide import Meshes
from windlass.clusters.scheduler import Place
from windlass.errors import TrainError
from windlass.layout.types import Layout
from windlass.train.supervisor import LISTEN_HANDLE


@dataclass(frozen=True)
class World:
    """The mesh is pipeline x copies x shards x tensor ranks; context ranks lie inside copies and shards."""

    place: Place
    device: torch.device
    layout: Layout
    # None for a single process.
    mesh: DeviceMesh | None = None
    # The same ranks with the context axis apart, for its collectives.
    context_mesh: DeviceMesh | None = None
    # The same ranks as the weights of experts are divided: pipeline x copies x shards x expert x tensor ranks.
    expert_mesh: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def is_main(self) -> bool:
        return self.place.rank == 0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def copies(self) -> int:
        """Copies of the sharded states."""
        return self.layout.replicas // self.layout.shard_size

    def coordinate(self, axis: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    @property
    def _replica(self) -> int:
        return self.coordinate("rep") * self.layout.shard_size + self.coordinate("fsdp")

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads; ranks of one context group share it."""
        return self._replica // self.layout.context

    @property
    def context_rank(self) -> int:
        return self._replica % self.layout.context

    @property
    def counts_loss(self) -> bool:
        """One rank of each tensor group adds its loss to the total."""
        return self.coordinate("tp") == 0

    @property
    def block_meshes(self) -> Meshes:
        """The axes that divide single blocks."""
        return Meshes(
            tensor=self.mesh["tp"] if self.mesh is not None and self.layout.tensor > 1 else None,
            context=None if self.context_mesh is None else self.context_mesh["cp"],
            expert=None if self.expert_mesh is None else self.expert_mesh[("ep", "tp")[: 1 + (self.layout.tensor > 1)]],
        )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def device_type() -> str:
    """ "cuda" (also for ROCm) where torch sees a GPU and WINDLASS_DEVICE does not ask for the CPU."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("WINDLASS_DEVICE") != "cpu" else "cpu"


def open_world(layout: Layout, place: Place, device: str, timeout_seconds: float = 600.0) -> World:
    """Join the job: process group, device and mesh. A device other than the start's is refused."""
    if device_type() != device or place.world_size != layout.devices:
        raise TrainError(
            "train.start-does-not-match",
            f"this start was made for {layout.devices} x {device}, but rank {place.rank} of {place.world_size} "
            f"finds {device_type()}",
            hint="check with `windlass doctor` that every rank sees its GPUs, or resume the run on these devices with "
            "`windlass resume`",
        )
    torch_device = torch.device("cpu")
    if device == "cuda":
        # A launcher that shows each task only its own device leaves just number 0.
        torch_device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(torch_device)
    if place.world_size == 1:
        return World(place, torch_device, layout)
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", place.master_addr or "localhost")
        if place.master_port is not None:
            os.environ.setdefault("MASTER_PORT", str(place.master_port))
        timeout, store = timedelta(seconds=timeout_seconds), None
        handle = os.environ.get(LISTEN_HANDLE)
        if handle is not None and place.master_addr is not None and place.master_port is not None:
            # The supervisor has bound the socket already, so that nobody takes the port while torch is imported.
            store = TCPStore(
                place.master_addr,
                place.master_port,
                place.world_size,
                is_master=place.rank == 0,
                timeout=timeout,
                master_listen_fd=int(handle) if place.rank == 0 else None,
            )
        dist.init_process_group(
            # gloo beside nccl: checkpoints and small objects travel on the CPU without a device synchronisation.
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=torch_device if device == "cuda" else None,
        )
    shape = (layout.pipeline, layout.replicas // layout.shard_size, layout.shard_size, layout.tensor)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "rep", "fsdp", "tp"))
    context_mesh = None
    if layout.context > 1:
        shape = (layout.pipeline, layout.data, layout.context, layout.tensor)
        context_mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    expert_mesh = None
    if layout.expert > 1:
        part = layout.for_experts
        sizes = (layout.pipeline, part.replicas // part.shard_size, part.shard_size, layout.expert, layout.tensor)
        expert_mesh = init_device_mesh(device, sizes, mesh_dim_names=("pp", "rep", "fsdp", "ep", "tp"))
    return World(place, torch_device, layout, mesh, context_mesh, expert_mesh)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
