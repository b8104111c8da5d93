"""Which checkpoints stay? Last N, one every K for ever, best M by a metric; and will the disk hold them? Pure arithmetic.

A checkpoint is deleted only when it is complete and no rule wants it; the newest one always stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from windlass.checkpoint.files import Saved, remove, sweep_removed, whole_by_size
from windlass.config.save import SaveConfig, parse_interval
from windlass.errors import ConfigError
from windlass.runs.events import CheckpointRemoved
from windlass.runs.folder import Run
from windlass.units import print_bytes


@dataclass(frozen=True)
class Kept:
    step: int
    reasons: tuple[str, ...]
    """Which rules want it; empty: none does."""


def judge(saved: Sequence[Saved], config: SaveConfig) -> list[Kept]:
    """For every checkpoint, oldest first, the rules that keep it."""
    ordered = sorted(saved, key=lambda s: s.step)
    last = {s.step for s in ordered[-max(1, config.keep_last) :]}
    best = best_steps(ordered, config.keep_best, config.metric)
    ever = every_steps(ordered, config.keep_every)
    return [Kept(s.step, tuple(_reasons(s, config, last, best, ever))) for s in ordered]


def _reasons(saved: Saved, config: SaveConfig, last: set[int], best: Sequence[int], ever: set[int]) -> Iterable[str]:
    if saved.step in last:
        yield f"one of the last {config.keep_last}"
    if saved.step in best:
        yield f"number {best.index(saved.step) + 1} by {config.metric} ({saved.metric:.4f})"
    if saved.step in ever:
        yield f"one every {config.keep_every}"


def best_steps(saved: Sequence[Saved], count: int, metric: str) -> list[int]:
    """Steps with the lowest metric, best first; of equals the later one. One that was judged by nothing, or by another metric, takes no part."""
    known = [s for s in saved if s.metric is not None and s.metric_name in (metric, None)]
    return [s.step for s in sorted(known, key=lambda s: (s.metric, -s.step))[:count]]


def every_steps(saved: Sequence[Saved], rule: str | int | None) -> set[int]:
    """The first checkpoint at or after each multiple of the rule; those before the first multiple take no part."""
    if rule is None:
        return set()
    kind, size = parse_interval(rule)
    chosen: dict[int, int] = {}
    for s in sorted(saved, key=lambda s: s.step):
        position = s.step if kind == "steps" else s.tokens
        if position is not None and position >= size:
            chosen.setdefault(int(position // size), s.step)
    return set(chosen.values())


def superseded(saved: Sequence[Saved], config: SaveConfig) -> list[Saved]:
    """What may be deleted, oldest first; never the newest."""
    unwanted = {k.step for k in judge(saved, config) if not k.reasons}
    ordered = sorted(saved, key=lambda s: s.step)
    return [s for s in ordered[:-1] if s.step in unwanted]


def tidy(run: Run, config: SaveConfig) -> list[int]:
    """Delete what is superseded and say so in events.jsonl; the steps that were removed.

    One that has lost a file counts for nothing and is left for the next start to name: it must not push out a good one.
    """
    sweep_removed(run)
    doomed = superseded(whole_by_size(run), config)
    for saved in doomed:
        remove(saved.path)
        run.record(
            CheckpointRemoved(step=saved.step, bytes=saved.bytes, reason=f"superseded: not among {rules(config)}")
        )
    return [saved.step for saved in doomed]


def rules(config: SaveConfig) -> str:
    """The rules in words."""
    parts = [f"the last {config.keep_last}"]
    if config.keep_best:
        parts.append(f"the best {config.keep_best} by {config.metric}")
    if config.keep_every is not None:
        parts.append(f"one every {config.keep_every}")
    return ", ".join(parts)


# -- forecast -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """Disk use of a whole run's checkpoints."""

    checkpoint_bytes: int
    kept: int
    """Checkpoints that stay at the end."""
    peak_bytes: int
    """With the one that is being written before the oldest goes."""
    limit_bytes: int | None
    limit_name: str
    text: str

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes


def forecast(
    checkpoint_bytes: int, config: SaveConfig, *, steps: int, batch_tokens: int, free_bytes: int | None = None
) -> Forecast:
    """How much space the rules will need; measured against save.quota, else against the free space of the disk."""
    wanted = config.keep_last + config.keep_best + _for_ever(config.keep_every, steps, batch_tokens)
    saves = _saves(config, steps, batch_tokens)
    kept = wanted if saves is None else min(wanted, saves)
    peak = (kept + 1 if saves is None else min(kept + 1, saves)) * checkpoint_bytes
    limit, name = (config.quota, "save.quota") if config.quota is not None else (free_bytes, "free space")
    text = f"checkpoints: {kept} x {print_bytes(checkpoint_bytes)} kept ({rules(config)}), {print_bytes(peak)} at most while saving"
    text += f"; {name} {print_bytes(limit)}" if limit is not None else "; quota unknown"
    text += ": the later saves will fail" if limit is not None and peak > limit else ""
    return Forecast(checkpoint_bytes, kept, peak, limit, name, text)


def _for_ever(rule: str | int | None, steps: int, batch_tokens: int) -> int:
    if rule is None:
        return 0
    kind, size = parse_interval(rule)
    return int((steps if kind == "steps" else steps * batch_tokens) // size)


def _saves(config: SaveConfig, steps: int, batch_tokens: int) -> int | None:
    """How many checkpoints a run writes at most, its last one and the best ones included; None when only a clock can tell."""
    kind, size = ("seconds", 0.0) if config.every == "auto" else parse_interval(config.every)
    if kind == "seconds":
        return None
    return int((steps if kind == "steps" else steps * batch_tokens) // size) + 1 + config.keep_best


def check_quota(found: Forecast) -> None:
    """Refuse a run whose checkpoints cannot fit into its quota, before it starts. Free space may still grow: the text warns."""
    if found.fits is False and found.limit_name == "save.quota":
        limit = found.limit_bytes or 0
        room = limit // found.checkpoint_bytes - 1 if found.checkpoint_bytes else 0
        raise ConfigError(
            "checkpoint.checkpoints-need-kept-each",
            f"the checkpoints need {print_bytes(found.peak_bytes)} and {found.limit_name} is {print_bytes(limit)} ({found.kept} kept, {print_bytes(found.checkpoint_bytes)} each)",
            hint=f"keep at most {room} (save.keep_last, save.keep_best, save.keep_every)"
            if room > 0
            else "not even one fits beside the one being written: use a larger disk",
        )
