"""The events of a run: one dataclass per kind of line in events.jsonl.

`Run.record(event)` writes them and `Run.events()` reads them. A field that a file does not have, or whose value
cannot be right (a text where a number belongs), is None. Kinds and keys that this version does not know are kept.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

from windlass.units import print_bytes, print_seconds, print_tokens

# Larger than every count, byte and second of a run; a larger number comes from a damaged line.
MAX_NUMBER = 1e18


def known_float(value: object) -> float | None:
    """The number, or None for anything that is not a finite number below MAX_NUMBER."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return float(value) if is_number else None  # type: ignore[arg-type]


def known_int(value: object) -> int | None:
    number = known_float(value)
    return int(value) if number is not None and number.is_integer() else None  # type: ignore[call-overload]


def _losses(value: object) -> dict[str, dict[str, Any]]:
    """Name -> figures of a validation pass; names without a loss are left out."""
    items = value.items() if isinstance(value, dict) else ()
    return {k: v for k, v in items if isinstance(v, dict) and known_float(v.get("loss")) is not None}


def _numbers(value: object) -> list[float | None]:
    return [known_float(item) for item in value] if isinstance(value, list) else []


# How the value of a field is read from JSON, by the field's annotation; other annotations take any value.
_CONVERTERS: dict[object, Callable[[Any], Any]] = {
    "int | None": known_int,
    "float | None": known_float,
    "str | None": lambda value: None if value is None else str(value),
    "list[str]": lambda value: [str(item) for item in value] if isinstance(value, list) else [],
    "list[float | None]": _numbers,
    "dict[str, dict[str, Any]]": _losses,
}


def read_fields(cls: type[Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that a JSON line has; a value that cannot be right is None. `extra` is not read."""
    return {name: convert(line[name]) for name, convert in _converters(cls) if name in line}  # type: ignore[arg-type]


@cache
def _converters(cls: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Cached per class, because a list of runs reads thousands of events."""
    return [(f.name, _CONVERTERS.get(f.type, lambda value: value)) for f in fields(cls) if f.name != "extra"]


# Kind -> dataclass; each class registers itself.
EVENT_CLASSES: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    event: ClassVar[str] = ""  # the kind, as in the file
    meaning: ClassVar[str] = ""
    sentence: ClassVar[str] = ""  # the event for a reader; names in braces are fields
    time: float | None = None  # seconds since 1970; None: when it is recorded
    extra: Mapping[str, Any] = field(default_factory=dict)  # keys of the line that this version does not know

    def __init_subclass__(cls, event: str = "", meaning: str = "", sentence: str = "") -> None:
        if event:
            cls.event, cls.meaning, cls.sentence = event, meaning, sentence
            EVENT_CLASSES[event] = cls

    def as_dict(self) -> dict[str, Any]:
        """The line in events.jsonl. A field marked `optional` is left out when it is None."""
        optional = {f.name for f in fields(self) if f.metadata.get("optional")}
        names = [name for name in field_names(type(self)) if name not in optional or getattr(self, name) is not None]
        return {"time": self.time, "event": self.event, **{name: getattr(self, name) for name in names}, **self.extra}

    def describe(self) -> str:
        """One sentence; a missing value is printed as "unknown"."""
        texts = {}
        for name in field_names(type(self)):
            value, printer = getattr(self, name), _PRINTERS.get(name.rpartition("_")[2])
            if name in _COUNTED:
                count = "unknown" if value is None else f"{value:,}"
                texts[name] = f"{count} {_COUNTED[name]}{'' if value == 1 else 's'}"
            elif value is None:
                texts[name] = "unknown"
            else:
                texts[name] = printer(value) if printer else f"{value:.4f}" if isinstance(value, float) else str(value)
        return self.sentence.format_map(texts)


# How fields are printed, by the last word of their names.
_PRINTERS: dict[str, Callable[[Any], str]] = {"seconds": print_seconds, "bytes": print_bytes, "tokens": print_tokens}
_COUNTED = {"world_size": "device", "lost_steps": "step"}


def _arrows(changes: Any) -> str:
    """`key: old -> new` for each entry of key -> (old, new)."""
    pairs = changes.items() if isinstance(changes, dict) else ()
    parts = [f"{key}: {p[0]} -> {p[1]}" for key, p in pairs if isinstance(p, (list, tuple)) and len(p) == 2]
    return ", ".join(parts) or "unknown"


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessStart(Event):
    """A process group started: the fields that `started` and `resumed` share."""

    world_size: int | None = None
    nodes: int | None = None
    # The `[layout]` table as a dict; a text in files of early versions.
    layout: Any = None
    device: str | None = None
    devices_per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class Started(
    ProcessStart,
    event="started",
    meaning="training started from scratch",
    sentence="started on {world_size}",
):
    pass


@dataclass(frozen=True, kw_only=True)
class Resumed(
    ProcessStart,
    event="resumed",
    meaning="training resumed from a checkpoint",
    sentence="resumed at step {step} on {world_size}, {lost_steps} to repeat",
):
    step: int | None = None
    tokens: int | None = None
    checkpoint: str | None = None
    lost_steps: int | None = None
    # Reading and verifying the checkpoint; part of the start-up.
    load_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Compiled(
    Event,
    event="compiled",
    meaning="the first step is done; seconds since the process started",
    sentence="first step done, {seconds} after the processes started",
):
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saved(
    StepEvent,
    event="saved",
    meaning="a checkpoint is complete",
    sentence="saved step {step} ({bytes}, training waited {stall_seconds}, written in {write_seconds})",
):
    tokens: int | None = None
    bytes: int | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    checkpoint: str | None = None
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class SaveFailed(
    StepEvent,
    event="save_failed",
    meaning="a save failed and will be tried again",
    sentence="saving step {step} failed: {error}",
):
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(
    StepEvent,
    event="removed",
    meaning="a superseded checkpoint was deleted",
    sentence="removed step {step}: {reason}",
):
    bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointDamaged(
    Event,
    event="damaged",
    meaning="a damaged checkpoint was set aside",
    sentence="set {checkpoint} aside: {reason}",
):
    checkpoint: str | None = None
    reason: str | None = None
    moved_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointsLost(
    StepEvent,
    event="checkpoints_lost",
    meaning="saved checkpoints are missing from the disk; training continues from to_step (0: from scratch)",
    sentence="{checkpoint} (step {step}) is missing: continuing from step {to_step}, {lost_steps} and {lost_tokens} "
    "tokens are lost",
):
    to_step: int | None = None
    lost_steps: int | None = None
    lost_tokens: int | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluated(
    StepEvent,
    event="evaluated",
    meaning="a validation pass; sources and languages hold loss and bits_per_byte of each",
    sentence="validation at step {step}: loss {val_loss}",
):
    val_loss: float | None = None
    bits_per_byte: float | None = None
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    languages: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Of a fine-tuning: accuracy, macro_f1, ...
    scores: dict[str, float | None] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayersMeasured(
    StepEvent,
    event="layers",
    meaning="measurements of train.instruments by layer; the last number of each list is for embedding, last norm "
    "and head",
):
    # Before clipping.
    gradient_norm: list[float | None] = field(default_factory=list)
    weight_norm: list[float | None] = field(default_factory=list)
    update_norm: list[float | None] = field(default_factory=list)
    # Root of the mean square of the layer's output.
    activation_rms: list[float | None] = field(default_factory=list)
    max_logit: list[float | None] = field(default_factory=list)

    def largest(self, name: str) -> tuple[int, float, float | None] | None:
        """Layer, value and ratio to the median of all layers, where the list `name` is highest; None for an empty
        list. For `activation_rms`, which accumulates from layer to layer: the layer where it grows most, and the
        factor."""
        values = [(i, v) for i, v in enumerate(getattr(self, name)[:-1]) if v is not None]
        if not values:
            return None
        if name == "activation_rms":
            pairs = itertools.pairwise(values)
            growth = [(after / before, i, after) for (_, before), (i, after) in pairs if before]
            ratio, layer, value = max(growth, default=(None, *values[0]))
            return layer, value, ratio
        layer, value = max(values, key=lambda pair: pair[1])
        median = statistics.median(v for _, v in values)
        return layer, value, value / median if median > 0 else None

    def describe(self) -> str:
        """The quantity with the largest outlier layer comes first; the largest logit comes last."""
        names = ("gradient_norm", "weight_norm", "update_norm", "activation_rms")
        entries = [(name, entry) for name in names if (entry := self.largest(name)) is not None]
        parts = [
            f"{name.replace('_', ' ')} {value:.3g} (layer {layer}{'' if ratio is None else f', x{ratio:.1f}'})"
            for name, (layer, value, ratio) in sorted(entries, key=lambda item: -(item[1][2] or 0.0))
        ]
        if (logit := self.largest("max_logit")) is not None:
            parts.append(f"largest logit {logit[1]:.3g} (layer {logit[0]})")
        return f"layers at step {self.step}: {', '.join(parts) or 'not measured'}"


@dataclass(frozen=True, kw_only=True)
class StepSkipped(
    StepEvent,
    event="skipped",
    meaning="a step changed no weights",
    sentence="skipped step {step}: {reason}",
):
    reason: str | None = None
    # loss and grad_norm of the step, as a dict.
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class RolledBack(
    StepEvent,
    event="rollback",
    meaning="training returned to an earlier checkpoint; sequences is the range of data (from, to) that is skipped",
    sentence="rolled back from step {step} to {to_step}, skipping {skipped_tokens} tokens of data",
):
    to_step: int | None = None
    skipped_tokens: int | None = None
    sequences: Any = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class SignalReceived(
    Event,
    event="signal",
    meaning="a signal or the wall-time limit asked the run to stop",
    sentence="asked to stop by {signal} at step {step}",
):
    signal: str | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(
    StepEvent,
    event="stopped",
    meaning="the run ended early after a save and can be resumed",
    sentence="stopped at step {step}, can be resumed: {reason}",
):
    tokens: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class FaultEvent(
    Event,
    event="fault",
    meaning="a rank failed",
    sentence="rank {rank} failed ({kind}) on {host}: {error}",
):
    rank: int | None = None
    kind: str | None = None
    error: str | None = None
    host: str | None = None
    exit_code: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Restarted(
    Event,
    event="restarted",
    meaning="the supervisor restarted the workers",
    sentence="restarted workers (attempt {attempt}): {reason}",
):
    attempt: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hang(
    Event,
    event="hang",
    meaning="the watchdog found a rank that makes no progress",
    sentence="rank {rank} made no progress for {seconds}: {where}",
):
    rank: int | None = None
    seconds: float | None = None
    where: str | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertLoads(
    StepEvent,
    event="expert_loads",
    meaning="tokens of each expert in the step's batch, by layer, in percent of the layer's mean; recorded for some "
    "steps only",
):
    percent: Any = None

    def rows(self) -> dict[str, list[float]]:
        """Layer -> load of each expert; only plausible rows, all of the same length."""
        layers = self.percent.items() if isinstance(self.percent, dict) else ()
        rows = {
            str(layer): loads
            for layer, loads in layers
            if isinstance(loads, list) and loads and all(known_float(load) is not None for load in loads)
        }
        length = max(map(len, rows.values()), default=0)
        return {layer: loads for layer, loads in rows.items() if len(loads) == length}

    def describe(self) -> str:
        peaks = [(max(loads), loads.index(max(loads)), layer) for layer, loads in self.rows().items()]
        if not peaks:
            return "expert loads: unknown"
        unused = sum(load == 0 for loads in self.rows().values() for load in loads)
        load, expert, layer = max(peaks)
        return (
            f"expert loads at step {self.step}: up to {load / 100:.2f} x the mean (expert {expert} of layer {layer}), "
            f"{unused} unused"
        )


@dataclass(frozen=True, kw_only=True)
class Profiled(
    Event,
    event="profiled",
    meaning="a trace was written",
    sentence="profiled steps {steps}",
):
    steps: str | None = None
    files: list[str] = field(default_factory=list)
    rank: int | None = None
    seconds: float | None = None
    request: str | None = None


@dataclass(frozen=True, kw_only=True)
class SaveInterval(
    Event,
    event="interval",
    meaning='save.every = "auto" chose an interval',
    sentence="{reason}",
):
    seconds: float | None = None
    steps: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutChanged(
    Event,
    event="layout_changed",
    meaning="the run continues with another layout",
):
    old: Any = None
    new: Any = None
    reason: str | None = None

    def describe(self) -> str:
        old, new = (value if isinstance(value, dict) else {"layout": value} for value in (self.old, self.new))
        changes = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
        return f"layout changed ({self.reason or 'unknown'}): {_arrows(changes)}"


@dataclass(frozen=True, kw_only=True)
class RecipeChanged(
    Event,
    event="recipe_changed",
    meaning="keys of the recipe changed between two starts; changes: key -> (old value, new value)",
):
    changes: Any = None

    def describe(self) -> str:
        return f"recipe changed: {_arrows(self.changes)}"


@dataclass(frozen=True, kw_only=True)
class DataChanged(
    Event,
    event="data_changed",
    meaning="the token store was moved (no differences), or --new-data accepted that its content has changed",
):
    store: str | None = None
    old_store: str | None = None
    differences: list[str] = field(default_factory=list)

    def describe(self) -> str:
        if not self.differences:
            return f"token store moved: {self.old_store or 'unknown'} -> {self.store or 'synthetic tokens'}"
        return (
            f"changed data accepted by --new-data ({self.store or 'synthetic tokens'}): "
            f"{'; '.join(self.differences[:3])}"
        )


@dataclass(frozen=True, kw_only=True)
class WeightsImported(
    Event,
    event="imported",
    meaning="the run was created from the weights of another tool",
    sentence="imported from {origin} as {dtype}",
):
    origin: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finished(
    StepEvent,
    event="finished",
    meaning="the last step is done",
    sentence="finished at step {step}, loss {loss}",
):
    tokens: int | None = None
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class GaveUp(
    Event,
    event="gave_up",
    meaning="the supervisor or the job chain stopped trying",
    sentence="gave up: {reason}",
):
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


def field_names(cls: type[Event]) -> list[str]:
    return [f.name for f in fields(cls) if f.name not in ("time", "extra")]


# Kind -> meaning and fields, for the reference page.
EVENTS = {kind: f"{cls.meaning}: {', '.join(field_names(cls))}" for kind, cls in EVENT_CLASSES.items()}


def parse_event(line: Mapping[str, Any]) -> Event:
    kind = str(line.get("event", "unknown"))
    cls = EVENT_CLASSES.get(kind)
    values = read_fields(cls or Event, line)
    extra = {key: value for key, value in line.items() if key != "event" and key not in values}
    return UnknownEvent(kind=kind, fields=extra, **values) if cls is None else cls(**values, extra=extra)
