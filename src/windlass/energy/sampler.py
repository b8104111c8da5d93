"""How do readings become joules? Differences of counters, or the area under power, per part; resets and glitches are survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from windlass.energy.measure import Measurement, Method, Scope, SourceEnergy, measurement
from windlass.energy.sensors.base import Sample, Sensor

# More than any such part draws: a jump beyond it is a broken reading, not energy.
PLAUSIBLE_WATTS: dict[str, float] = {
    "node": 50_000.0,
    "module": 5_000.0,
    "device": 5_000.0,
    "cpu": 5_000.0,
    "memory": 2_000.0,
}
GLITCH = 0.9
"""A counter that falls, but stays above this share of its last value, has jittered; below, it was reset."""
DOUBT = 4.0
"""A counter this many times off the power beside it is wrong: AMD SMI before ROCm 6.3 has such on some boards."""
DOUBT_SECONDS, DOUBT_GAP = 30.0, 10.0
"""How long both must have been seen, and how far apart two readings may be for the area under power to mean something."""


@dataclass
class Tally:
    """Joules of one part so far."""

    scope: Scope
    method: Method
    joules: float = 0.0
    resets: int = 0
    watts: float | None = None
    began: float | None = None
    power_joules: float = 0.0
    """The area under power where a counter and power are read together, over `both_seconds`."""
    counted_joules: float = 0.0
    both_seconds: float = 0.0
    _last: Sample | None = None
    _at: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it was read: a sensor that dies or stands still stops here."""
        return 0.0 if self.began is None else self._at - self.began

    @property
    def doubtful(self) -> bool:
        """The counter contradicts the power that the same sensor reports."""
        if self.method != "counter" or self.both_seconds < DOUBT_SECONDS or self.power_joules <= 0:
            return False
        return not 1 / DOUBT <= self.counted_joules / self.power_joules <= DOUBT

    def add(self, sample: Sample, at: float) -> None:
        if self._last is not None and at > self._at:
            gained = self._gain(self._last, sample, at - self._at)
            if gained is None:  # hold the old mark, so that a jitter is neither counted nor lost
                return
            self._compare(self._last, sample, at - self._at, gained)
            self.joules += gained
            self.watts = sample.watts if sample.watts is not None else gained / (at - self._at)
        elif self._last is None:
            self.watts, self.began = sample.watts, at
        self._last, self._at = sample, at

    def _compare(self, old: Sample, new: Sample, seconds: float, gained: float) -> None:
        if old.watts is not None and new.watts is not None and seconds <= DOUBT_GAP:
            self.power_joules += _trapezoid(old, new, seconds)
            self.counted_joules += gained
            self.both_seconds += seconds

    def _gain(self, old: Sample, new: Sample, seconds: float) -> float | None:
        if old.joules is None or new.joules is None:
            return _trapezoid(old, new, seconds)
        if new.epoch != old.epoch:
            return self._after_reset(new, seconds)
        gain = new.joules - old.joules
        if gain < 0:
            if new.wraps_at is not None and new.wraps_at > old.joules:
                gain += new.wraps_at
            elif new.joules >= GLITCH * old.joules:
                return None
            else:
                return self._after_reset(new, seconds)
        return gain if gain <= self._most(seconds) else self._broken()

    def _after_reset(self, new: Sample, seconds: float) -> float:
        """What the restarted counter has gathered is ours, if a device could have used it since the last reading."""
        self.resets += 1
        since = new.joules or 0.0
        return since if since <= self._most(seconds) else 0.0

    def _most(self, seconds: float) -> float:
        """What the part could have used; counters move in jumps (NVML's every 20 to 100 ms), so a second is allowed for."""
        return PLAUSIBLE_WATTS[self.scope] * (seconds + 1.0)

    def _broken(self) -> float:
        self.resets += 1
        return 0.0


def _trapezoid(old: Sample, new: Sample, seconds: float) -> float:
    if old.watts is None or new.watts is None:
        return 0.0
    return (old.watts + new.watts) / 2 * seconds


class Sampler:
    """Reads sensors into tallies; `measurement()` may be asked at any time. Thread-safe."""

    def __init__(
        self,
        sensors: Sequence[Sensor],
        missing: dict[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sensors = list(sensors)
        self.missing = dict(missing or {})
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._began: float | None = None
        self._read_at: float = 0.0
        self._utilization: float | None = None

    def read(self) -> None:
        """One reading of every sensor; a sensor that fails now is named and skipped, never fatal."""
        with self._lock:
            for sensor in self.sensors:
                try:
                    samples = sensor.read()
                    used = sensor.utilization()
                except Exception as error:  # a driver that dies must not take the training with it
                    self.missing[sensor.name] = f"{type(error).__name__} while reading: {error}"
                    continue
                at = self._clock()
                for sample in samples:
                    self._tally(sensor, sample).add(sample, at)
                self._utilization = used if used is not None else self._utilization
            self._read_at = self._clock()
            self._began = self._read_at if self._began is None else self._began

    def _tally(self, sensor: Sensor, sample: Sample) -> Tally:
        key = (sensor.name, sample.part)
        if key not in self._tallies:
            method: Method = "modelled" if sample.modelled else "counter" if sample.joules is not None else "power"
            self._tallies[key] = Tally(sample.scope, method)
        return self._tallies[key]

    def measurement(self) -> Measurement:
        with self._lock:
            seconds = self._read_at - self._began if self._began is not None else 0.0
            return measurement(self._sources(), seconds, self.missing)

    def _sources(self) -> list[SourceEnergy]:
        groups: dict[tuple[str, Scope], dict[str, Tally]] = {}
        for (source, part), tally in self._tallies.items():
            groups.setdefault((source, tally.scope), {})[part] = tally
        sensors = {s.name: s for s in self.sensors}
        return [_energy(sensors[source], scope, parts) for (source, scope), parts in groups.items()]

    def watts(self) -> dict[tuple[str, str], float | None]:
        """(source, scope) -> power at the last reading."""
        with self._lock:
            sums: dict[tuple[str, str], float | None] = {}
            for (source, _), tally in self._tallies.items():
                key = (source, tally.scope)
                sums[key] = None if tally.watts is None else (sums.get(key) or 0.0) + tally.watts
            return sums

    def utilization(self) -> float | None:
        return self._utilization

    def power_only(self) -> bool:
        """True when some part has no counter, so that it must be sampled between begin and end."""
        with self._lock:
            return any(t.method != "counter" for t in self._tallies.values())

    def close(self) -> None:
        for sensor in self.sensors:
            sensor.close()


def _energy(sensor: Sensor, scope: Scope, tallies: Mapping[str, Tally]) -> SourceEnergy:
    """One source and scope; where its counters are doubtful, the area under power stands in for them and the note says so."""
    method = _weakest("power" if t.doubtful else t.method for t in tallies.values())
    parts = {part: t.power_joules if t.doubtful else t.joules for part, t in tallies.items()}
    seconds = max(t.seconds for t in tallies.values())
    joules = sum(parts.values())
    update = getattr(sensor, "update_seconds", None) if method == "counter" else None
    return SourceEnergy(
        source=sensor.name, scope=scope, method=method, joules=joules, seconds=seconds, parts=parts, resets=sum(t.resets for t in tallies.values()),
        note="; ".join(filter(None, (sensor.note, _doubt(tallies.values())))),
        resolution_joules=joules / seconds * update if update is not None and seconds > 0 else None,
    )  # fmt: skip


def _weakest(methods: Iterable[Method]) -> Method:
    """Of a node where some devices have a counter and others only power."""
    found = set(methods)
    return "modelled" if "modelled" in found else "power" if "power" in found else "counter"


def _doubt(tallies: Iterable[Tally]) -> str:
    found = [t for t in tallies if t.doubtful]
    if not found:
        return ""
    counted, power = sum(t.counted_joules for t in found), sum(t.power_joules for t in found)
    return f"its counter says {counted:,.0f} J where its power says {power:,.0f} J: power is summed instead"
