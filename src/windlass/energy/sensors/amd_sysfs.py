"""AMD GPUs without the AMD SMI package (inside a container): power from the hwmon files of the kernel driver."""

from pathlib import Path

from windlass.clusters.here import visible_amd_devices
from windlass.energy.sensors.base import Sample, Sensor, SensorHost, SensorMissing, read_text


class AmdSysfsSensor(Sensor):
    name = "amd-sysfs"
    fallback_for = "amdsmi"  # both read the same modules
    note = "power only, read and summed; on MI250X the first die of a module reports both"

    def __init__(self, host: SensorHost) -> None:
        root, files = host.root / "sys/class/drm", list[tuple[int, Path]]()
        for folder in root.glob("card[0-9]*/device/hwmon/hwmon*"):
            power = [folder / name for name in ("power1_average", "power1_input") if (folder / name).is_file()]
            if power and read_text(folder / "name") == "amdgpu":
                digits = "".join(c for c in folder.parents[2].name if c.isdigit())
                files.append((int(digits), power[0]))
        indexes = visible_amd_devices(host.env, len(files), host.devices)
        self._files = [(f"gpu{i}", path) for i, (_, path) in enumerate(sorted(files)) if i in indexes]
        if not self.read():
            raise SensorMissing(f"no amdgpu power file under {root}")

    def read(self) -> list[Sample]:
        readings = ((part, read_text(path)) for part, path in self._files)
        # The odd die of an MI250X module reads 0: its power is part of the even one's.
        return [Sample(part, "device", watts=int(t) / 1e6) for part, t in readings if t.isdigit() and int(t) > 0]
