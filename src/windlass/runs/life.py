"""What happened to a run, and how much of its time moved it forward? Read from events.jsonl and metrics.jsonl alone; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.units import print_bytes, print_seconds, print_tokens

Event = Mapping[str, Any]
_BEGINS = ("started", "resumed")
CLOCK_SECONDS = 60.0
"""Clocks of two hosts, of which one goes on where the other stopped, differ by less."""
_ENDS = ("stopped", "finished", "fault", "hang", "gave_up")


@dataclass(frozen=True)
class Segment:
    """One process group, from its start to its end."""

    began_at: float
    ended_at: float
    """The last sign of life when the end itself was not recorded (a SIGKILL says nothing)."""
    end: str
    """stopped, finished, fault, hang, gave_up, cut off, or running."""
    world_size: int | None
    first_step: int
    last_step: int
    """The last step that was trained."""
    kept_step: int
    """The step that the next segment went on from; steps after it were lost and done again."""
    startup_seconds: float | None
    stall_seconds: float
    train_seconds: float
    """Time in training steps, from the metrics."""
    lost_seconds: float
    """Training time of the steps that were lost, with the end of the segment or by a rollback."""
    lost_steps: int


@dataclass(frozen=True)
class Moment:
    """One line of the timeline."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True)
class Life:
    """A run's whole history in numbers."""

    segments: list[Segment] = field(default_factory=list)
    timeline: list[Moment] = field(default_factory=list)
    wall_seconds: float | None = None
    """From the first start to the last sign of life, waits between jobs included."""
    active_seconds: float | None = None
    """Time in which a process group existed."""
    useful_seconds: float | None = None
    """Time in training steps that the final weights contain."""
    goodput: float | None = None
    """useful / wall: the share of wall time that moved the run forward."""
    goodput_active: float | None = None
    """useful / active: the same without the waits in the queue."""
    lost_steps: int = 0
    lost_tokens: int | None = None
    """Tokens trained on and lost with a fault; the resumed run trained on them again."""
    saves: int = 0
    failed_saves: int = 0
    faults: int = 0
    resumes: int = 0
    stall_seconds: float = 0.0
    median_stall_seconds: float | None = None


def life(events: Sequence[Event], metrics: Sequence[Mapping[str, Any]]) -> Life:
    """Segments, timeline and goodput. Lines may be missing or repeated; what cannot be known is None."""
    begins = [i for i, e in enumerate(events) if e.get("event") in _BEGINS]
    if not begins:
        return Life(timeline=[moment(e) for e in events])
    if _clock_went_back(events) is not None or _clock_went_back(metrics) is not None:
        return _life_without_clock(events, metrics)
    segments = [_segment(events, metrics, begin, end) for begin, end in zip(begins, [*begins[1:], None], strict=True)]
    stalls = _stalls(events)
    wall = segments[-1].ended_at - segments[0].began_at
    active = sum(s.ended_at - s.began_at for s in segments)
    useful = sum(s.train_seconds - s.lost_seconds for s in segments)
    return Life(
        segments=segments, timeline=[moment(e) for e in events], wall_seconds=wall, active_seconds=active, useful_seconds=useful,
        goodput=_share(useful, wall), goodput_active=_share(useful, active), lost_steps=sum(s.lost_steps for s in segments),
        lost_tokens=_tokens_of(sum(s.lost_steps for s in segments), metrics), saves=_count(events, "saved"), failed_saves=_count(events, "save_failed"),
        faults=_count(events, "fault") + _unrecorded(segments), resumes=_count(events, "resumed"), stall_seconds=sum(stalls),
        median_stall_seconds=stalls[len(stalls) // 2] if stalls else None,
    )  # fmt: skip


def _clock_went_back(lines: Sequence[Mapping[str, Any]]) -> int | None:
    """The first line that is older than the one before it, by more than the clocks of two hosts differ."""
    times = [float(line.get("time") or 0) for line in lines]
    return next((i for i in range(1, len(times)) if times[i] < times[i - 1] - CLOCK_SECONDS), None)


def _life_without_clock(events: Sequence[Event], metrics: Sequence[Mapping[str, Any]]) -> Life:
    """Lines are told apart by their times: after a jump only what is counted remains, and every share of time is unknown."""
    at = _clock_went_back(events)
    said = Moment(
        float(events[at if at is not None else -1].get("time") or 0),
        "clock",
        "the clock went back: times from here on cannot be compared with those before, so goodput is unknown",
    )
    timeline = [moment(e) for e in events]
    timeline.insert(len(timeline) if at is None else at, said)
    lost = sum(int(e.get("lost_steps") or 0) for e in events if e.get("event") == "resumed")
    lost += sum(
        max(0, int(e.get("step") or 0) - int(e.get("to_step") or 0)) for e in events if e.get("event") == "rollback"
    )
    stalls = _stalls(events)
    return Life(
        timeline=timeline, lost_steps=lost, lost_tokens=_tokens_of(lost, metrics), saves=_count(events, "saved"),
        failed_saves=_count(events, "save_failed"), faults=_count(events, "fault"), resumes=_count(events, "resumed"),
        stall_seconds=sum(stalls), median_stall_seconds=stalls[len(stalls) // 2] if stalls else None,
    )  # fmt: skip


def _stalls(events: Sequence[Event]) -> list[float]:
    found = (e.get("stall_seconds") for e in events if e.get("event") == "saved")
    return sorted(float(seconds) for seconds in found if seconds is not None)


def _segment(events: Sequence[Event], metrics: Sequence[Mapping[str, Any]], begin: int, end: int | None) -> Segment:
    mine = events[begin : end if end is not None else len(events)]
    began, until = float(mine[0]["time"]), float(events[end]["time"]) if end is not None else float("inf")
    lines = [m for m in metrics if began <= float(m.get("time") or 0) < until and isinstance(m.get("step"), int)]
    first = int(mine[0].get("step") or 0)
    last = max([first, *(int(m["step"]) for m in lines)])
    kept = int(events[end].get("step") or 0) if end is not None else last
    stretches = _stretches(mine, lines, first, kept)
    close = next((e for e in mine if e.get("event") in _ENDS), None)
    signs = [float(e["time"]) for e in mine if e.get("event") != "restarted"] + [float(m["time"]) for m in lines]
    ended = float(close["time"]) if close is not None else max(signs)
    first_done = next((e for e in mine if e.get("event") == "compiled" and e.get("seconds") is not None), None)
    return Segment(
        began_at=_process_began(began, first_done, events[begin - 1] if begin else None), ended_at=max(ended, *(float(m["time"]) for m in lines)) if lines else ended,
        end=str(close["event"]) if close is not None else ("cut off" if end is not None else "running"),
        world_size=mine[0].get("world_size"), first_step=first, last_step=last, kept_step=min(kept, last),
        startup_seconds=None if first_done is None else float(first_done["seconds"]),
        stall_seconds=sum(float(e.get("stall_seconds") or 0) for e in mine if e.get("event") == "saved"),
        train_seconds=sum(_train_seconds(part, at) for part, at, _ in stretches),
        lost_seconds=sum(_train_seconds([m for m in part if m["step"] > to], max(at, to)) for part, at, to in stretches),
        lost_steps=sum(max([0, *(int(m["step"]) - max(at, to) for m in part)]) for part, at, to in stretches),
    )  # fmt: skip


def _process_began(event: float, first_done: Event | None, before: Event | None) -> float:
    """Processes live for a while before they write their first line: imports, waiting for each other, building the model."""
    if first_done is None:
        return event
    lived = float(first_done["time"]) - float(first_done["seconds"])
    return min(event, max(lived, float(before["time"]) if before is not None else lived))


def _stretches(
    mine: Sequence[Event], lines: list[Mapping[str, Any]], first: int, kept: int
) -> list[tuple[list[Mapping[str, Any]], int, int]]:
    """(lines, step it began from, step that was kept) between rollbacks: each of them throws away what came after its target."""
    found, at = [], first
    for back in [e for e in mine if e.get("event") == "rollback"]:
        part = [m for m in lines if float(m["time"]) <= float(back["time"])]
        lines = lines[len(part) :]
        found.append((part, at, int(back.get("to_step") or 0)))
        at = int(back.get("to_step") or 0)
    return [*found, (lines, at, kept)]


def _train_seconds(lines: Iterable[Mapping[str, Any]], first: int) -> float:
    """Each line's step_seconds is the mean over the steps since the line before."""
    total, before = 0.0, first
    for line in lines:
        steps = max(0, int(line["step"]) - before)
        total += steps * float(line.get("step_seconds") or 0)
        before = max(before, int(line["step"]))
    return total


def _tokens_of(lost: int, metrics: Sequence[Mapping[str, Any]]) -> int | None:
    if not lost:
        return 0
    at = {
        int(m["step"]): int(m["tokens"])
        for m in metrics
        if isinstance(m.get("step"), int) and isinstance(m.get("tokens"), int)
    }
    steps = sorted(at)
    per_step = at[steps[-1]] / steps[-1] if steps and steps[-1] else None
    return None if per_step is None else round(lost * per_step)


def _unrecorded(segments: Sequence[Segment]) -> int:
    return sum(s.end == "cut off" for s in segments)


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(e.get("event") == kind for e in events)


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


# -- in words -------------------------------------------------------------------------------------------------------------

_WORDS = {
    "started": "started on {world_size}",
    "resumed": "resumed at step {step} on {world_size}, {lost_steps} to do again",
    "compiled": "first step done, {seconds} after the processes began",
    "saved": "saved step {step} ({bytes}, training waited {stall_seconds}, written in {write_seconds})",
    "save_failed": "saving step {step} failed: {error}",
    "removed": "removed step {step}: {reason}",
    "damaged": "set {checkpoint} aside: {reason}",
    "evaluated": "validation at step {step}: loss {val_loss}",
    "skipped": "skipped step {step}: {reason}",
    "rollback": "went back from step {step} to {to_step}, skipping {skipped_tokens} tokens of data",
    "signal": "asked to stop by {signal} at step {step}",
    "stopped": "stopped at step {step} to be resumed: {reason}",
    "fault": "rank {rank} failed ({kind}): {error}",
    "restarted": "workers started again (attempt {attempt}): {reason}",
    "hang": "rank {rank} hung for {seconds}: {where}",
    "profiled": "profiled steps {steps}",
    "interval": "{reason}",
    "finished": "finished at step {step}, loss {loss}",
    "gave_up": "gave up: {reason}",
}


def moment(event: Event) -> Moment:
    """One event in words; unknown kinds are shown by name."""
    kind = str(event.get("event", "unknown"))
    values = {key: _word(key, value) for key, value in event.items()}
    # An unknown kind comes from a file: it is text, never a pattern to fill in.
    text = _WORDS[kind].format_map(_Unknown(values)) if kind in _WORDS else kind
    return Moment(float(event.get("time") or 0), kind, text)


_COUNTED = {"world_size": "device", "lost_steps": "step"}


class _Unknown(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return _word(key, None)


def _word(key: str, value: Any) -> str:
    if value is None:
        return f"unknown {_COUNTED[key]}s" if key in _COUNTED else "unknown"
    if key.endswith("seconds") and isinstance(value, (int, float)):
        return print_seconds(value)
    if key in _COUNTED and isinstance(value, int):
        return f"{value:,} {_COUNTED[key]}{'' if value == 1 else 's'}"
    if key == "bytes":
        return print_bytes(value)
    if key.endswith("tokens") and isinstance(value, (int, float)):
        return print_tokens(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)
