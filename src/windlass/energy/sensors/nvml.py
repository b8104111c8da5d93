"""What does the NVIDIA driver count? NVML's total-energy counter (millijoules, Volta and later), else its power reading."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windlass.clusters.here import visible_devices
from windlass.energy.sensors.base import Sample, SensorMissing

GAUGE_SECONDS = 1.0
"""Power beside a counter, and utilisation, are means over a second: reading them more often, for short steps, would tell nothing more."""


class NvmlSensor:
    name = "nvml"
    note = ""
    update_seconds: float | None = 0.1  # measured on an H200 (benchmarks/energy_check.py)

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        *,
        library: Any = None,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._watts: dict[str, tuple[float, float | None]] = {}
        self._used: tuple[float, float | None] = (-1e9, None)
        self._nvml = library if library is not None else _library()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise SensorMissing(f"NVML does not start: {error}") from None
        chosen = self._choose(devices, os.environ if env is None else env)
        if not chosen:
            self.close()
            raise SensorMissing("NVML shows no device that this job may use")
        self._handles: list[tuple[str, Any]] = chosen
        self._counters = {part: self._counter_works(handle) for part, handle in chosen}
        if devices is not None and len(chosen) < len(devices):
            self.note = f"only {len(chosen)} of the node's {len(devices)} devices can be seen from here: the others are not counted"
        if not all(self._counters.values()):
            lacking = [part for part, works in self._counters.items() if not works]
            self.note = "; ".join(
                filter(None, (self.note, f"no energy counter on {', '.join(lacking)}: power is read and summed"))
            )

    def _choose(self, devices: Sequence[int] | None, env: Mapping[str, str]) -> list[tuple[str, Any]]:
        count = self._nvml.nvmlDeviceGetCount()
        visible = visible_devices(env, count)
        if devices is not None:
            # A launcher may show each rank one device only; the node's meter then gets numbers beyond that list.
            words = [visible[i] if i < len(visible) and max(devices) < len(visible) else str(i) for i in devices]
        else:
            words = visible
        return [
            (f"gpu{word}" if word.isdigit() else word, handle)
            for word in words
            if (handle := self._handle(word, count)) is not None
        ]

    def _handle(self, word: str, count: int) -> Any | None:
        with contextlib.suppress(self._nvml.NVMLError, ValueError):
            if word.isdigit():
                return self._nvml.nvmlDeviceGetHandleByIndex(int(word)) if int(word) < count else None
            return self._nvml.nvmlDeviceGetHandleByUUID(self._full_uuid(word, count))
        return None

    def _full_uuid(self, word: str, count: int) -> str:
        """CUDA accepts a shortened UUID; NVML wants the whole one."""
        for index in range(count):
            uuid = _text(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByIndex(index)))
            if uuid.startswith(word):
                return uuid
        return word

    def _counter_works(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) > 0)
        except self._nvml.NVMLError:
            return False

    def read(self) -> list[Sample]:
        samples = []
        for part, handle in self._handles:
            joules = self._try(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle) if self._counters[part] else None
            watts = self._power(part, handle, joules is not None)
            if joules is not None or watts is not None:
                samples.append(
                    Sample(
                        part, "device", None if joules is None else joules / 1e3, None if watts is None else watts / 1e3
                    )
                )
        return samples

    def _power(self, part: str, handle: Any, counted: bool) -> float | None:
        """Each time where it is what we sum; now and then where a counter has the energy."""
        now = self._clock()
        at, known = self._watts.get(part, (-1e9, None))
        if counted and now - at < GAUGE_SECONDS:
            return known
        found = self._try(self._nvml.nvmlDeviceGetPowerUsage, handle)
        self._watts[part] = (now, found)
        return found

    def _try(self, call: Any, handle: Any) -> float | None:
        try:
            return float(call(handle))
        except self._nvml.NVMLError:
            return None

    def utilization(self) -> float | None:
        """Mean over the job's devices, 0 to 1, as the driver reports it."""
        now = self._clock()
        if now - self._used[0] >= GAUGE_SECONDS:
            self._used = (now, self._utilization())
        return self._used[1]

    def _utilization(self) -> float | None:
        found = []
        for _, handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                found.append(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return sum(found) / len(found) if found else None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        raise SensorMissing("the package nvidia-ml-py is not installed") from None
    return pynvml


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
