"""AMD GPUs: the energy accumulator of AMD SMI. On MI250X two dies (GCDs) share the counter of their module.

The even die of a module carries the counter of both; the odd one answers "not supported" or 0. A job on one die of a
module therefore gets the energy of the whole module, and the note says so.
"""

import contextlib
import importlib
from typing import Any

from windlass.clusters.here import visible_amd_devices
from windlass.clusters.load import load_device
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing
from windlass.errors import WindlassError

NO_POWER = 65535  # the driver's value for "not available"


class AmdsmiSensor(Sensor):
    name = "amdsmi"

    def __init__(self, host: SensorHost) -> None:
        per_module = 1
        with contextlib.suppress(WindlassError):
            per_module = load_device(host.cluster.device).per_module if host.cluster else 1
        try:
            self._smi = host.library or importlib.import_module("amdsmi")
        except (ImportError, KeyError, OSError) as error:  # the last two where the driver's library is absent
            raise SensorMissing(f"the package amdsmi is not usable: {type(error).__name__}") from None
        try:
            self._smi.amdsmi_init()
            handles = list(self._smi.amdsmi_get_processor_handles())
        except Exception as error:  # the library's exceptions share no base class between releases
            raise SensorMissing(f"AMD SMI does not start: {error}") from None
        indexes = visible_amd_devices(host.env, len(handles), host.devices)
        modules = sorted({index // per_module for index in indexes})
        prefix = "module" if per_module > 1 else "gpu"
        self._handles: list[tuple[str, Any]] = []
        for module in modules:
            if dies := handles[module * per_module : (module + 1) * per_module]:
                # By AMD's numbering the first die answers for its module; some drivers number otherwise.
                counting = (die for die in dies if self._joules(die) is not None)
                powered = (die for die in dies if self._watts(die) is not None)
                self._handles.append((f"{prefix}{module}", next(counting, next(powered, dies[0]))))
        partial = [m for m in modules if sum(index // per_module == m for index in indexes) < per_module]
        if partial:
            self.note = (
                f"{len(partial)} of {len(modules)} modules are only partly used by this job; their full "
                "energy is counted"
            )
        if not self.read():
            self.close()
            raise SensorMissing(
                f"AMD SMI shows {len(handles)} devices, but neither energy nor power of this job's devices"
            )

    def read(self) -> list[Sample]:
        samples = [Sample(part, "device", self._joules(die), self._watts(die)) for part, die in self._handles]
        return [sample for sample in samples if sample.joules is not None or sample.watts is not None]

    def _joules(self, handle: Any) -> float | None:
        with contextlib.suppress(Exception):
            count = self._smi.amdsmi_get_energy_count(handle)
            ticks = count.get("energy_accumulator", count.get("power"))  # named "power" before ROCm 6.2
            joules = float(ticks) * float(count["counter_resolution"]) / 1e6
            return joules if joules > 0 else None
        return None

    def _watts(self, handle: Any) -> float | None:
        with contextlib.suppress(Exception):
            power = self._smi.amdsmi_get_power_info(handle)
            values = map(power.get, ("average_socket_power", "current_socket_power", "socket_power"))
            return next((float(v) for v in values if isinstance(v, (int, float)) and 0 < v < NO_POWER), None)
        return None

    def utilization(self) -> float | None:
        shares = []
        for _, handle in self._handles:
            with contextlib.suppress(Exception):
                shares.append(float(self._smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]) / 100)
        return sum(shares) / len(shares) if shares else None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()
