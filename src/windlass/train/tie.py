"""Tied embedding and head in different pipeline stages: one owner, one copy, two messages per step.

The first stage owns the weights: its optimizer moves them and its checkpoint holds them. The last stage computes with
a copy; it sends the gradient to the owner and gets the new weights back. The copy has no moments, and both stay equal
to the last bit even where weights are rounded at random."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.blocks.initial_values import local_tensor
from windlass.train.mesh import World


@dataclass(frozen=True)
class Tie:
    """What this rank has of a shared matrix; a rank between the ends has neither."""

    owner: nn.Parameter | None
    copy: nn.Parameter | None
    group: Any
    first: int
    """Rank of the owner in the whole job."""
    last: int
    """Rank of the copy; the same as `first` where a schedule bends the pipeline back (zbv)."""

    def collect(self) -> None:
        """The owner's gradient becomes the sum of both uses; the copy's is gone."""
        if self.copy is not None:
            gradient = _gradient(self.copy)
            self.copy.grad = None
            if self.owner is None:
                dist.send(gradient.contiguous(), self.first, group=self.group)
            else:
                _gradient(self.owner).add_(gradient)
        elif self.owner is not None:
            gradient = torch.empty_like(_gradient(self.owner))
            dist.recv(gradient, self.last, group=self.group)
            _gradient(self.owner).add_(gradient)

    @torch.no_grad()
    def spread(self) -> None:
        """The copy becomes what the owner is."""
        if self.owner is not None and self.copy is not None:
            local_tensor(self.copy).copy_(local_tensor(self.owner))
        elif self.owner is not None:
            dist.send(local_tensor(self.owner).detach().contiguous(), self.last, group=self.group)
        elif self.copy is not None:
            weights = torch.empty_like(local_tensor(self.copy))
            dist.recv(weights, self.first, group=self.group)
            local_tensor(self.copy).copy_(weights)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def find_tie(modules: list[Any], stages: list[int], num_stages: int, world: World) -> Tie | None:
    """None where one module holds both uses, or nothing is tied."""
    if num_stages == 1 or not modules[0].tied or world.mesh is None:
        return None
    held = dict(zip(stages, modules, strict=True))
    group = world.mesh.get_group("pp")
    ends = 0, 0 if world.layout.schedule == "zbv" else world.layout.pipeline - 1
    first, last = (dist.get_global_rank(group, rank) for rank in ends)
    owner, copy = (held[index].embed.weight if index in held else None for index in (0, num_stages - 1))
    return Tie(owner, copy, group, first, last)
