"""Unions, intersections and differences of time spans, on numpy arrays."""

from dataclasses import dataclass

import numpy as np

from windlass.profile.trace import Floats


@dataclass(frozen=True)
class Spans:
    """Disjoint spans in order of time; touching spans are joined, empty ones dropped."""

    start: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.start)

    def within(self, start: Floats, end: Floats) -> Floats:
        """For each window from `start` to `end`: how much of it the spans cover."""
        if not len(self):
            return np.zeros(len(start))
        lengths = np.concatenate(([0.0], np.cumsum(self.end - self.start)))

        def covered_until(at: Floats) -> Floats:
            index = np.searchsorted(self.start, at, side="right")
            last = np.maximum(index - 1, 0)
            inside = np.clip(at - self.start[last], 0.0, self.end[last] - self.start[last])
            return np.where(index > 0, lengths[last] + inside, 0.0)

        return covered_until(end) - covered_until(start)


NO_SPANS = Spans(np.zeros(0), np.zeros(0))


def union(start: Floats, end: Floats) -> Spans:
    """When at least one of the spans was running; they may overlap and stand in any order."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return NO_SPANS
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start[first], reach[last])


def intersect(a: Spans, b: Spans) -> Spans:
    """When both were running: each pair of overlapping spans gives one piece."""
    first = np.searchsorted(b.end, a.start, side="right")
    after = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(after - first, 0)
    left = np.repeat(np.arange(len(a)), count)
    right = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return Spans(np.maximum(a.start[left], b.start[right]), np.minimum(a.end[left], b.end[right]))


def subtract(a: Spans, b: Spans) -> Spans:
    """When a was running and b was not."""
    return intersect(a, gaps(b, float(a.start[0]), float(a.end[-1]))) if len(a) else a


def gaps(spans: Spans, start: float, end: float) -> Spans:
    low = np.maximum(np.concatenate(([start], spans.end)), start)
    high = np.minimum(np.concatenate((spans.start, [end])), end)
    keep = high > low
    return Spans(low[keep], high[keep])


def running_sum(start: Floats, end: Floats, value: Floats) -> tuple[Floats, Floats, Floats]:
    """The sum of the values of all running spans as a step function: pieces (start, end, sum)."""
    time, change = np.concatenate((start, end)), np.concatenate((value, -value))
    order = np.lexsort((np.repeat([0, 1], len(start)), time))  # starts before ends at the same moment
    time, total = time[order], np.cumsum(change[order])
    keep = (time[1:] > time[:-1]) & (total[:-1] > 0.0)
    return time[:-1][keep], time[1:][keep], total[:-1][keep]
