"""What does this node use while the run lasts? One sampler per node, never per rank; its record is energy.jsonl."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from windlass.clusters.model import Cluster
from windlass.clusters.scheduler import job_id
from windlass.config.observe import EnergyConfig
from windlass.energy.measure import Measurement, SourceEnergy, reconcile
from windlass.energy.sampler import Sampler
from windlass.energy.sensors import Sensor, open_sensors
from windlass.energy.window import Ticker
from windlass.files import append_line
from windlass.runs.folder import Run

LONGEST_GAP_SECONDS = 60.0
"""A crash loses at most this much of the record (the first minutes are written more often)."""


FRESH_SECONDS = 0.25
"""A reading younger than this is used again: one takes milliseconds of the driver (4 on an H200), and short steps must not wait for them."""


class Meter:
    """Start it on one process of each node. Nothing in it raises once it is made: energy never stops a training run."""

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
        self._sampler = Sampler(*_open(cluster, config, devices, sensors))
        # A counter that wraps must be visited, however seldom the recipe wants power sampled.
        self._ticker = Ticker(self._tick, min(config.interval_seconds, LONGEST_GAP_SECONDS), "windlass-energy")
        self._carried: float | None = None
        self._wrote_at = 0.0
        self._started_at = 0.0
        self._read_at = -1e9
        self._stopped = False

    def start(self, carried_joules: float | None = None) -> None:
        """`carried_joules`: what earlier processes of this run have used and this node answers for; None: nothing known."""
        self._carried = carried_joules
        self._started_at = self._wrote_at = time.monotonic()
        self._read()
        self._write_missing()
        self._write(final=False)
        if self._config.enabled:
            self._ticker.start()

    def joules(self) -> float | None:
        """Energy of this node since the run began, carried part included; None when nothing is measured here."""
        own = self._now().joules
        return None if own is None else own + (self._carried or 0.0)

    def modelled_joules(self) -> float | None:
        """What the power model says where nothing is measured; never part of `joules`."""
        return self._now().modelled_joules

    def watts(self) -> float | None:
        """Measured power of this node at the last sample."""
        power = self._sampler.watts()
        chosen = reconcile(self._sampler.measurement().sources)
        found = [power.get((s.source, s.scope)) for s in chosen]
        known = [w for w in found if w is not None]
        return sum(known) if known and len(known) == len(found) else None

    def utilization(self) -> float | None:
        """Device utilisation as the driver reports it, 0 to 1."""
        return self._sampler.utilization()

    def sources(self) -> list[str]:
        """What is read here, for the log: "nvml device", "model node (modelled)"."""
        return [s.label for s in self._sampler.measurement().sources]

    def missing(self) -> dict[str, str]:
        return dict(self._sampler.missing)

    def stop(self) -> Measurement:
        """The span of this process on this node; safe to call twice."""
        if not self._stopped:
            self._stopped = True
            self._ticker.stop()
            self._read()
            self._write(final=True)
            self._sampler.close()
        return self._sampler.measurement()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _now(self) -> Measurement:
        if not self._stopped and time.monotonic() - self._read_at >= FRESH_SECONDS:
            self._read()
        return self._sampler.measurement()

    def _read(self) -> None:
        self._sampler.read()
        self._read_at = time.monotonic()

    def _tick(self) -> None:
        self._read()
        now = time.monotonic()
        gap = max(self._config.interval_seconds, min(LONGEST_GAP_SECONDS, (now - self._started_at) / 50))
        if now - self._wrote_at >= gap:
            self._wrote_at = now
            self._write(final=False)

    def _write(self, *, final: bool) -> None:
        power = self._sampler.watts()
        for source in self._sampler.measurement().sources:
            self._append({**_line(source), "watts": power.get((source.source, source.scope)), "final": final})

    def _write_missing(self) -> None:
        if self._config.enabled and self._sampler.missing:
            self._append({"missing": self._sampler.missing})

    def _append(self, fields: dict[str, Any]) -> None:
        if self._run is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not stop training; the next line is tried again
            append_line(
                self._run.energy_file,
                {"time": time.time(), "node": self._node, "session": self._session, "job": self._job, **fields},
            )


def _open(
    cluster: Cluster | None, config: EnergyConfig, devices: list[int] | None, sensors: Sequence[Sensor] | None
) -> tuple[list[Sensor], dict[str, str]]:
    if not config.enabled:
        return [], {"all": "energy.enabled = false"}
    return open_sensors(cluster, devices) if sensors is None else (list(sensors), {})


def _line(source: SourceEnergy) -> dict[str, Any]:
    return {
        "source": source.source, "scope": source.scope, "method": source.method, "joules": source.joules,
        "seconds": source.seconds, "parts": source.parts, "resets": source.resets, "note": source.note,
        "resolution_joules": source.resolution_joules,
    }  # fmt: skip
