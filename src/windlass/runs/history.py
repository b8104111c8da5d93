"""History of a run: its starts, its timeline, and the share of its time that moved it forward (goodput).

Pure functions of the events and the metrics lines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from windlass.runs.events import (
    MAX_NUMBER,
    Compiled,
    Event,
    FaultEvent,
    Finished,
    GaveUp,
    Hang,
    ProcessStart,
    Restarted,
    Resumed,
    RolledBack,
    Saved,
    SaveFailed,
    Stopped,
)
from windlass.runs.measured import Column, Numbers

# The clocks of two hosts, of which one resumes what the other began, differ by less.
CLOCK_SECONDS = 60.0
_ENDS = (Stopped, Finished, FaultEvent, Hang, GaveUp)


@dataclass(frozen=True)
class StepTimes:
    """The metrics lines that have a step and a time: what the history needs of them, NaN where unknown."""

    step: Numbers
    tokens: Numbers
    step_seconds: Numbers
    time: Numbers

    @classmethod
    def read(cls, column: Column) -> Self:
        step, tokens, step_seconds, time = (
            np.where(np.abs(values := column(key)) < MAX_NUMBER, values, np.nan)
            for key in ("step", "tokens", "step_seconds", "time")
        )
        return cls(step, tokens, step_seconds, time).where((step == np.floor(step)) & ~np.isnan(time))

    def where(self, mask: npt.NDArray[np.bool_]) -> Self:
        return type(self)(self.step[mask], self.tokens[mask], self.step_seconds[mask], self.time[mask])

    def last_step(self, default: int) -> int:
        return int(self.step.max(initial=default))

    def train_seconds(self, first: int) -> float:
        """Time in the steps after `first`. Each line's step_seconds is the mean over the steps since the line before."""
        before = np.maximum.accumulate(np.concatenate([[first], self.step]))[:-1]
        return float(np.nansum(np.maximum(0, self.step - before) * self.step_seconds))


@dataclass(frozen=True)
class Segment:
    """One process group, from its start to its end."""

    began_at: float
    # The last sign of life when the end itself was not recorded (after a SIGKILL).
    ended_at: float
    # stopped, finished, fault, hang, gave_up, cut off, or running.
    end: str
    world_size: int | None
    nodes: int | None
    first_step: int
    # The last step that was trained.
    last_step: int
    # The step that the next segment resumed from; steps after it were lost and done again.
    kept_step: int
    startup_seconds: float | None
    # Of it, loading the checkpoint; None: not measured, or begun from nothing.
    load_seconds: float | None
    stall_seconds: float
    # Time in training steps, from the metrics.
    train_seconds: float
    # Training time of the steps that were lost, at the end of the segment or by a rollback.
    lost_seconds: float
    lost_steps: int


@dataclass(frozen=True)
class RunHistory:
    """A run's history in numbers; None: unknown."""

    segments: list[Segment] = field(default_factory=list)
    # From the first start to the last sign of life, waits between jobs included.
    wall_seconds: float | None = None
    # Time in which a process group existed.
    active_seconds: float | None = None
    # Of all attempts: the time in which an attempt's processes existed x its nodes.
    node_hours: float | None = None
    # Time in training steps that the final weights contain.
    useful_seconds: float | None = None
    # useful / wall: the share of wall time that moved the run forward.
    goodput: float | None = None
    # useful / active: the same without the waits in the queue.
    goodput_active: float | None = None
    lost_steps: int = 0
    # Tokens trained on and lost with a fault; the resumed run trained on them again.
    lost_tokens: int | None = None
    saves: int = 0
    failed_saves: int = 0
    faults: int = 0
    resumes: int = 0
    stall_seconds: float = 0.0
    median_stall_seconds: float | None = None
    # Time of the first line that is older than the one before it: shares of time are then unknown.
    clock_jumped_at: float | None = None


def read_history(events: Iterable[Event], column: Column) -> RunHistory:
    """Segments and goodput. Events and metrics lines may be missing or repeated; those without a time are left out."""
    events = [e for e in events if e.time is not None]
    lines = StepTimes.read(column)
    begins = [i for i, e in enumerate(events) if isinstance(e, ProcessStart)]
    stalls = sorted(e.stall_seconds for e in events if isinstance(e, Saved) and e.stall_seconds is not None)
    times = (np.array([_time(event) for event in events]), lines.time)
    jumps = [later for series in times for later in series[1:][np.diff(series) < -CLOCK_SECONDS].tolist()]
    segments: list[Segment] = []
    wall = active = useful = node_hours = None
    if begins and not jumps:
        segments = [
            _segment(events, lines, begin, end) for begin, end in pairwise([*begins, None]) if begin is not None
        ]
        wall = segments[-1].ended_at - segments[0].began_at
        active = sum(s.ended_at - s.began_at for s in segments)
        node_seconds = [(s.ended_at - s.began_at) * s.nodes for s in segments if s.nodes is not None]
        node_hours = sum(node_seconds) / 3600 if len(node_seconds) == len(segments) else None
        useful = sum(s.train_seconds - s.lost_seconds for s in segments)
        lost = sum(s.lost_steps for s in segments)
    else:  # without comparable times only what the events count themselves is known
        lost = sum(e.lost_steps or 0 for e in events if isinstance(e, Resumed))
        lost += sum(max(0, (e.step or 0) - (e.to_step or 0)) for e in events if isinstance(e, RolledBack))
    counted = lines.where(~np.isnan(lines.tokens))
    at = int(counted.step.argmax()) if len(counted.step) else None
    tokens_per_step = counted.tokens[at] / counted.step[at] if at is not None and counted.step[at] else None
    saves, failed_saves, faults, resumes = (
        sum(isinstance(e, kind) for e in events) for kind in (Saved, SaveFailed, FaultEvent, Resumed)
    )
    return RunHistory(
        segments=segments,
        wall_seconds=wall,
        active_seconds=active,
        node_hours=node_hours,
        useful_seconds=useful,
        goodput=_share(useful, wall),
        goodput_active=_share(useful, active),
        lost_steps=lost,
        lost_tokens=0 if not lost else None if tokens_per_step is None else round(lost * float(tokens_per_step)),
        saves=saves,
        failed_saves=failed_saves,
        faults=faults + sum(s.end == "cut off" for s in segments),
        resumes=resumes,
        stall_seconds=sum(stalls),
        median_stall_seconds=stalls[len(stalls) // 2] if stalls else None,
        clock_jumped_at=jumps[0] if jumps and begins else None,
    )


def _time(event: Event) -> float:
    return event.time or 0.0


def _segment(events: Sequence[Event], all_lines: StepTimes, begin: int, end: int | None) -> Segment:
    own = events[begin:end]
    start = own[0]
    assert isinstance(start, ProcessStart)
    until = float("inf") if end is None else _time(events[end])
    lines = all_lines.where((all_lines.time >= _time(start)) & (all_lines.time < until))
    first = _start_step(start)
    last = lines.last_step(first)
    kept = last if end is None else _start_step(events[end])
    # (lines, first step, kept step) between rollbacks; each rollback drops what follows its target.
    stretches, remaining, at = [], lines, first
    for rollback in [e for e in own if isinstance(e, RolledBack)]:
        is_before = remaining.time <= _time(rollback)
        stretches.append((remaining.where(is_before), at, rollback.to_step or 0))
        remaining, at = remaining.where(~is_before), rollback.to_step or 0
    stretches.append((remaining, at, kept))
    close = next((e for e in own if isinstance(e, _ENDS)), None)
    signs = [float(lines.time.max())] if len(lines.time) else []
    signs += [_time(e) for e in own if not isinstance(e, Restarted)] if close is None else [_time(close)]
    compiled = next((e for e in own if isinstance(e, Compiled) and e.seconds is not None), None)
    began_at = _time(start)
    if compiled is not None:  # processes exist before their first event: imports, waiting for each other, the model
        lived_since = _time(compiled) - (compiled.seconds or 0.0)
        began_at = min(began_at, max(lived_since, _time(events[begin - 1]) if begin else lived_since))
    return Segment(
        began_at=began_at,
        ended_at=max(signs),
        end=close.event if close is not None else ("running" if end is None else "cut off"),
        world_size=start.world_size,
        nodes=start.nodes,
        first_step=first,
        last_step=last,
        kept_step=min(kept, last),
        startup_seconds=compiled.seconds if compiled else None,
        load_seconds=start.load_seconds if isinstance(start, Resumed) else None,
        stall_seconds=sum(e.stall_seconds or 0.0 for e in own if isinstance(e, Saved)),
        train_seconds=sum(part.train_seconds(at) for part, at, _ in stretches),
        lost_seconds=sum(part.where(part.step > to).train_seconds(max(at, to)) for part, at, to in stretches),
        lost_steps=sum(part.last_step(max(at, to)) - max(at, to) for part, at, to in stretches),
    )


def _start_step(event: Event) -> int:
    return event.step or 0 if isinstance(event, Resumed) else 0


def _share(part: float | None, total: float | None) -> float | None:
    return min(1.0, part / total) if part is not None and total else None
