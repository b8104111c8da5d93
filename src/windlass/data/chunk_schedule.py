"""The order in which workers take chunks.

Big compressed files come first, with one reader each; a second reader joins only when nothing else is left.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.data.inputs import WorkItem

ChunkKey = tuple[str, int]  # (item id, chunk)
_SKIP_SPEED = 20  # decompressing to a later chunk is about this much faster than tokenizing it


@dataclass
class CompressedFile:
    """A big compressed file of unknown length: chunks cursor, cursor + step, ... until one of them was the last."""

    item: WorkItem
    cursor: int
    step: int
    readers: int = 0
    ended: bool = False

    def chunks_left(self) -> int:
        """Estimated."""
        estimated_chunks = max(1, -(-self.item.weight // self.item.step))
        return 0 if self.ended else max(0, (estimated_chunks - self.cursor) // self.step)

    def worth_joining(self) -> bool:
        """A second reader must first decompress all that is done: worth it only if clearly more than that is left."""
        return self.chunks_left() > 1 + self.cursor // _SKIP_SPEED


@dataclass
class ChunkSchedule:
    """Hands out the chunks that are not done, and learns where compressed files end."""

    waiting: deque[tuple[WorkItem, int]]
    compressed: list[CompressedFile]
    done: Container[ChunkKey]
    held: dict[int, CompressedFile] = field(default_factory=dict)  # worker -> the compressed file it has open

    def next(self, worker: int) -> tuple[WorkItem, int] | None:
        """The worker's next chunk, or None when nothing is left that it could usefully do."""
        if worker in self.held and (chunk := self._advance(self.held[worker])) is not None:
            return chunk
        self.release(worker)
        for file in self.compressed:
            if file.readers == 0 and (chunk := self._join(worker, file)) is not None:
                return chunk
        if self.waiting:
            return self.waiting.popleft()
        for file in sorted(self.compressed, key=lambda file: file.readers):
            if file.worth_joining() and (chunk := self._join(worker, file)) is not None:
                return chunk
        return None

    def release(self, worker: int) -> None:
        """The worker reads its compressed file no further."""
        if (file := self.held.pop(worker, None)) is not None:
            file.readers -= 1

    def chunks_left(self) -> int:
        """Chunks still to be handed out; estimated for compressed files."""
        return len(self.waiting) + sum(file.chunks_left() for file in self.compressed)

    def finished(self, item: WorkItem, last: bool) -> None:
        """A chunk is done; `last`: its file ended in it."""
        if last and item.chunks is None:
            for file in self.compressed:
                file.ended = file.ended or file.item.id == item.id

    def _join(self, worker: int, file: CompressedFile) -> tuple[WorkItem, int] | None:
        chunk = self._advance(file)
        if chunk is not None:
            self.held[worker] = file
            file.readers += 1
        return chunk

    def _advance(self, file: CompressedFile) -> tuple[WorkItem, int] | None:
        if file.ended:
            return None
        while (file.item.id, file.cursor) in self.done:
            file.cursor += file.step
        file.cursor += file.step
        return file.item, file.cursor - file.step


def make_schedule(
    items: Sequence[WorkItem], done: Mapping[ChunkKey, bool], task: tuple[int, int] | None = None
) -> ChunkSchedule:
    """Every chunk that is missing, or the share of array task (index, count). `done` maps a chunk to "was the last".

    Shares are balanced by bytes; every task computes the same division.
    """
    index, count = task or (0, 1)
    waiting: list[deque[tuple[WorkItem, int]]] = [deque() for _ in range(count)]
    compressed: list[list[CompressedFile]] = [[] for _ in range(count)]
    load = [(0, number) for number in range(count)]
    fair_weight = sum(item.weight for item in items) / count
    for item in sorted((i for i in items if i.chunks is None), key=lambda i: -i.weight):
        lanes = min(count, max(1, round(item.weight / max(1.0, fair_weight))))
        for lane, (weight, number) in enumerate([heapq.heappop(load) for _ in range(lanes)]):
            compressed[number].append(CompressedFile(item, lane, lanes))
            heapq.heappush(load, (weight + item.weight // lanes, number))
    for item in items:
        for chunk in range(item.chunks or 0):
            weight, lightest = heapq.heappop(load)
            if (item.id, chunk) not in done:
                waiting[lightest].append((item, chunk))
            heapq.heappush(load, (weight + item.weight // (item.chunks or 1), lightest))
    ends = last_chunks(done)
    unfinished = [file for file in compressed[index] if not _is_done(file.item, done, ends, file.cursor, file.step)]
    return ChunkSchedule(waiting[index], unfinished, done)


def last_chunks(done: Mapping[ChunkKey, bool]) -> dict[str, int]:
    """Item id -> chunk in which the item ended. A second reader may have looked beyond it."""
    ends: dict[str, int] = {}
    for (item, chunk), last in done.items():
        if last:
            ends[item] = min(chunk, ends.get(item, chunk))
    return ends


def _is_done(item: WorkItem, done: Container[ChunkKey], ends: Mapping[str, int], first: int = 0, step: int = 1) -> bool:
    if item.chunks is None and item.id not in ends:
        return False
    count = item.chunks if item.chunks is not None else ends[item.id] + 1
    return all((item.id, chunk) in done for chunk in range(first, count, step))


def unfinished_files(items: Iterable[WorkItem], done: Mapping[ChunkKey, bool]) -> list[str]:
    """The first file of each item with chunks that are not done."""
    ends = last_chunks(done)
    return [item.files[0].path for item in items if not _is_done(item, done, ends)]
