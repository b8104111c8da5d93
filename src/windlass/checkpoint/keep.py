"""Which checkpoints are kept (last N, best M by a metric, one every K), and whether the disk can hold them.

A checkpoint is deleted only when it is complete and no rule keeps it; the newest one always stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.checkpoint.files import SavedCheckpoint, complete_by_size, remove, sweep_removed
from windlass.config.save import SaveConfig, parse_interval
from windlass.config.tune import lower_is_better
from windlass.errors import ConfigError
from windlass.runs.events import CheckpointRemoved
from windlass.runs.folder import Run
from windlass.units import print_bytes


def keep_reasons(saved: Sequence[SavedCheckpoint], config: SaveConfig) -> dict[int, tuple[str, ...]]:
    """Step -> the rules that keep it (empty: none), oldest first."""
    ordered = sorted(saved, key=lambda s: s.step)
    reasons: dict[int, list[str]] = {s.step: [] for s in ordered}
    for s in ordered[-max(1, config.keep_last) :]:
        reasons[s.step].append(f"one of the last {config.keep_last}")
    # One without a metric, or with the value of another metric, cannot be the best. Of equals the later one is.
    rated = [(s.metric, -s.step) for s in ordered
             if s.metric is not None and s.manifest.get("metric_name") in (config.metric, None)]  # fmt: skip
    for rank, (metric, negative_step) in enumerate(sorted(rated)[: config.keep_best], 1):
        reasons[-negative_step].append(f"number {rank} by {config.metric} ({shown_metric(config.metric, metric):.4f})")
    if config.keep_every is not None:  # the first one at or after each multiple of the interval
        kind, size = parse_interval(config.keep_every)
        multiples = {s.step: int(((s.step if kind == "steps" else s.tokens) or 0) // size) for s in reversed(ordered)}
        for step in {multiple: step for step, multiple in multiples.items() if multiple > 0}.values():
            reasons[step].append(f"one every {config.keep_every}")
    return {step: tuple(texts) for step, texts in reasons.items()}


def shown_metric(name: str, value: float) -> float:
    """The value itself: scores of fine-tuning are kept with a minus sign, so that the lowest value is the best."""
    metric = name.removeprefix("val_").partition("/")[0]
    return value if lower_is_better(metric) else -value


def superseded(saved: Sequence[SavedCheckpoint], config: SaveConfig) -> list[SavedCheckpoint]:
    """Checkpoints that may be deleted, oldest first."""
    reasons = keep_reasons(saved, config)
    return [s for s in sorted(saved, key=lambda s: s.step) if not reasons[s.step]]


def tidy(run: Run, config: SaveConfig) -> list[int]:
    """Delete superseded checkpoints and record it in events.jsonl. Returns their steps.

    One that has lost a file is ignored and left for the next start to report: it must not displace a good one.
    """
    sweep_removed(run)
    unwanted = superseded(complete_by_size(run), config)
    for saved in unwanted:
        remove(saved.path)
        run.record(
            CheckpointRemoved(step=saved.step, bytes=saved.bytes, reason=f"superseded: not among {rules(config)}")
        )
    return [saved.step for saved in unwanted]


def rules(config: SaveConfig) -> str:
    best = f"the best {config.keep_best} by {config.metric}" if config.keep_best else ""
    every = f"one every {config.keep_every}" if config.keep_every is not None else ""
    return ", ".join(filter(None, (f"the last {config.keep_last}", best, every)))


@dataclass(frozen=True)
class Forecast:
    checkpoint_bytes: int
    kept: int  # checkpoints that stay at the end
    peak_bytes: int  # with the one that is being written before the oldest is deleted
    limit_bytes: int | None
    limit_name: str
    text: str

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes


def forecast(
    checkpoint_bytes: int, config: SaveConfig, *, steps: int, batch_tokens: int, free_bytes: int | None = None
) -> Forecast:
    """Space that the rules need, compared with save.quota, else with the free space of the disk."""

    def times(rule: str | int) -> int | None:
        """How often an interval passes during the run; None for one in seconds."""
        kind, size = parse_interval(rule)
        return None if kind == "seconds" else int((steps if kind == "steps" else steps * batch_tokens) // size)

    kept = config.keep_last + config.keep_best
    kept += times(config.keep_every) or 0 if config.keep_every is not None else 0
    peak = kept + 1
    periodic_saves = None if config.every == "auto" else times(config.every)
    if periodic_saves is not None:  # with the last one and the best ones
        kept, peak = (min(count, periodic_saves + 1 + config.keep_best) for count in (kept, peak))
    peak_bytes = peak * checkpoint_bytes
    limit, name = (config.quota, "save.quota") if config.quota is not None else (free_bytes, "free space")
    sizes = f"{kept} x {print_bytes(checkpoint_bytes)}, peak {print_bytes(peak_bytes)}"
    text = f"checkpoints: keeping {rules(config)} ({sizes})"
    text += f"; {name} {print_bytes(limit)}" if limit is not None else "; quota unknown"
    text += ": later saves will fail" if limit is not None and peak_bytes > limit else ""
    return Forecast(checkpoint_bytes, kept, peak_bytes, limit, name, text)


def check_quota(need: Forecast) -> None:
    """Refuse a run whose checkpoints exceed its quota, before it starts. Free space may still grow: its text warns."""
    if need.fits is False and need.limit_name == "save.quota":
        limit = need.limit_bytes or 0
        room = limit // need.checkpoint_bytes - 1 if need.checkpoint_bytes else 0
        hint = f"keep at most {room} (save.keep_last, save.keep_best, save.keep_every)"
        raise ConfigError(
            "checkpoint.quota-too-small",
            f"the checkpoints need {print_bytes(need.peak_bytes)} and {need.limit_name} is {print_bytes(limit)} "
            f"({need.kept} kept, {print_bytes(need.checkpoint_bytes)} each)",
            hint=hint
            if room > 0
            else "increase the quota: it has no room for one checkpoint in addition to the one being written",
        )
