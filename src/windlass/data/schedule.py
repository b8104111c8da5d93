"""Which worker does which chunk next? Big compressed files first, one reader each; help from others only when nothing else is left."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from windlass.data.inputs import Item

Key = tuple[str, int]
"""(item id, chunk)."""
_SKIP_SPEED = 20
"""Decompressing to a later chunk is about this much faster than tokenizing it."""


@dataclass
class Long:
    """A big compressed file whose end is not known: chunks first, first + step, ... until one says it was the last."""

    item: Item
    cursor: int
    step: int
    guess: int
    """Chunks it probably has."""
    readers: int = 0
    ended: bool = False

    def worth_joining(self) -> bool:
        """A second reader must first decompress all that is done: only if clearly more than that is left."""
        left = (self.guess - self.cursor) // self.step
        return not self.ended and left > 1 + self.cursor // _SKIP_SPEED


@dataclass
class Schedule:
    """Hands out what is not done, and learns where long files end."""

    waiting: deque[tuple[Item, int]]
    longs: list[Long]
    done: Container[Key]
    held: dict[int, Long] = field(default_factory=dict)
    """Worker -> the long file it has open."""

    def next(self, worker: int) -> tuple[Item, int] | None:
        """The worker's next chunk, or None when nothing is left that it could usefully do."""
        long = self.held.get(worker)
        if long is not None and (found := self._advance(long)) is not None:
            return found
        self.release(worker)
        for fresh in self.longs:
            if fresh.readers == 0 and not fresh.ended and (found := self._join(worker, fresh)) is not None:
                return found
        if self.waiting:
            return self.waiting.popleft()
        for busy in sorted(self.longs, key=lambda one: one.readers):
            if busy.worth_joining() and (found := self._join(worker, busy)) is not None:
                return found
        return None

    def release(self, worker: int) -> None:
        """The worker reads its long file no further."""
        long = self.held.pop(worker, None)
        if long is not None:
            long.readers -= 1

    def left(self) -> int:
        """Chunks that are probably still to be handed out."""
        lanes = (max(0, (long.guess - long.cursor) // long.step) for long in self.longs if not long.ended)
        return len(self.waiting) + sum(lanes)

    def finished(self, item: Item, last: bool) -> None:
        """A chunk is done; `last`: its file ended in it."""
        if last and item.chunks is None:
            for long in self.longs:
                long.ended = long.ended or long.item.id == item.id

    def _join(self, worker: int, long: Long) -> tuple[Item, int] | None:
        found = self._advance(long)
        if found is not None:
            self.held[worker] = long
            long.readers += 1
        return found

    def _advance(self, long: Long) -> tuple[Item, int] | None:
        while not long.ended and (long.item.id, long.cursor) in self.done:
            long.cursor += long.step
        if long.ended:
            return None
        long.cursor += long.step
        return long.item, long.cursor - long.step


def make_schedule(items: Sequence[Item], done: dict[Key, bool], task: tuple[int, int] | None = None) -> Schedule:
    """Everything that is missing, or the share of it that array task (index, count) has. `done` maps a chunk to "was the last"."""
    share = _share(items, task)
    waiting = deque((item, number) for item, number in share.fixed if (item.id, number) not in done)
    ended = {item for (item, _), last in done.items() if last}
    longs = [
        Long(item, first, step, _guess(item)) for item, first, step in share.lanes if not _complete(item, done, ended)
    ]
    for long in longs:
        long.ended = _lane_done(long, done)
    longs.sort(key=lambda long: -long.item.weight)
    return Schedule(waiting, longs, done)


def _guess(item: Item) -> int:
    return max(1, -(-item.weight // item.step))


def last_chunk(item: Item, done: dict[Key, bool]) -> int | None:
    """Number of the chunk in which a long file ended; a second reader may have looked beyond it."""
    found = [number for (name, number), last in done.items() if name == item.id and last]
    return min(found) if found else None


def _complete(item: Item, done: dict[Key, bool], ended: set[str]) -> bool:
    last = last_chunk(item, done) if item.id in ended else None
    return last is not None and all((item.id, number) in done for number in range(last + 1))


def _lane_done(long: Long, done: dict[Key, bool]) -> bool:
    last = last_chunk(long.item, done)
    return last is not None and all((long.item.id, n) in done for n in range(long.cursor, last + 1, long.step))


def missing(items: Iterable[Item], done: dict[Key, bool]) -> list[str]:
    """Files with chunks that are not done, for the message that says why a merge must wait."""
    ended = {item for (item, _), last in done.items() if last}
    names = []
    for item in items:
        whole = (
            _complete(item, done, ended)
            if item.chunks is None
            else all((item.id, n) in done for n in range(item.chunks))
        )
        if not whole:
            names.append(item.files[0].path)
    return names


@dataclass
class Share:
    fixed: list[tuple[Item, int]]
    lanes: list[tuple[Item, int, int]]
    """(item, first chunk, step)."""


def _share(items: Sequence[Item], task: tuple[int, int] | None) -> Share:
    """The part of one array task, balanced by bytes; every task computes the same division."""
    index, count = task or (0, 1)
    shares = [Share([], []) for _ in range(count)]
    load = [(0, number) for number in range(count)]
    fair = sum(item.weight for item in items) / count
    for item in sorted((i for i in items if i.chunks is None), key=lambda i: -i.weight):
        lanes = min(count, max(1, round(item.weight / max(1.0, fair))))
        for lane, (weight, number) in enumerate([heapq.heappop(load) for _ in range(lanes)]):
            shares[number].lanes.append((item, lane, lanes))
            heapq.heappush(load, (weight + item.weight // lanes, number))
    for item in items:
        for number in range(item.chunks or 0):
            weight, lightest = heapq.heappop(load)
            shares[lightest].fixed.append((item, number))
            heapq.heappush(load, (weight + item.weight // (item.chunks or 1), lightest))
    return shares[index]
