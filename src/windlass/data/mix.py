"""Which source and which window is sequence number i? Pure arithmetic on sizes and weights: no files, constant memory.

Sources take turns by the divisor method of Webster: after any number of blocks each source has had its exact share to within
a sequence or so, and the count of a source never goes back. Inside a block of 128 sequences the turns are shuffled.
A source is visited window by window in a permuted order, a new order for each pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from windlass.config import DataConfig
from windlass.data.permute import key_of, mix64, permute
from windlass.errors import DataError

BLOCK = 128
"""Sequences whose sources are shuffled together."""
FOREVER = 2**62
"""Sequences of the last phase: no run gets there."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def shares(count: int, weights: Floats) -> Ints:
    """How many of the first `count` turns each source gets: sums to `count`, each close to its exact share, none ever goes back.

    Source s has its turn number k at the moment (k + 1/2) / weight. Only the moments around `count` are put in order;
    at equal moments the source that comes first in the list goes first.
    """
    spread = len(weights) + 1
    low = np.maximum(0, _turns(max(0, count - spread), weights) - 1)
    high = np.where(weights > 0, _turns(count + spread, weights) + 1, 0)
    near = high - low
    source = np.repeat(np.arange(len(weights)), near)
    turn = np.arange(len(source)) - np.repeat(np.cumsum(near) - near, near) + low[source]
    order = np.lexsort((source, (turn + 0.5) / weights[source]))
    return low + np.bincount(source[order[: count - int(low.sum())]], minlength=len(weights))


def _turns(moment: int, weights: Floats) -> Ints:
    return np.floor(weights * moment + 0.5).astype(np.int64)


@dataclass(frozen=True)
class Phase:
    """One stretch of training with one mix; `before` counts each source's sequences in the phases ahead of it."""

    start: int
    length: int
    weights: tuple[float, ...]
    before: tuple[int, ...]


@dataclass(frozen=True)
class Passes:
    """How often a source is read in a run."""

    source: str
    tokens: int
    """In the source."""
    trained: int
    """Drawn from it during the run."""
    epochs: float
    limit: float
    slack: float = 0.0
    """One sequence, in passes: turns are whole sequences, so a limit of 2 may be met as 2 and one sequence."""


class Mixture:
    """Sequence number -> (source, window). A pure function of sizes, weights, seed and number."""

    def __init__(
        self, names: Sequence[str], windows: Sequence[int], phases: Sequence[tuple[int, Sequence[float]]], seed: int
    ) -> None:
        self.names = tuple(names)
        self.windows = np.asarray(windows, dtype=np.int64)
        self.seed = seed
        self.phases = _phases(phases)
        # A block's table is 2 kB; a rank that reads a part of each batch comes back to the same blocks for its next part.
        self._block = lru_cache(maxsize=256)(self._make_block)

    def identity(self, indexes: npt.ArrayLike) -> tuple[Ints, Ints, Ints]:
        """(source number, window, pass) of each sequence."""
        wanted = np.asarray(indexes, dtype=np.int64)
        if wanted.size and int(wanted.min()) < 0:
            raise DataError("data.sequence-number-below", f"sequence number {int(wanted.min())} is below 0")
        source, window, passed = np.empty_like(wanted), np.empty_like(wanted), np.empty_like(wanted)
        starts = np.array([phase.start for phase in self.phases], dtype=np.int64)
        phase_of = np.searchsorted(starts, wanted, side="right") - 1
        local = wanted - starts[phase_of]
        block_of = local // BLOCK
        for phase, block in set(zip(phase_of.ravel().tolist(), block_of.ravel().tolist(), strict=True)):
            here = (phase_of == phase) & (block_of == block)
            offset = local[here] - block * BLOCK
            source[here], window[here], passed[here] = (column[offset] for column in self._block(phase, block))
        return source, window, passed

    def _windows_of(self, source: Ints, turn: Ints) -> tuple[Ints, Ints, Ints]:
        size = self.windows[source]
        passes = turn // size
        window = np.empty_like(turn)
        for number, turn_pass in set(zip(source.tolist(), passes.tolist(), strict=True)):
            here = (source == number) & (passes == turn_pass)
            key = key_of(self.seed, number, turn_pass)
            window[here] = permute(turn[here] % self.windows[number], int(self.windows[number]), key)
        return source, window, passes

    def _make_block(self, phase: int, block: int) -> tuple[Ints, Ints, Ints]:
        """(source, window, pass) of each sequence of a block."""
        plan = self.phases[phase]
        begin, end = block * BLOCK, min((block + 1) * BLOCK, plan.length)
        weights = np.array(plan.weights)
        first = shares(begin, weights)
        count = shares(end, weights) - first
        sources = np.repeat(np.arange(len(weights), dtype=np.int64), count)
        starts = first + np.array(plan.before) - (np.cumsum(count) - count)
        turns = np.arange(end - begin, dtype=np.int64) + starts[sources]
        noise = mix64(np.arange(end - begin, dtype=np.uint64) ^ np.uint64(key_of(self.seed, 0x6D6978, phase, block)))
        shuffled = sources[np.argsort(noise, kind="stable")]
        # Only whose turn it is is shuffled: a source's own turns stay in order, so a pass ends before the next begins.
        in_order = np.empty_like(turns)
        in_order[np.argsort(shuffled, kind="stable")] = turns
        return self._windows_of(shuffled, in_order)

    def due(self, sequences: int) -> Ints:
        """Each source's share of the first `sequences`, leaving aside the shuffle inside the last block."""
        spans = [(phase, max(0, min(phase.length, sequences - phase.start))) for phase in self.phases]
        total = np.zeros(len(self.names), dtype=np.int64)
        for phase, here in spans:
            total += shares(here, np.array(phase.weights))
        return total

    def drawn(self, sequences: int) -> Ints:
        """How many of the first `sequences` come from each source, exactly."""
        total = np.zeros(len(self.names), dtype=np.int64)
        for number, phase in enumerate(self.phases):
            here = max(0, min(phase.length, sequences - phase.start))
            whole = here // BLOCK * BLOCK
            total += shares(whole, np.array(phase.weights))
            if here > whole:
                sources = self._block(number, whole // BLOCK)[0]
                total += np.bincount(sources[: here - whole], minlength=len(total))
        return total


def _phases(given: Sequence[tuple[int, Sequence[float]]]) -> tuple[Phase, ...]:
    made: list[Phase] = []
    before = np.zeros(len(given[0][1]), dtype=np.int64)
    for number, (start, weights) in enumerate(given):
        total = math.fsum(weights)
        normal = tuple(float(w) / total for w in weights)
        length = given[number + 1][0] - start if number + 1 < len(given) else FOREVER
        made.append(Phase(start, length, normal, tuple(int(b) for b in before)))
        if length < FOREVER:
            before = before + shares(length, np.array(normal))
    return tuple(made)


def plan_phases(
    config: DataConfig, names: Sequence[str], windows: Sequence[int], seq_len: int
) -> list[tuple[int, list[float]]]:
    """(first sequence, weights) of each stage of a recipe; every problem of the mix in one message."""
    base = (0, config.mix or _natural(config, names, windows))
    stages = sorted(((stage.start // seq_len, stage.mix) for stage in config.stages), key=lambda item: item[0])
    if stages and stages[0][0] == 0:
        base, stages = stages[0], stages[1:]
    problems = [p for start, mix in (base, *stages) for p in _problems(mix, names, windows, start * seq_len, seq_len)]
    if problems:
        raise DataError(
            "data.mix-does-fit-store",
            "the mix does not fit the store:\n  " + "\n  ".join(problems),
            hint=f"sources of the store: {', '.join(names)}",
        )
    return [(start, [float(mix.get(name, 0.0)) for name in names]) for start, mix in (base, *stages)]


def _natural(config: DataConfig, names: Sequence[str], windows: Sequence[int]) -> dict[str, float]:
    return {name: size * config.epochs.get(name, 1.0) for name, size in zip(names, windows, strict=True)}


def _problems(
    mix: Mapping[str, float], names: Sequence[str], windows: Sequence[int], start: int, seq_len: int
) -> list[str]:
    where = "data.mix" if start == 0 else f"the stage from token {start:,}"
    size = dict(zip(names, windows, strict=True))
    found = [f"{where} names {name!r}, which the store does not have" for name in mix if name not in size]
    found += [
        f"{where}: the weight of {name!r} is {w}; a weight is at least 0"
        for name, w in mix.items()
        if not (w >= 0 and math.isfinite(w))
    ]
    found += [
        f"{where}: {name!r} has fewer than {seq_len + 1:,} tokens, too few for one sequence of {seq_len:,}"
        for name, w in mix.items()
        if w > 0 and size.get(name) == 0
    ]
    if sum(w for w in mix.values() if w > 0) <= 0:
        found.append(f"{where}: no source has a weight above 0")
    return found


def passes(
    mixture: Mixture, config: DataConfig, tokens: int, seq_len: int, source_tokens: Sequence[int]
) -> list[Passes]:
    """How often each source is read when `tokens` are trained on, and how often it may be."""
    due = mixture.due(-(-tokens // seq_len))
    return [
        Passes(
            name,
            size,
            int(d) * seq_len,
            float(d / w) if w else 0.0,
            config.epochs.get(name, config.max_epochs),
            1.5 / w if w else 0.0,
        )
        for name, size, d, w in zip(mixture.names, source_tokens, due, mixture.windows, strict=True)
    ]


def passes_line(report: Sequence[Passes]) -> str:
    """The report as one line for a log; empty without sources. The limits nearest to being met come first."""
    shown = sorted(report, key=lambda p: p.epochs / p.limit, reverse=True)
    parts = [f"{p.source} {p.epochs:.2f} of at most {p.limit:g}" for p in shown[:8]]
    more = f", and {len(shown) - 8} sources more" if len(shown) > 8 else ""
    return f"passes over the data: {', '.join(parts)}{more}" if parts else ""


def refuse_repeats(report: Sequence[Passes]) -> None:
    """An error that names every source which would be read more often than allowed."""
    over = [p for p in report if p.epochs > p.limit + p.slack]
    if over:
        lines = "\n  ".join(
            f"{p.source}: {p.epochs:.2f} passes over {p.tokens:,} tokens, at most {p.limit:g} allowed" for p in over
        )
        raise DataError(
            "data.run-would-repeat-sources",
            f"the run would repeat sources beyond their limit:\n  {lines}",
            hint="train on fewer tokens, lower the source's weight in data.mix, or raise its limit in data.epochs",
        )
