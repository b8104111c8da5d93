"""Energy of a span on this node, from repeated sensor readings: differences of counters, or the area under power.

A window reads counters at both ends and samples power in between.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from windlass.clusters.model import Cluster
from windlass.energy.measure import Measurement, Method, Scope, SourceEnergy, measurement
from windlass.energy.sensors import Sample, Sensor, SensorHost, open_sensors

# More than any such part draws: a larger jump is a broken reading, not energy.
PLAUSIBLE_WATTS: dict[Scope, float] = {
    "node": 50_000.0,
    "module": 5_000.0,
    "device": 5_000.0,
    "cpu": 5_000.0,
    "memory": 2_000.0,
}
# A counter that falls but stays above this share of its last value has jittered; below it, the counter was reset.
JITTER_SHARE = 0.9
# A counter that differs this much from the sensor's own power is wrong (AMD SMI before ROCm 6.3 on some boards).
DOUBTFUL_FACTOR = 4.0
# How long counter and power must overlap to be compared, and the longest gap over which power is interpolated.
COMPARE_SECONDS, COMPARE_GAP_SECONDS = 30.0, 10.0


@dataclass
class PartEnergy:
    scope: Scope
    method: Method
    joules: float = 0.0
    resets: int = 0
    watts: float | None = None
    started_at: float | None = None
    power_joules: float = 0.0  # area under power over `compared_seconds`, where counter and power are read together
    counter_joules: float = 0.0  # the counter's energy over `compared_seconds`
    compared_seconds: float = 0.0
    _last: Sample | None = None
    _last_at: float = 0.0

    @property
    def seconds(self) -> float:
        """Time over which it was read; time in which a sensor fails or does not change is not counted."""
        return 0.0 if self.started_at is None else self._last_at - self.started_at

    @property
    def is_doubtful(self) -> bool:
        """The counter contradicts the power that the same sensor reports."""
        if self.method != "counter" or self.compared_seconds < COMPARE_SECONDS or self.power_joules <= 0:
            return False
        return not 1 / DOUBTFUL_FACTOR <= self.counter_joules / self.power_joules <= DOUBTFUL_FACTOR

    def add(self, sample: Sample, at: float) -> None:
        last, seconds = self._last, at - self._last_at
        if last is None:
            self.watts, self.started_at = sample.watts, at
        elif seconds > 0:
            has_power = last.watts is not None and sample.watts is not None
            power_joules = ((last.watts or 0.0) + (sample.watts or 0.0)) / 2 * seconds if has_power else 0.0
            gained = power_joules
            if last.joules is not None and sample.joules is not None:
                difference = self._counter_difference(last, sample, seconds)
                if difference is None:  # keep the old reading, so that jitter is neither counted nor lost
                    return
                gained = difference
            if has_power and seconds <= COMPARE_GAP_SECONDS:
                self.power_joules += power_joules
                self.counter_joules += gained
                self.compared_seconds += seconds
            self.joules += gained
            self.watts = sample.watts if sample.watts is not None else gained / seconds
        self._last, self._last_at = sample, at

    def _counter_difference(self, old: Sample, new: Sample, seconds: float) -> float | None:
        """Joules between two counter readings; None for jitter. After a reset, what the new counter has gathered."""
        before, after = old.joules or 0.0, new.joules or 0.0
        # Counters move in steps (NVML's every 20 to 100 ms), so one second more than the span is allowed.
        limit_joules = PLAUSIBLE_WATTS[self.scope] * (seconds + 1.0)
        gained, is_reset = after - before, new.epoch != old.epoch
        if gained < 0 and not is_reset:
            if new.wraps_at is not None and new.wraps_at > before:
                gained += new.wraps_at
            elif after >= JITTER_SHARE * before:
                return None
            else:
                is_reset = True
        gained = after if is_reset else gained
        self.resets += is_reset or gained > limit_joules
        return gained if gained <= limit_joules else 0.0


class Sampler:
    """Reads sensors and sums their energy; `measurement()` may be called at any time. Thread-safe."""

    def __init__(
        self,
        sensors: Sequence[Sensor],
        missing: dict[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sensors = list(sensors)
        self.missing = dict(missing or {})
        self.read_at = float("-inf")
        self.utilization: float | None = None  # device utilisation at the last reading, 0 to 1
        self._clock = clock
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], PartEnergy] = {}
        self._started_at: float | None = None

    def read(self) -> None:
        """Read every sensor once; a sensor that fails is recorded as missing and skipped."""
        with self._lock:
            for sensor in self.sensors:
                try:
                    samples, utilization = sensor.read(), sensor.utilization()
                except Exception as error:  # a failing driver must not end training
                    self.missing[sensor.name] = f"{type(error).__name__} while reading: {error}"
                    continue
                at = self._clock()
                for sample in samples:
                    measured: Method = "counter" if sample.joules is not None else "power"
                    part = PartEnergy(sample.scope, "modelled" if sample.modelled else measured)
                    self._parts.setdefault((sensor.name, sample.part), part).add(sample, at)
                self.utilization = utilization if utilization is not None else self.utilization
            self.read_at = self._clock()
            self._started_at = self.read_at if self._started_at is None else self._started_at

    def measurement(self) -> Measurement:
        """Energy since the first reading."""
        with self._lock:
            groups: dict[tuple[str, Scope], dict[str, PartEnergy]] = {}
            for (source, name), part in self._parts.items():
                groups.setdefault((source, part.scope), {})[name] = part
            sensors = {s.name: s for s in self.sensors}
            sources = [_source_energy(sensors[source], scope, parts) for (source, scope), parts in groups.items()]
            seconds = 0.0 if self._started_at is None else self.read_at - self._started_at
            return measurement(sources, seconds, self.missing)

    def watts(self) -> dict[tuple[str, str], float | None]:
        """(source, scope) -> power at the last reading."""
        with self._lock:
            sums: dict[tuple[str, str], float | None] = {}
            for (source, _), part in self._parts.items():
                key = (source, part.scope)
                sums[key] = None if part.watts is None else (sums.get(key) or 0.0) + part.watts
            return sums

    def close(self) -> None:
        for sensor in self.sensors:
            sensor.close()


def _source_energy(sensor: Sensor, scope: Scope, parts: Mapping[str, PartEnergy]) -> SourceEnergy:
    """One source and scope. Where a counter is doubtful, summed power replaces it and the note says so."""
    doubtful = [p for p in parts.values() if p.is_doubtful]
    methods = {p.method for p in parts.values()} | ({"power"} if doubtful else set())
    # The weakest of them: some devices of a node may have a counter and others only power.
    method: Method = "modelled" if "modelled" in methods else "power" if "power" in methods else "counter"
    part_joules = {name: p.power_joules if p.is_doubtful else p.joules for name, p in parts.items()}
    joules, seconds = sum(part_joules.values()), max(p.seconds for p in parts.values())
    notes = [sensor.note] if sensor.note else []
    if doubtful:
        counter, power = sum(p.counter_joules for p in doubtful), sum(p.power_joules for p in doubtful)
        notes.append(f"its counter shows {counter:,.0f} J and its power {power:,.0f} J: summed power is used instead")
    has_resolution = method == "counter" and sensor.update_seconds is not None and seconds > 0
    return SourceEnergy(
        source=sensor.name,
        scope=scope,
        method=method,
        joules=joules,
        seconds=seconds,
        parts=part_joules,
        resets=sum(p.resets for p in parts.values()),
        note="; ".join(notes),
        resolution_joules=joules / seconds * (sensor.update_seconds or 0.0) if has_resolution else None,
    )


# Counters wrap (RAPL's within minutes under load) and restart: a long window is read in between to notice it.
VISIT_SECONDS = 30.0


def call_every(seconds: float, call: Callable[[], None], name: str) -> Callable[[], None]:
    """Call a function at a fixed interval in a thread; returns the function that ends it after the last call."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            call()

    def end() -> None:
        stop.set()
        thread.join(timeout=max(5.0, 2 * seconds))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return end


class MeasurementWindow:
    """Measures a span on this node.

    >>> with MeasurementWindow(cluster) as window: ...
    >>> window.result.joules, window.result.resolution_joules
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        devices: Sequence[int] | None = None,
        interval_seconds: float = 0.1,
        sensors: Sequence[Sensor] | None = None,
    ) -> None:
        opened, missing = open_sensors(SensorHost(cluster, devices)) if sensors is None else (list(sensors), {})
        self._sampler = Sampler(opened, missing)
        self._interval_seconds = interval_seconds
        self._end_sampling: Callable[[], None] = lambda: None
        self.result: Measurement | None = None

    def begin(self) -> None:
        self._sampler.read()
        has_gauge = any(source.method != "counter" for source in self._sampler.measurement().sources)
        seconds = self._interval_seconds if has_gauge else VISIT_SECONDS
        self._end_sampling = call_every(seconds, self._sampler.read, "windlass-energy-window")

    def end(self) -> Measurement:
        self._sampler.read()  # before the thread is joined: waiting for it would be part of the span
        self.result = self._sampler.measurement()
        self._end_sampling()
        self._sampler.close()
        return self.result

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
