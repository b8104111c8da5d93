"""The order of a run: which source and which window is sequence number i. Pure arithmetic: no files, constant memory.

Sources take turns by the divisor method of Webster: after any number of blocks each source has had its exact share to
within a sequence or so, and the count of a source never goes back. Inside a block of 128 sequences the turns are
shuffled. The windows of a source come in a permuted order, a new order for each pass.

The permutation is computed, not stored: any element at any position in constant time and memory. A Feistel network
permutes the numbers below the next power of four; a result outside 0..n-1 is fed in again until it falls inside (cycle
walking, fewer than four rounds on average). It depends on its key only, so every rank on every machine, with any
version of numpy, computes the same order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from windlass.config import DataConfig
from windlass.errors import DataError

SHUFFLED_SEQUENCES = 128  # sequences whose sources are shuffled together
FOREVER = 2**62  # end of the last phase: no run gets there
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(values: U64) -> U64:
    """A 64-bit hash of each value (the finaliser of splitmix64)."""
    x = values + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int) -> int:
    """One 64-bit key from several numbers; order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix64(key ^ np.uint64(part & _MASK))
    return int(key[0])


def permute(positions: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """Where each of `positions` (0..size-1) lands under the permutation of 0..size-1 with this key."""
    values = np.asarray(positions, dtype=np.uint64)
    if size <= 1:
        return values.astype(np.int64)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = mix64(np.arange(_ROUNDS, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93) ^ np.uint64(key & _MASK))
    result = _network(values, half, mask, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        result[outside] = _network(result[outside], half, mask, keys)
        outside = outside[result[outside] >= np.uint64(size)]
    return result.astype(np.int64)


def _network(values: U64, half: np.uint64, mask: np.uint64, keys: U64) -> U64:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << half) | right


def shares(count: int, weights: Floats) -> Ints:
    """How many of the first `count` turns each source gets: sums to `count`, is close to its exact share, never goes
    back.

    Source s has its turn number k at the moment (k + 1/2) / weight. Only the moments around `count` are put in order;
    at equal moments the source that comes first in the list goes first.
    """
    spread = len(weights) + 1
    low = np.maximum(0, np.floor(weights * max(0, count - spread) + 0.5).astype(np.int64) - 1)
    high = np.where(weights > 0, np.floor(weights * (count + spread) + 0.5).astype(np.int64) + 1, 0)
    near = high - low
    source = np.repeat(np.arange(len(weights)), near)
    turn = np.arange(len(source)) - np.repeat(np.cumsum(near) - near, near) + low[source]
    order = np.lexsort((source, (turn + 0.5) / weights[source]))
    return low + np.bincount(source[order[: count - int(low.sum())]], minlength=len(weights))


@dataclass(frozen=True)
class MixPhase:
    """A part of training with one mix; `before` counts each source's sequences in the phases ahead of it."""

    start: int
    length: int
    weights: Floats
    before: Ints


@dataclass(frozen=True)
class SourcePasses:
    source: str
    tokens: int  # in the source
    trained: int  # tokens drawn from it during the run
    epochs: float
    limit: float
    slack: float = (
        0.0  # one sequence, in passes: turns are whole sequences, so a limit of 2 may be met as 2 and one sequence
    )


class Mixture:
    """Sequence number -> (source, window). A pure function of sizes, weights, seed and number."""

    def __init__(
        self, names: Sequence[str], windows: Sequence[int], phases: Sequence[tuple[int, Sequence[float]]], seed: int
    ) -> None:
        self.names, self.seed = tuple(names), seed
        self.windows = np.asarray(windows, dtype=np.int64)
        self.phases: list[MixPhase] = []
        before = np.zeros(len(names), dtype=np.int64)
        ends = [*(start for start, _ in phases[1:]), FOREVER]
        for (start, weights), end in zip(phases, ends, strict=True):
            total = math.fsum(weights)
            phase = MixPhase(start, end - start, np.array([float(weight) / total for weight in weights]), before)
            self.phases.append(phase)
            if end != FOREVER:
                before = before + shares(phase.length, phase.weights)
        # A block's table is 2 kB; a rank that reads a part of each batch uses the same blocks for its next part.
        self._block = lru_cache(maxsize=256)(self._make_block)

    def identity(self, indexes: npt.ArrayLike) -> tuple[Ints, Ints, Ints]:
        """(source number, window, pass) of each sequence."""
        numbers = np.asarray(indexes, dtype=np.int64)
        if numbers.size and int(numbers.min()) < 0:
            raise DataError("data.sequence-negative", f"sequence number {int(numbers.min())} is below 0")
        source, window, passes = np.empty_like(numbers), np.empty_like(numbers), np.empty_like(numbers)
        starts = np.array([phase.start for phase in self.phases], dtype=np.int64)
        phase_of = np.searchsorted(starts, numbers, side="right") - 1
        local = numbers - starts[phase_of]
        block_of = local // SHUFFLED_SEQUENCES
        for phase, block in set(zip(phase_of.ravel().tolist(), block_of.ravel().tolist(), strict=True)):
            inside = (phase_of == phase) & (block_of == block)
            offset = local[inside] - block * SHUFFLED_SEQUENCES
            source[inside], window[inside], passes[inside] = (column[offset] for column in self._block(phase, block))
        return source, window, passes

    def _make_block(self, phase_number: int, block: int) -> tuple[Ints, Ints, Ints]:
        phase = self.phases[phase_number]
        begin, end = block * SHUFFLED_SEQUENCES, min((block + 1) * SHUFFLED_SEQUENCES, phase.length)
        first = shares(begin, phase.weights)
        count = shares(end, phase.weights) - first
        ordered = np.repeat(np.arange(len(self.names), dtype=np.int64), count)
        turns = np.arange(end - begin, dtype=np.int64) + (first + phase.before - (np.cumsum(count) - count))[ordered]
        key = np.uint64(key_of(self.seed, 0x6D6978, phase_number, block))
        noise = mix64(np.arange(end - begin, dtype=np.uint64) ^ key)
        source = ordered[np.argsort(noise, kind="stable")]
        # Only the sources are shuffled: the turns of one source stay in order, so a pass ends before the next begins.
        turn = np.empty_like(turns)
        turn[np.argsort(source, kind="stable")] = turns
        passes = turn // self.windows[source]
        window = np.empty_like(turn)
        for number, turn_pass in set(zip(source.tolist(), passes.tolist(), strict=True)):
            inside = (source == number) & (passes == turn_pass)
            size = int(self.windows[number])
            window[inside] = permute(turn[inside] % size, size, key_of(self.seed, number, turn_pass))
        return source, window, passes

    def drawn(self, sequences: int) -> Ints:
        """How many of the first `sequences` come from each source, apart from the shuffle inside the last block."""
        counts = [max(0, min(phase.length, sequences - phase.start)) for phase in self.phases]
        return sum(
            (shares(count, phase.weights) for count, phase in zip(counts, self.phases, strict=True)),
            np.zeros(len(self.names), dtype=np.int64),
        )


def plan_phases(
    config: DataConfig, names: Sequence[str], windows: Sequence[int], seq_len: int
) -> list[tuple[int, list[float]]]:
    """(first sequence, weights) of each stage of a recipe; one error lists every problem of the mix."""
    sizes = dict(zip(names, windows, strict=True))
    natural = {name: size * config.epochs.get(name, 1.0) for name, size in sizes.items()}
    stages = sorted(((stage.start // seq_len, stage.mix) for stage in config.stages), key=lambda stage: stage[0])
    if not stages or stages[0][0] > 0:
        stages = [(0, config.mix or natural), *stages]
    problems: list[str] = []
    for start, mix in stages:
        place = "data.mix" if start == 0 else f"the stage from token {start * seq_len:,}"
        for name, weight in mix.items():
            if name not in sizes:
                problems.append(f"{place} names {name!r}, which the store does not have")
            if not (weight >= 0 and math.isfinite(weight)):
                problems.append(f"{place}: the weight of {name!r} is {weight}; a weight is at least 0")
            if weight > 0 and sizes.get(name) == 0:
                problems.append(
                    f"{place}: {name!r} has fewer than {seq_len + 1:,} tokens, too few for one sequence of {seq_len:,}"
                )
        if sum(weight for weight in mix.values() if weight > 0) <= 0:
            problems.append(f"{place}: no source has a weight above 0")
    if problems:
        raise DataError(
            "data.mix-invalid",
            "the mix does not fit the store:\n  " + "\n  ".join(problems),
            hint=f"sources of the store: {', '.join(names)}",
        )
    return [(start, [float(mix.get(name, 0.0)) for name in names]) for start, mix in stages]


def source_passes(
    mixture: Mixture, config: DataConfig, tokens: int, seq_len: int, source_tokens: Sequence[int]
) -> list[SourcePasses]:
    """How often each source is read when `tokens` are trained on, and how often it may be."""
    drawn = mixture.drawn(-(-tokens // seq_len))
    return [
        SourcePasses(
            source=name,
            tokens=size,
            trained=int(sequences) * seq_len,
            epochs=float(sequences / windows) if windows else 0.0,
            limit=config.epochs.get(name, config.max_epochs),
            slack=1.5 / windows if windows else 0.0,
        )
        for name, size, sequences, windows in zip(mixture.names, source_tokens, drawn, mixture.windows, strict=True)
    ]


def passes_line(report: Sequence[SourcePasses]) -> str:
    """The report as one line for a log, sources nearest to their limit first; empty without sources."""
    ordered = sorted(report, key=lambda p: p.epochs / p.limit, reverse=True)
    parts = [f"{p.source} {p.epochs:.2f} (limit {p.limit:g})" for p in ordered[:8]]
    more = f", and {len(ordered) - 8} more sources" if len(ordered) > 8 else ""
    return f"epochs: {', '.join(parts)}{more}" if parts else ""


def refuse_repeats(report: Sequence[SourcePasses]) -> None:
    """An error that lists every source which would be read more often than allowed."""
    lines = [
        f"{p.source}: {p.epochs:.2f} passes over {p.tokens:,} tokens, at most {p.limit:g} allowed"
        for p in report
        if p.epochs > p.limit + p.slack
    ]
    if lines:
        raise DataError(
            "data.source-repeated",
            "the run would repeat sources beyond their limit:\n  " + "\n  ".join(lines),
            hint="train on fewer tokens, lower the source's weight in data.mix, or raise its limit in data.epochs",
        )
