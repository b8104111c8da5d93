"""How do readings become joules? Differences of counters, or the area under power, per part; resets and glitches are survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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


@dataclass
class Tally:
    """Joules of one part so far."""

    scope: Scope
    method: Method
    joules: float = 0.0
    resets: int = 0
    watts: float | None = None
    _last: Sample | None = None
    _at: float = 0.0

    def add(self, sample: Sample, at: float) -> None:
        if self._last is not None and at > self._at:
            gained = self._gain(self._last, sample, at - self._at)
            if gained is None:  # hold the old mark, so that a jitter is neither counted nor lost
                return
            self.joules += gained
            self.watts = sample.watts if sample.watts is not None else gained / (at - self._at)
        elif self._last is None:
            self.watts = sample.watts
        self._last, self._at = sample, at

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
            return measurement(self._sources(seconds), seconds, self.missing)

    def _sources(self, seconds: float) -> list[SourceEnergy]:
        notes = {s.name: s.note for s in self.sensors}
        groups: dict[tuple[str, Scope, Method], dict[str, Tally]] = {}
        for (source, part), tally in self._tallies.items():
            groups.setdefault((source, tally.scope, tally.method), {})[part] = tally
        return [
            SourceEnergy(
                source=source, scope=scope, method=method, joules=sum(t.joules for t in parts.values()), seconds=seconds,
                parts={part: t.joules for part, t in parts.items()}, resets=sum(t.resets for t in parts.values()), note=notes.get(source, ""),
            )
            for (source, scope, method), parts in groups.items()
        ]  # fmt: skip

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
