"""Energy of a block of code on this node. Counters are read at both ends; power is sampled in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from windlass.energy.measure import Measurement
from windlass.energy.sampler import Sampler
from windlass.energy.sensors import Sensor, SensorHost, open_sensors

if TYPE_CHECKING:
    from windlass.clusters.model import Cluster

# Counters wrap (RAPL's within minutes under load) and restart: a long window is read in between to notice it.
VISIT_SECONDS = 30.0


class Ticker:
    """A thread that calls a function at a fixed interval until it is stopped; the last call has then returned."""

    def __init__(self, call: Callable[[], None], seconds: float, name: str) -> None:
        self._call, self._seconds = call, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._call()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=max(5.0, 2 * self._seconds))


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
        self._ticker: Ticker | None = None
        self.result: Measurement | None = None

    def begin(self) -> None:
        self._sampler.read()
        seconds = self._interval_seconds if self._sampler.needs_sampling() else VISIT_SECONDS
        self._ticker = Ticker(self._sampler.read, seconds, "windlass-energy-window")
        self._ticker.start()

    def end(self) -> Measurement:
        self._sampler.read()  # before the thread is joined: waiting for it would be part of the span
        self.result = self._sampler.measurement()
        if self._ticker is not None:
            self._ticker.stop()
        self._sampler.close()
        return self.result

    def __enter__(self) -> MeasurementWindow:
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
