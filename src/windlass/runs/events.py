"""The events of a run: one dataclass per kind of line in events.jsonl.

`Run.record(event)` writes them and `Run.events()` reads them. A field that a file does not have, or whose value
cannot be right (a text where a number belongs), is None. Kinds and keys that this version does not know are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from windlass.units import print_bytes, print_seconds, print_tokens

MAX_NUMBER = 1e18
"""Larger than every count, byte and second of a run; a larger number comes from a damaged line."""


def known_float(value: object) -> float | None:
    """The number, or None for anything that is not a finite number below MAX_NUMBER."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return float(value) if is_number else None  # type: ignore[arg-type]


def known_int(value: object) -> int | None:
    number = known_float(value)
    return int(value) if number is not None and number.is_integer() else None  # type: ignore[call-overload]


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _losses(value: object) -> dict[str, dict[str, Any]]:
    """Name -> figures of a validation pass; names without a loss are left out."""
    items = value.items() if isinstance(value, dict) else ()
    return {k: v for k, v in items if isinstance(v, dict) and known_float(v.get("loss")) is not None}


_CONVERTERS = {
    "int | None": known_int,
    "float | None": known_float,
    "str | None": _text,
    "list[str]": lambda value: [str(item) for item in value] if isinstance(value, list) else [],
    "dict[str, dict[str, Any]]": _losses,
}
"""How the value of a field is read from JSON, by the field's annotation; other annotations take any value."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    event: ClassVar[str] = ""
    """The kind, as `event` in the file."""
    sentence: ClassVar[str] = ""
    """The event for a reader; names in braces are fields."""
    time: float | None = None
    """Seconds since 1970; None: when it is recorded."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the line that this version does not know."""

    def as_dict(self) -> dict[str, Any]:
        """The line in events.jsonl. A field marked `optional` is left out when it is None."""
        names = [f for f in fields(self) if f.name not in ("time", "extra")]
        values = {f.name: getattr(self, f.name) for f in names}
        optional = {f.name for f in names if f.metadata.get("optional")}
        kept = {name: value for name, value in values.items() if not (name in optional and value is None)}
        return {"time": self.time, "event": self.event, **kept, **self.extra}

    def describe(self) -> str:
        """One sentence; what is not known is printed as "unknown"."""
        return self.sentence.format_map({name: _printed(name, value) for name, value in self.as_dict().items()})


_COUNTED = {"world_size": "device", "lost_steps": "step"}


def _printed(name: str, value: Any) -> str:
    if value is None:
        return f"unknown {_COUNTED[name]}s" if name in _COUNTED else "unknown"
    if name.endswith("seconds"):
        return print_seconds(value)
    if name in _COUNTED:
        return f"{value:,} {_COUNTED[name]}{'' if value == 1 else 's'}"
    if name == "bytes":
        return print_bytes(value)
    if name.endswith("tokens"):
        return print_tokens(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _arrows(changes: Any) -> str:
    """`key: old -> new` for each entry of key -> (old, new)."""
    pairs = changes.items() if isinstance(changes, dict) else ()
    parts = [f"{key}: {p[0]} -> {p[1]}" for key, p in pairs if isinstance(p, (list, tuple)) and len(p) == 2]
    return ", ".join(parts) or "unknown"


@dataclass(frozen=True, kw_only=True)
class ProcessStart(Event):
    """A process group began: the fields that `started` and `resumed` share."""

    world_size: int | None = None
    nodes: int | None = None
    layout: Any = None
    """The `[layout]` table as a dict; a text in files of early versions."""
    device: str | None = None
    devices_per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class Started(ProcessStart):
    """a process group began from nothing"""

    event = "started"
    sentence = "started on {world_size}"


@dataclass(frozen=True, kw_only=True)
class Resumed(ProcessStart):
    """a process group began from a checkpoint"""

    event = "resumed"
    sentence = "resumed at step {step} on {world_size}, {lost_steps} to do again"
    step: int | None = None
    tokens: int | None = None
    checkpoint: str | None = None
    lost_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Compiled(Event):
    """the first step is done; seconds since the process began"""

    event = "compiled"
    sentence = "first step done, {seconds} after the processes began"
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """a checkpoint is complete"""

    event = "saved"
    sentence = "saved step {step} ({bytes}, training waited {stall_seconds}, written in {write_seconds})"
    step: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    checkpoint: str | None = None
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """a save failed and will be tried again"""

    event = "save_failed"
    sentence = "saving step {step} failed: {error}"
    step: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(Event):
    """a superseded checkpoint was deleted"""

    event = "removed"
    sentence = "removed step {step}: {reason}"
    step: int | None = None
    bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointDamaged(Event):
    """a damaged checkpoint was set aside"""

    event = "damaged"
    sentence = "set {checkpoint} aside: {reason}"
    checkpoint: str | None = None
    reason: str | None = None
    moved_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """a validation pass; sources and languages hold loss and bits_per_byte of each"""

    event = "evaluated"
    sentence = "validation at step {step}: loss {val_loss}"
    step: int | None = None
    val_loss: float | None = None
    bits_per_byte: float | None = None
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    languages: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """a step changed no weights"""

    event = "skipped"
    sentence = "skipped step {step}: {reason}"
    step: int | None = None
    reason: str | None = None
    value: Any = None
    """loss and grad_norm of the step, as a dict."""


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """training went back to an earlier checkpoint; sequences is the range of data (from, to) that is left out"""

    event = "rollback"
    sentence = "went back from step {step} to {to_step}, skipping {skipped_tokens} tokens of data"
    step: int | None = None
    to_step: int | None = None
    skipped_tokens: int | None = None
    sequences: Any = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class SignalReceived(Event):
    """a signal or the wall-time limit asked the run to stop"""

    event = "signal"
    sentence = "asked to stop by {signal} at step {step}"
    signal: str | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """the run ended early after a save and can be resumed"""

    event = "stopped"
    sentence = "stopped at step {step} to be resumed: {reason}"
    step: int | None = None
    tokens: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """a rank failed"""

    event = "fault"
    sentence = "rank {rank} failed ({kind}): {error}"
    rank: int | None = None
    kind: str | None = None
    error: str | None = None
    host: str | None = None
    exit_code: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """the supervisor started the workers again"""

    event = "restarted"
    sentence = "restarted workers (attempt {attempt}): {reason}"
    attempt: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hang(Event):
    """the watchdog named a rank that makes no progress"""

    event = "hang"
    sentence = "rank {rank} hung for {seconds}: {where}"
    rank: int | None = None
    seconds: float | None = None
    where: str | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """a trace was written"""

    event = "profiled"
    sentence = "profiled steps {steps}"
    steps: str | None = None
    files: list[str] = field(default_factory=list)
    rank: int | None = None
    seconds: float | None = None
    request: str | None = None


@dataclass(frozen=True, kw_only=True)
class SaveInterval(Event):
    """save.every = "auto" chose an interval"""

    event = "interval"
    sentence = "{reason}"
    seconds: float | None = None
    steps: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutChanged(Event):
    """the run goes on in another layout"""

    event = "layout_changed"
    old: Any = None
    new: Any = None
    reason: str | None = None

    def describe(self) -> str:
        old, new = (value if isinstance(value, dict) else {"layout": value} for value in (self.old, self.new))
        changes = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
        return f"layout changed ({self.reason or 'unknown'}): {_arrows(changes)}"


@dataclass(frozen=True, kw_only=True)
class RecipeChanged(Event):
    """keys of the recipe changed between two starts; changes: key -> (old value, new value)"""

    event = "recipe_changed"
    changes: Any = None

    def describe(self) -> str:
        return f"recipe changed: {_arrows(self.changes)}"


@dataclass(frozen=True, kw_only=True)
class WeightsImported(Event):
    """the run was made from the weights of another tool"""

    event = "imported"
    sentence = "imported from {origin} as {dtype}"
    origin: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """the last step is done"""

    event = "finished"
    sentence = "finished at step {step}, loss {loss}"
    step: int | None = None
    tokens: int | None = None
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """the supervisor or the job chain stopped trying"""

    event = "gave_up"
    sentence = "gave up: {reason}"
    reason: str | None = None
    attempts: int | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this version does not know (a newer version's, or another tool's)."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def event(self) -> str:  # type: ignore[override]
        return self.kind

    def as_dict(self) -> dict[str, Any]:
        return {"time": self.time, "event": self.kind, **self.fields}

    def describe(self) -> str:
        return self.kind


EVENT_CLASSES: dict[str, type[Event]] = {
    cls.event: cls
    for cls in (
        Started, Resumed, Compiled, Saved, SaveFailed, CheckpointRemoved, CheckpointDamaged, Evaluated, StepSkipped,
        RolledBack, SignalReceived, Stopped, FaultEvent, Restarted, Hang, Profiled, SaveInterval, LayoutChanged,
        RecipeChanged, WeightsImported, Finished, GaveUp,
    )
}  # fmt: skip
"""Kind -> dataclass."""


def field_names(cls: type[Event]) -> list[str]:
    return [f.name for f in fields(cls) if f.name not in ("time", "extra")]


EVENTS = {kind: f"{cls.__doc__}: {', '.join(field_names(cls))}" for kind, cls in EVENT_CLASSES.items()}
"""Kind -> meaning and fields, for the reference page."""


def parse_event(line: Mapping[str, Any]) -> Event:
    """The event in one line of events.jsonl."""
    kind, time = str(line.get("event", "unknown")), known_float(line.get("time"))
    values = {key: value for key, value in line.items() if key not in ("event", "time")}
    cls = EVENT_CLASSES.get(kind)
    if cls is None:
        return UnknownEvent(kind=kind, fields=values, time=time)
    typed: dict[str, Any] = {}
    for f in fields(cls):
        if f.name in values and f.name != "extra":
            convert = _CONVERTERS.get(str(f.type))
            value = values.pop(f.name)
            typed[f.name] = value if convert is None else convert(value)
    return cls(**typed, time=time, extra=values)
