"""Energy of one node while a run trains: one sampler per node, never per rank; its record is energy.jsonl."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from windlass.clusters.model import Cluster
from windlass.clusters.scheduler import job_id
from windlass.config.observe import EnergyConfig
from windlass.energy.measure import Measurement, reconcile, sum_or_unknown
from windlass.energy.sensors import Sensor, SensorHost, open_sensors
from windlass.energy.window import Sampler, call_every
from windlass.files import append_line
from windlass.runs.folder import Run

# A crash loses at most this much of the record; the first minutes are written more often.
MAX_GAP_SECONDS = 60.0
# A younger reading is used again: one takes milliseconds of the driver (4 on an H200), which short steps must not
# pay.
FRESH_SECONDS = 0.25


class Meter:
    """Start it on one process of each node. After construction nothing in it raises: energy never stops training."""

    def __init__(
        self,
        cluster: Cluster | None,
        config: EnergyConfig,
        *,
        devices: list[int] | None = None,
        run: Run | None = None,
        node: str | None = None,
        sensors: Sequence[Sensor] | None = None,
    ) -> None:
        self._config, self._run = config, run
        self._node = node or socket.gethostname()
        self._session = f"{int(time.time() * 1e3)}-{os.getpid()}"
        self._job = job_id()
        if not config.enabled:
            self._sampler = Sampler([], {"all": "energy.enabled = false"})
        elif sensors is not None:
            self._sampler = Sampler(sensors)
        else:
            self._sampler = Sampler(*open_sensors(SensorHost(cluster, devices)))
        self._end_sampling: Callable[[], None] = lambda: None
        self._carried_joules: float | None = None
        self._started_at = self._written_at = 0.0
        self._is_stopped = False

    def start(self, carried_joules: float | None = None) -> None:
        """`carried_joules`: energy of earlier processes of this run that this node reports; None: unknown."""
        self._carried_joules = carried_joules
        self._started_at = self._written_at = time.monotonic()
        self._sampler.read()
        if self._config.enabled and self._sampler.missing:
            self._append({"missing": self._sampler.missing})
        self._write(final=False)
        if self._config.enabled:
            # A counter that wraps must be read in time, however rarely the recipe wants power to be sampled.
            seconds = min(self._config.interval_seconds, MAX_GAP_SECONDS)
            self._end_sampling = call_every(seconds, self._tick, "windlass-energy")

    def joules(self) -> float | None:
        """Energy of this node since the run began, carried energy included; None when nothing is measured here."""
        if not self._is_stopped and time.monotonic() - self._sampler.read_at >= FRESH_SECONDS:
            self._sampler.read()
        own_joules = self._sampler.measurement().joules
        return None if own_joules is None else own_joules + (self._carried_joules or 0.0)

    def watts(self) -> float | None:
        """Measured power of this node at the last sample."""
        power = self._sampler.watts()
        return sum_or_unknown(power.get((s.source, s.scope)) for s in reconcile(self._sampler.measurement().sources))

    def utilization(self) -> float | None:
        """Device utilisation as the driver reports it, 0 to 1."""
        return self._sampler.utilization

    def stop(self) -> Measurement:
        """Energy of this process on this node; safe to call twice."""
        if not self._is_stopped:
            self._is_stopped = True
            self._end_sampling()
            self._sampler.read()
            self._write(final=True)
            self._sampler.close()
        return self._sampler.measurement()

    def _tick(self) -> None:
        self._sampler.read()
        now = time.monotonic()
        gap_seconds = min(MAX_GAP_SECONDS, (now - self._started_at) / 50)
        if now - self._written_at >= max(self._config.interval_seconds, gap_seconds):
            self._written_at = now
            self._write(final=False)

    def _write(self, *, final: bool) -> None:
        power = self._sampler.watts()
        for source in self._sampler.measurement().sources:
            fields = asdict(source)
            del fields["nodes"]  # a meter measures one node
            self._append({**fields, "watts": power.get((source.source, source.scope)), "final": final})

    def _append(self, fields: dict[str, Any]) -> None:
        if self._run is None:
            return
        line = {"time": time.time(), "node": self._node, "session": self._session, "job": self._job, **fields}
        with contextlib.suppress(OSError):  # a full disk must not stop training; the next line is tried again
            append_line(self._run.energy_file, line)
