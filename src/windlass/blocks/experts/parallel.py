"""Experts divided over ranks: each holds some of them by expert parallelism, and a part of their inner size by tensor
parallelism. The router is the same on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from windlass.blocks.divide import Meshes
from windlass.blocks.experts.module import Experts
from windlass.blocks.experts.rows import SortedRows, SummedRows


def parallelize(block: Experts, meshes: Meshes) -> None:
    if meshes.context is not None:
        block.sum_loads = partial(sum_over, mesh=meshes.context)
    inner: dict[str, Any] = {"w1": Shard(1), "w2": Shard(2), "w3": Shard(1)}
    inner |= {"w1_bias": Shard(1), "w2_bias": Replicate(), "w3_bias": Shard(1)}
    inner = {name: placement for name, placement in inner.items() if getattr(block, name, None) is not None}
    if meshes.expert is not None:
        for name, placement in inner.items():
            place(block, name, meshes.expert, [Shard(0), placement][: meshes.expert.ndim])
        block.dispatch = partial(exchange_rows, mesh=meshes.expert["ep"])
    if meshes.tensor is None:
        return
    place(block, "router", meshes.tensor, [Replicate()])
    if block.router_bias is not None:
        place(block, "router_bias", meshes.tensor, [Replicate()])
    for name, placement in inner.items() if meshes.expert is None else ():
        place(block, name, meshes.tensor, [placement])
    if block.shared is not None:
        for layer, dim in ((block.shared.w1, 0), (block.shared.w2, 1), (block.shared.w3, 0)):
            if layer is not None:
                place(layer, "weight", meshes.tensor, [Shard(dim)])
    block.tensor_ranks = meshes.tensor.size()
    block.enter = partial(gather_sequence, mesh=meshes.tensor)
    block.leave = partial(scatter_sequence, mesh=meshes.tensor)


def place(module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Any]) -> None:
    setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, placements)))


# The lengths are known to the host only: a compiled layer is cut here, and what follows takes any number of rows.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_rows(
    rows: Tensor, weights: Tensor, counts: Tensor, mesh: DeviceMesh
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Send the rows, sorted by expert, to the ranks that hold their experts; see `Dispatch`."""
    ranks, group = mesh.size(), mesh.get_group().group_name
    sent = counts.long().view(ranks, -1)  # rows for each expert of each rank
    own = sent.shape[1]
    received = send(sent, [1] * ranks, [1] * ranks, group)  # rows of each rank for each of this rank's experts
    # The one wait of the host for the device in a layer.
    inputs, outputs = torch.stack((sent.sum(1), received.sum(1))).tolist()
    expert = torch.arange(own, device=rows.device).repeat(ranks)
    order = expert.repeat_interleave(received.flatten(), output_size=sum(outputs)).argsort(stable=True)
    place_of = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    arrived = cast(Any, Exchange).apply(rows, outputs, inputs, group)
    rows = cast(Any, SortedRows).apply(arrived, order, place_of, 1)
    weights = cast(Any, SortedRows).apply(
        cast(Any, Exchange).apply(weights, outputs, inputs, group), order, place_of, 1
    )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def bring_back(results: Tensor) -> Tensor:
        by_rank = cast(Any, SummedRows).apply(results, order, place_of, 1)
        out: Tensor = cast(Any, Exchange).apply(by_rank, inputs, outputs, group)
        return out

    for tensor in (rows, weights):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return rows, weights, received.sum(0).cumsum(0).to(torch.int32), bring_back


class Exchange(torch.autograd.Function):
    """Rows to other ranks, so many to each, and theirs in exchange; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, outputs: list[int], inputs: list[int], group: str) -> Tensor:
        ctx.outputs, ctx.inputs, ctx.group = outputs, inputs, group
        return send(rows, outputs, inputs, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return send(grads[0], ctx.inputs, ctx.outputs, ctx.group), None, None, None


def send(rows: Tensor, outputs: list[int], inputs: list[int], group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    out: Tensor = functional.wait_tensor(functional.all_to_all_single(rows.contiguous(), outputs, inputs, group))
    return out


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The full sequence on each rank, which computes its part of the gradient."""
    divided = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    return divided.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scatter_sequence(out: Tensor, mesh: DeviceMesh) -> Tensor:
    """The ranks' parts summed; each keeps its stretch of the sequence."""
    return DTensor.from_local(out, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()


def sum_over(loads: Tensor, mesh: DeviceMesh) -> Tensor:
    out: Tensor = collectives.all_reduce(loads, "sum", mesh.get_group())
    return out
