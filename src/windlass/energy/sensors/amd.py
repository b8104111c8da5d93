"""What does the AMD driver count? AMD SMI's energy accumulator; on MI250X two dies (GCDs) share one module's counter.

The even die of a module carries the counter of both; the odd one answers "not supported" or 0. A job on one die of a
module therefore gets the whole module's energy, and the note says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.clusters.here import visible_devices
from windlass.energy.sensors.base import FileSensor, Sample, SensorMissing


class AmdSensor:
    name = "amdsmi"
    note = ""
    update_seconds: float | None = None

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        *,
        per_module: int = 1,
        library: Any = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._smi = library if library is not None else _library()
        try:
            self._smi.amdsmi_init()
            handles = list(self._smi.amdsmi_get_processor_handles())
        except Exception as error:  # the library's own exceptions share no base class between releases
            raise SensorMissing(f"AMD SMI does not start: {error}") from None
        mine = _chosen(devices, len(handles), os.environ if env is None else env)
        modules = sorted({index // per_module for index in mine})
        dies = {m: handles[m * per_module : (m + 1) * per_module] for m in modules}
        self._handles = [(m, self._speaker(found)) for m, found in dies.items() if found]
        self._prefix = "module" if per_module > 1 else "gpu"
        partly = [m for m in modules if len([i for i in mine if i // per_module == m]) < per_module]
        if partly:
            self.note = f"{len(partly)} of {len(modules)} modules are used in part; their whole energy is counted"
        if not any(s.joules is not None or s.watts is not None for s in self.read()):
            self.close()
            raise SensorMissing(f"AMD SMI shows {len(handles)} devices but neither energy nor power of ours")

    def _speaker(self, dies: Sequence[Any]) -> Any:
        """The die that answers for its module: the first by AMD's numbering, another where a driver numbers otherwise."""
        counting = (die for die in dies if self._joules(die) is not None)
        powered = (die for die in dies if self._watts(die) is not None)
        return next(counting, next(powered, dies[0]))

    def read(self) -> list[Sample]:
        samples = []
        for index, handle in self._handles:
            joules, watts = self._joules(handle), self._watts(handle)
            if joules is not None or watts is not None:
                samples.append(Sample(f"{self._prefix}{index}", "device", joules, watts))
        return samples

    def _joules(self, handle: Any) -> float | None:
        with contextlib.suppress(Exception):
            found = self._smi.amdsmi_get_energy_count(handle)
            ticks = found.get("energy_accumulator", found.get("power"))  # named "power" before ROCm 6.2
            joules = float(ticks) * float(found["counter_resolution"]) / 1e6
            return joules if joules > 0 else None
        return None

    def _watts(self, handle: Any) -> float | None:
        with contextlib.suppress(Exception):
            found = self._smi.amdsmi_get_power_info(handle)
            for key in ("average_socket_power", "current_socket_power", "socket_power"):
                value = found.get(key)
                if isinstance(value, (int, float)) and 0 < value < 65535:  # 65535: the driver's "not available"
                    return float(value)
        return None

    def utilization(self) -> float | None:
        found = []
        for _, handle in self._handles:
            with contextlib.suppress(Exception):
                found.append(float(self._smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]) / 100)
        return sum(found) / len(found) if found else None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()


class AmdSysfsSensor(FileSensor):
    """Power from the kernel driver's hwmon files, where the AMD SMI package is not installed (inside a container)."""

    name = "amd-sysfs"

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        *,
        root: Path = Path("/sys/class/drm"),
        env: Mapping[str, str] | None = None,
    ) -> None:
        cards = sorted(root.glob("card[0-9]*/device/hwmon/hwmon*"), key=lambda p: _number(p.parents[2].name))
        files = [
            found
            for card in cards
            if _reads(card / "name").strip() == "amdgpu" and (found := _power_file(card)) is not None
        ]
        mine = set(_chosen(devices, len(files), os.environ if env is None else env))
        self._files = [(f"gpu{i}", path) for i, path in enumerate(files) if i in mine]
        if not self.read():
            raise SensorMissing(f"no amdgpu power file under {root}")
        self.note = "power only, read and summed; on MI250X the first die of a module reports both"

    def read(self) -> list[Sample]:
        samples = []
        for part, path in self._files:
            text = _reads(path).strip()
            if text.isdigit() and int(text) > 0:  # the odd die of an MI250X module reads 0: it is inside the even one
                samples.append(Sample(part, "device", watts=int(text) / 1e6))
        return samples


def _power_file(card: Path) -> Path | None:
    return next((card / name for name in ("power1_average", "power1_input") if (card / name).is_file()), None)


def _reads(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(name: str) -> int:
    digits = "".join(c for c in name if c.isdigit())
    return int(digits) if digits else 0


def _chosen(devices: Sequence[int] | None, count: int, env: Mapping[str, str]) -> list[int]:
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in env:
            visible = [int(w) for w in visible_devices(env, count, variable) if w.isdigit()]
            break
    else:
        visible = list(range(count))
    if devices is None:
        return visible
    inside = max(devices, default=0) < len(visible)
    return [visible[i] if inside else i for i in devices]


def _library() -> Any:
    try:
        import amdsmi
    except (
        ImportError,
        KeyError,
        OSError,
    ) as error:  # it raises KeyError or OSError where the driver's library is absent
        raise SensorMissing(f"the package amdsmi is not usable: {type(error).__name__}") from None
    return amdsmi
