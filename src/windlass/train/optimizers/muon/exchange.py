"""Which rank orthogonalises which matrix, and the two messages that bring its parts there and the result back.

A rank holds rectangles of matrices, by whatever axes of the mesh divide them. Each matrix has one owner among the ranks
that hold a part of it. The parts of one copy travel to the owner; the result travels to every rank that holds a part,
copies included. So each matrix is orthogonalised once, and no rank holds more full matrices than its share of a round.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.blocks.initial_values import local_bounds
from windlass.cost.muon import ROUND_SIZE

# First row, rows, first column, columns.
Rectangle = tuple[int, int, int, int]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a parameter: itself, or one of a stack."""

    slot: int
    # Its number in the stack.
    index: int
    owner: int
    # The owner's copy: ranks and the rectangle that each holds.
    sources: tuple[tuple[int, Rectangle], ...]
    # All ranks that hold a part.
    targets: tuple[tuple[int, Rectangle], ...]


@dataclass(frozen=True)
class Round:
    """Matrices of one shape that are orthogonalised at the same time, and the ranks that take part."""

    rows: int
    columns: int
    matrices: tuple[Matrix, ...]
    # None: this process holds everything.
    group: Any
    rank: int
    ranks: int
    # Slot -> first matrix of its stack on this rank.
    first: dict[int, int]

    @property
    def owned(self) -> list[Matrix]:
        return [matrix for matrix in self.matrices if matrix.owner == self.rank]

    def gather(self, updates: dict[int, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The full matrices that this rank owns, from everyone's parts (stack, rows, columns) of each slot."""
        sent, received = defaultdict[int, list[Tensor]](list), list[tuple[int, tuple[int, Rectangle]]]()
        for matrix in self.matrices:
            for rank, _ in matrix.sources:
                if rank == self.rank:
                    sent[matrix.owner].append(updates[matrix.slot][matrix.index - self.first[matrix.slot]])
        owned = self.owned
        for number, matrix in enumerate(owned):
            received += [(number, source) for source in matrix.sources]
        full = torch.empty((len(owned), self.rows, self.columns), dtype=dtype, device=device)
        by_rank = sorted(received, key=lambda item: item[1][0])
        parts = self._exchange(sent, [source for _, source in by_rank], dtype, device)
        for (number, (_, (top, rows, left, columns))), part in zip(by_rank, parts, strict=True):
            full[number, top : top + rows, left : left + columns] = part
        return full

    def scatter(self, full: Tensor) -> dict[int, Tensor]:
        """This rank's parts (stack, rows, columns) of the results, by slot."""
        sent, received = defaultdict[int, list[Tensor]](list), list[tuple[int, tuple[int, Rectangle]]]()
        for number, matrix in enumerate(self.owned):
            for rank, (top, rows, left, columns) in matrix.targets:
                sent[rank].append(full[number, top : top + rows, left : left + columns])
        for number, matrix in enumerate(self.matrices):
            received += [(number, (matrix.owner, part)) for rank, part in matrix.targets if rank == self.rank]
        by_rank = sorted(received, key=lambda item: item[1][0])
        parts = self._exchange(sent, [source for _, source in by_rank], full.dtype, full.device)
        ordered = sorted(zip((number for number, _ in by_rank), parts, strict=True), key=lambda item: item[0])
        slots = defaultdict[int, list[Tensor]](list)
        for number, part in ordered:
            slots[self.matrices[number].slot].append(part)
        return {slot: torch.stack(stack) if len(stack) > 1 else stack[0][None] for slot, stack in slots.items()}

    def _exchange(
        self,
        sent: dict[int, list[Tensor]],
        received: Sequence[tuple[int, Rectangle]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """Send tensors to ranks; the rectangles that come back, in the order of `received`, which is sorted by rank."""
        if self.group is None:
            return sent[self.rank]
        outgoing = [sum(part.numel() for part in sent[rank]) for rank in range(self.ranks)]
        incoming = [0] * self.ranks
        for rank, (_, rows, _, columns) in received:
            incoming[rank] += rows * columns
        flat = [part.reshape(-1) for rank in range(self.ranks) for part in sent[rank]]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        answer = torch.empty(sum(incoming), dtype=dtype, device=device)
        dist.all_to_all_single(answer, message, incoming, outgoing, group=self.group)
        pieces = answer.split([rows * columns for _, (_, rows, _, columns) in received])
        return [piece.view(rows, columns) for piece, (_, (_, rows, _, columns)) in zip(pieces, received, strict=True)]


def plan_rounds(weights: Sequence[Tensor], round_size: int = ROUND_SIZE) -> list[Round]:
    """The rounds of all `weights` (matrices and stacks of them). Every rank of a mesh makes the same ones."""
    by_shape: dict[Any, list[int]] = {}
    for slot, weight in enumerate(weights):
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        by_shape.setdefault((mesh, *weight.shape[-2:]), []).append(slot)
    groups: dict[Any, Any] = {}
    load: dict[Any, list[float]] = {}
    rounds = list[Round]()
    for (mesh, rows, columns), slots in by_shape.items():
        if mesh not in groups:
            groups[mesh] = _group_of(mesh)
            load[mesh] = [0.0] * (1 if mesh is None else mesh.size())
        group, ranks = groups[mesh], len(load[mesh])
        mine = [[(0, 1), *local_bounds(weights[slot])][-3:] for slot in slots]
        everyone: list[Any] = [mine] * ranks
        if group is not None:
            dist.all_gather_object(everyone, mine, group=group)
        bounds = dict(zip(slots, mine, strict=True))
        matrices = [
            list(_assign(slot, len(as_stack(weights[slot])), [held[number] for held in everyone], load[mesh]))
            for number, slot in enumerate(slots)
        ]
        rank = 0 if group is None else dist.get_rank(group)
        for part in _cut(matrices, round_size * ranks // (rows * columns)):
            first = {m.slot: bounds[m.slot][0][0] for m in part}
            rounds.append(Round(rows, columns, tuple(part), group, rank, ranks, first))
    return rounds


def _cut(matrices: list[list[Matrix]], size: int) -> Iterator[list[Matrix]]:
    """Matrices of some parameters together: up to `size`, and at least one parameter."""
    part = list[Matrix]()
    for stack in matrices:
        if part and len(part) + len(stack) > size:
            yield part
            part = []
        part = part + stack
    yield part


def _assign(slot: int, stack: int, bounds: list[Any], load: list[float]) -> Iterator[Matrix]:
    """Owners of the matrices of one parameter: among the ranks that hold a part, the one with the least to do."""
    for index in range(stack):
        holders = [
            (rank, (*rows, *columns))
            for rank, ((start, length), rows, columns) in enumerate(bounds)
            if start <= index < start + length and rows[1] and columns[1]
        ]
        owner, own = min(holders, key=lambda holder: load[holder[0]])
        copies = defaultdict[Rectangle, list[int]](list)
        for rank, rectangle in holders:
            copies[rectangle].append(rank)
        copy = copies[own].index(owner)
        load[owner] += sum(rectangle[1] * rectangle[3] for rectangle in copies)
        sources = tuple((ranks[copy], rectangle) for rectangle, ranks in copies.items())
        yield Matrix(slot, index, owner, sources, tuple(holders))


def as_stack(matrices: Tensor) -> Tensor:
    """A matrix is a stack of one."""
    return matrices[None] if matrices.ndim == 2 else matrices


def _group_of(mesh: Any) -> Any:
    """The ranks among which the parts of a tensor lie; None where there is one."""
    if mesh is None or mesh.size() == 1:
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
