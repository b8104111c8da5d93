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
    # Rank of the owner in the whole job.
    first: int
    # Rank of the copy; the same as `first` where a schedule bends the pipeline back (zbv).
    last: int

    @property
    def is_trained(self) -> bool:
        """False where only adapters are trained, and on a rank that has neither."""
        weights = self.copy if self.owner is None else self.owner
        return weights is not None and weights.requires_grad

    def collect(self) -> None:
        """The owner's gradient becomes the sum of both uses; the copy's is gone."""
        owned = None if self.owner is None else _gradient(self.owner)
        copied = None if self.copy is None else _gradient(self.copy)
        if self.copy is not None:
            self.copy.grad = None
        if owned is None and copied is not None:
            dist.send(copied.contiguous(), self.first, group=self.group)
        elif owned is not None:
            owned.add_(self._received(owned, self.last) if copied is None else copied)

    @torch.no_grad()
    def spread(self) -> None:
        """The copy becomes what the owner is."""
        owned, copied = (None if end is None else local_tensor(end) for end in (self.owner, self.copy))
        if copied is None and owned is not None:
            dist.send(owned.detach().contiguous(), self.last, group=self.group)
        elif copied is not None:
            copied.copy_(self._received(copied, self.first) if owned is None else owned)

    def _received(self, like: Tensor, sender: int) -> Tensor:
        tensor = torch.empty_like(like)
        dist.recv(tensor, sender, group=self.group)
        return tensor


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
