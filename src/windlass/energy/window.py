"""How much energy did this span take? begin, end -> Measurement. Counters are read at both ends; power is sampled in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from windlass.energy.measure import Measurement
from windlass.energy.sampler import Sampler
from windlass.energy.sensors import Sensor, open_sensors

if TYPE_CHECKING:
    from windlass.clusters.model import Cluster


class Ticker:
    """A thread that calls a function at a steady rate until it is stopped; the last call has then returned."""

    def __init__(self, call: object, seconds: float, name: str) -> None:
        self._call, self._seconds = call, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._call()  # type: ignore[operator]

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=max(5.0, 2 * self._seconds))


VISIT_SECONDS = 30.0
"""Counters wrap (RAPL's within minutes under load) and restart: a long span looks in between, so that this is seen."""


class Window:
    """A measured span on this node.

    >>> with Window(cluster) as window: ...
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
        found, missing = open_sensors(cluster, devices) if sensors is None else (list(sensors), {})
        self._sampler = Sampler(found, missing)
        self._interval = interval_seconds
        self._ticker: Ticker | None = None
        self.result: Measurement | None = None

    def begin(self) -> None:
        self._sampler.read()
        often = self._interval if self._sampler.power_only() else VISIT_SECONDS
        self._ticker = Ticker(self._sampler.read, often, "windlass-energy-window")
        self._ticker.start()

    def end(self) -> Measurement:
        self._sampler.read()  # first: waiting for the thread would be part of the span
        self.result = self._sampler.measurement()
        if self._ticker is not None:
            self._ticker.stop()
        self._sampler.close()
        return self.result

    def __enter__(self) -> Window:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
