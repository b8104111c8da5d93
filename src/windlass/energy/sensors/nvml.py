"""NVIDIA GPUs: the driver's total-energy counter (millijoules, Volta and later), else its power reading."""

import contextlib
import importlib
from collections.abc import Callable
from time import monotonic
from typing import Any

from windlass.clusters.here import visible_devices
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing

# Utilisation, and power where a counter has the energy, are means over a second: reading them more often adds nothing.
GAUGE_SECONDS = 1.0


class NvmlSensor(Sensor):
    name = "nvml"
    update_seconds: float | None = 0.1  # measured on an H200 (benchmarks/energy_check.py)

    def __init__(self, host: SensorHost) -> None:
        try:
            self._nvml = host.library or importlib.import_module("pynvml")
        except ImportError:
            raise SensorMissing("the package nvidia-ml-py is not installed") from None
        self._gauges_read_at = float("-inf")
        self._milliwatts: dict[str, float | None] = {}
        self._utilization: float | None = None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise SensorMissing(f"NVML does not start: {error}") from None
        count = self._nvml.nvmlDeviceGetCount()
        names = visible = visible_devices(host.env, count)
        if host.devices is not None:
            # A launcher may show each rank one device only; the node's meter then gets numbers beyond that list.
            is_listed = max(host.devices, default=0) < len(visible)
            names = [visible[i] if is_listed else str(i) for i in host.devices]
        self._handles: list[tuple[str, Any]] = []  # (part, NVML handle) of the job's devices
        for name in names:
            with contextlib.suppress(self._nvml.NVMLError):
                if name.isdigit() and int(name) < count:
                    self._handles.append((f"gpu{name}", self._nvml.nvmlDeviceGetHandleByIndex(int(name))))
                elif not name.isdigit():
                    # CUDA accepts a shortened UUID; NVML wants the full one.
                    raw = map(self._nvml.nvmlDeviceGetUUID, map(self._nvml.nvmlDeviceGetHandleByIndex, range(count)))
                    uuids = (uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in raw)
                    full = next((uuid for uuid in uuids if uuid.startswith(name)), name)
                    self._handles.append((name, self._nvml.nvmlDeviceGetHandleByUUID(full)))
        if not self._handles:
            self.close()
            raise SensorMissing("NVML shows no device that this job may use")
        energy = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        without_counter = [part for part, handle in self._handles if not self._call(energy, handle)]
        self._counter_parts = {part for part, _ in self._handles}.difference(without_counter)
        notes = []
        if host.devices is not None and len(self._handles) < len(host.devices):
            counts = f"only {len(self._handles)} of the node's {len(host.devices)} devices can be seen from here"
            notes.append(f"{counts}: the others are not counted")
        if without_counter:
            notes.append(f"no energy counter on {', '.join(without_counter)}: power is read and summed")
        self.note = "; ".join(notes)

    def read(self) -> list[Sample]:
        read_energy, read_power = self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._nvml.nvmlDeviceGetPowerUsage
        if monotonic() - self._gauges_read_at >= GAUGE_SECONDS:
            self._gauges_read_at = monotonic()
            self._milliwatts = {part: self._call(read_power, handle) for part, handle in self._handles}
            read_rates = self._nvml.nvmlDeviceGetUtilizationRates
            rates = [self._call(lambda h: read_rates(h).gpu, handle) for _, handle in self._handles]
            percentages = [rate for rate in rates if rate is not None]
            self._utilization = sum(percentages) / len(percentages) / 100 if percentages else None
        samples = []
        for part, handle in self._handles:
            millijoules = self._call(read_energy, handle) if part in self._counter_parts else None
            milliwatts = self._milliwatts[part] if millijoules is not None else self._call(read_power, handle)
            if millijoules is not None or milliwatts is not None:
                joules, watts = (None if value is None else value / 1e3 for value in (millijoules, milliwatts))
                samples.append(Sample(part, "device", joules, watts))
        return samples

    def utilization(self) -> float | None:
        return self._utilization

    def _call(self, function: Callable[[Any], Any], handle: Any) -> float | None:
        try:
            return float(function(handle))
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
