from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.clusters.here import visible_devices
from windlass.clusters.load import load_cluster
from windlass.energy import sensors
from windlass.energy.sensors import SENSORS, SensorHost, SensorMissing, open_sensors
from windlass.energy.sensors.amd_sysfs import AmdSysfsSensor
from windlass.energy.sensors.amdsmi import AmdsmiSensor
from windlass.energy.sensors.cray import STALE_READS, CraySensor, value
from windlass.energy.sensors.grace import GraceSensor
from windlass.energy.sensors.model import ModelSensor
from windlass.energy.sensors.nvml import NvmlSensor
from windlass.energy.sensors.rapl import RaplSensor


class TestNvml:
    def test_reads_joules_and_watts_of_every_visible_device(self, nvml):
        sensor = NvmlSensor(SensorHost(library=nvml([[5_000, 12_500], [7_000, 9_000]]), env={}))
        assert [(s.part, s.scope, s.joules, s.watts) for s in sensor.read()] == [
            ("gpu0", "device", 12.5, 690.0),
            ("gpu1", "device", 9.0, 690.0),
        ]
        assert sensor.utilization() == pytest.approx(0.97)

    @pytest.mark.parametrize(
        ("visible", "parts"),
        [("1", ["gpu1"]), ("2,0", ["gpu2", "gpu0"]), ("0,-1,2", ["gpu0"]), ("GPU-2aaa", ["GPU-2aaa"])],
    )
    def test_respects_visible_devices(self, nvml, visible, parts):
        sensor = NvmlSensor(SensorHost(library=nvml([[1000], [1000], [1000]]), env={"CUDA_VISIBLE_DEVICES": visible}))
        assert [s.part for s in sensor.read()] == parts

    def test_a_node_meter_reaches_devices_its_own_rank_does_not_see(self, nvml):
        sensor = NvmlSensor(
            SensorHost(devices=[0, 1, 2, 3], library=nvml([[1000]] * 4), env={"CUDA_VISIBLE_DEVICES": "0"})
        )
        assert len(sensor.read()) == 4

    def test_devices_hidden_by_the_scheduler_are_said_not_guessed(self, nvml):
        sensor = NvmlSensor(SensorHost(devices=[0, 1, 2, 3], library=nvml([[1000]]), env={"CUDA_VISIBLE_DEVICES": "0"}))
        assert len(sensor.read()) == 1
        assert "1 of the node's 4 devices" in sensor.note

    def test_empty_visible_list_is_no_device(self, nvml):
        with pytest.raises(SensorMissing):
            NvmlSensor(SensorHost(library=nvml([[1000]]), env={"CUDA_VISIBLE_DEVICES": ""}))

    def test_what_is_only_shown_is_read_once_a_second(self, nvml, monkeypatch):
        library, now = nvml([[1000]]), [0.0]
        monkeypatch.setattr("windlass.energy.sensors.nvml.monotonic", lambda: now[0])
        sensor = NvmlSensor(SensorHost(library=library, env={}))
        assert (sensor.read()[0].watts, sensor.utilization()) == (690.0, 0.97)
        library._watts = 100_000
        now[0] = 0.9
        assert sensor.read()[0].watts == 690.0
        now[0] = 1.0
        assert sensor.read()[0].watts == 100.0

    def test_power_that_is_summed_is_read_each_time(self, nvml):
        library = nvml([[None]])
        sensor = NvmlSensor(SensorHost(library=library, env={}))
        sensor.read()
        library._watts = 100_000
        assert sensor.read()[0].watts == 100.0

    def test_without_counter_power_is_read_and_the_note_says_so(self, nvml):
        sensor = NvmlSensor(SensorHost(library=nvml([[None]]), env={}))
        sample = sensor.read()[0]
        assert (sample.joules, sample.watts) == (None, 690.0)
        assert "no energy counter on gpu0" in sensor.note

    def test_no_driver_is_a_reason_not_a_crash(self, nvml):
        with pytest.raises(SensorMissing, match="Driver Not Loaded"):
            NvmlSensor(SensorHost(library=nvml([[1]], starts=False), env={}))

    def test_list_ends_at_the_first_invalid_entry_as_in_cuda(self):
        assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,9,1"}, 4) == ["0"]
        assert visible_devices({}, 2) == ["0", "1"]


MI250X = load_cluster("lumi-g")


class FakeAmd:
    """amdsmi's dictionaries. The odd die of an MI250X module answers as the driver does: an error for energy, 65535 for power."""

    def __init__(self, dies: int, *, module: bool) -> None:
        self._dies, self._module = dies, module

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self):
        return list(range(self._dies))

    def amdsmi_get_energy_count(self, handle):
        if self._module and handle % 2:
            raise RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")
        return {"energy_accumulator": 1_000_000_000 * (handle + 1), "counter_resolution": 15.3, "timestamp": 1}

    def amdsmi_get_power_info(self, handle):
        return {"average_socket_power": 65535 if self._module and handle % 2 else 480, "current_socket_power": "N/A"}

    def amdsmi_get_gpu_activity(self, handle):
        return {"gfx_activity": 91}


class TestAmd:
    def test_two_dies_share_one_module_counter(self):
        sensor = AmdsmiSensor(SensorHost(MI250X, library=FakeAmd(8, module=True), env={}))
        samples = sensor.read()
        assert [s.part for s in samples] == ["module0", "module1", "module2", "module3"]
        assert samples[0].joules == pytest.approx(15_300.0)  # 1e9 ticks of 15.3 microjoules
        assert sum(s.watts for s in samples) == 4 * 480  # four modules, not eight dies
        assert sensor.note == ""

    def test_a_job_on_one_die_counts_the_whole_module_and_says_so(self):
        sensor = AmdsmiSensor(SensorHost(MI250X, library=FakeAmd(8, module=True), env={"ROCR_VISIBLE_DEVICES": "3"}))
        assert [s.part for s in sensor.read()] == ["module1"]
        assert "1 of 1 modules are only partly used" in sensor.note

    def test_the_die_that_answers_speaks_for_its_module(self):
        smi = FakeAmd(4, module=True)
        even, power = smi.amdsmi_get_energy_count, smi.amdsmi_get_power_info
        smi.amdsmi_get_energy_count, smi.amdsmi_get_power_info = lambda h: even(h ^ 1), lambda h: power(h ^ 1)
        samples = AmdsmiSensor(SensorHost(MI250X, library=smi, env={})).read()
        assert [(s.part, s.joules) for s in samples] == [
            ("module0", pytest.approx(15_300.0)),
            ("module1", pytest.approx(45_900.0)),
        ]

    def test_one_counter_per_device_elsewhere(self):
        assert [s.part for s in AmdsmiSensor(SensorHost(library=FakeAmd(2, module=False), env={})).read()] == [
            "gpu0",
            "gpu1",
        ]

    def test_old_releases_call_the_accumulator_power(self):
        smi = FakeAmd(1, module=False)
        smi.amdsmi_get_energy_count = lambda handle: {"power": 2_000_000, "counter_resolution": 15.3}
        assert AmdsmiSensor(SensorHost(library=smi, env={})).read()[0].joules == pytest.approx(30.6)

    def test_no_answer_is_missing(self):
        smi = SimpleNamespace(
            amdsmi_init=lambda: None, amdsmi_get_processor_handles=lambda: [0], amdsmi_shut_down=lambda: None
        )
        with pytest.raises(SensorMissing, match="1 devices, but neither energy nor power"):
            AmdsmiSensor(SensorHost(library=smi, env={}))

    def test_sysfs_power_skips_the_odd_die(self, tmp_path):
        for card, watts in (("card0", 486_000_000), ("card1", 0)):
            folder = tmp_path / "sys/class/drm" / card / "device/hwmon/hwmon3"
            folder.mkdir(parents=True)
            (folder / "name").write_text("amdgpu\n")
            (folder / "power1_average").write_text(f"{watts}\n")
        assert [(s.part, s.watts) for s in AmdSysfsSensor(SensorHost(root=tmp_path, env={})).read()] == [
            ("gpu0", 486.0)
        ]


def rapl_zone(root: Path, zone: str, name: str, microjoules: int) -> Path:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")
    return folder


class TestRapl:
    def test_packages_and_dram_only(self, tmp_path):
        rapl_zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
        rapl_zone(tmp_path, "intel-rapl:0:0", "core", 4_000_000)
        rapl_zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
        rapl_zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
        samples = RaplSensor(SensorHost(root=tmp_path)).read()
        assert [(s.part, s.scope, s.joules) for s in samples] == [("package-0", "cpu", 5.0), ("dram-0", "memory", 1.0)]
        assert samples[0].wraps_at == pytest.approx(262_143.32885)

    def test_unreadable_zones_are_named(self, tmp_path):
        (rapl_zone(tmp_path, "intel-rapl:0", "package-0", 1) / "energy_uj").unlink()
        with pytest.raises(SensorMissing, match="only root may read them"):
            RaplSensor(SensorHost(root=tmp_path))

    def test_none(self, tmp_path):
        with pytest.raises(SensorMissing, match="no RAPL zone"):
            RaplSensor(SensorHost(root=tmp_path))


def pm_counters(root: Path, *, joules: int = 1000, freshness: int = 7) -> SensorHost:
    folder = root / "sys/cray/pm_counters"
    folder.mkdir(parents=True, exist_ok=True)
    lines = {
        "energy": f"{joules} J 1697546843471129 us", "power": "2417 W 1697546843471129 us", "cpu_energy": "120 J 1697546843471129 us",
        "memory_energy": "60 J 1697546843471129 us", "accel0_energy": "200 J 1697546843471129 us", "accel1_energy": "210 J 1697546843471129 us",
        "freshness": str(freshness), "startup": "1690000000000000", "generation": "12", "version": "2", "raw_scan_hz": "10",
    }  # fmt: skip
    for name, text in lines.items():
        (folder / name).write_text(text + "\n")
    return SensorHost(root=root)


class TestCray:
    def test_node_cpu_memory_and_accelerators(self, tmp_path):
        samples = {s.part: s for s in CraySensor(pm_counters(tmp_path)).read()}
        assert {k: v.scope for k, v in samples.items()} == {
            "node": "node",
            "cpu": "cpu",
            "memory": "memory",
            "accel0": "device",
            "accel1": "device",
        }
        assert (samples["node"].joules, samples["node"].watts) == (1000.0, 2417.0)
        assert samples["node"].epoch == "1690000000000000"

    def test_stopped_counters_give_nothing(self, tmp_path):
        sensor = CraySensor(pm_counters(tmp_path))
        answers = [sensor.read() for _ in range(STALE_READS + 1)]
        assert answers[0] and not answers[-1]
        assert "did not change" in sensor.note
        pm_counters(tmp_path, freshness=8)
        assert sensor.read()

    def test_missing_folder_says_what_to_look_for(self, tmp_path):
        with pytest.raises(SensorMissing, match="bound into the container"):
            CraySensor(SensorHost(root=tmp_path))

    def test_foreign_unit_is_no_value(self, tmp_path):
        host = pm_counters(tmp_path)
        energy = tmp_path / "sys/cray/pm_counters/energy"
        energy.write_text("12 kJ 1 us\n")
        assert value(energy, "J") is None
        with pytest.raises(SensorMissing, match="cannot be read"):
            CraySensor(host)


def test_grace_reads_modules_and_cpus_not_their_parts(tmp_path):
    for index, label in enumerate(
        ("Module Power Socket 0", "Grace Power Socket 0", "CPU Power Socket 0", "SysIO Power Socket 0")
    ):
        folder = tmp_path / f"sys/class/hwmon/hwmon{index}/device"
        folder.mkdir(parents=True)
        (folder / "power1_oem_info").write_text(label + "\n")
        (folder / "power1_average").write_text(f"{(index + 1) * 100_000_000}\n")
    assert [(s.part, s.scope, s.watts) for s in GraceSensor(SensorHost(root=tmp_path)).read()] == [
        ("module0", "module", 100.0),
        ("grace0", "cpu", 200.0),
    ]


class TestModel:
    def test_always_labelled(self):
        sensor = ModelSensor(SensorHost())
        assert all(s.modelled for s in sensor.read())
        assert sensor.note.startswith("modelled: ")

    def test_load_times_assumed_core_power(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.cpu_count", lambda: 4)
        stat = tmp_path / "proc/stat"
        stat.parent.mkdir()
        stat.write_text("cpu  100 0 0 300 0 0 0 0 0 0\n")
        sensor = ModelSensor(SensorHost(root=tmp_path))
        stat.write_text("cpu  150 0 0 350 0 0 0 0 0 0\n")  # 50 of 100 jiffies busy: half of 4 cores at 10 W
        assert sensor.read()[0].watts == pytest.approx(20.0)

    def test_devices_at_tdp_from_the_cluster_file(self):
        sensor = ModelSensor(SensorHost(load_cluster("snellius-h100"), devices=range(4)))
        assert "4 x 700 W" in sensor.note
        assert sensor.read()[0].watts >= 2800

    def test_nothing_known_is_missing_not_zero(self, tmp_path):
        with pytest.raises(SensorMissing, match="no power model"):
            ModelSensor(SensorHost(root=tmp_path))


def test_every_file_of_the_folder_is_a_sensor():
    files = {p.stem.replace("_", "-") for p in Path(sensors.__file__).parent.glob("[a-z]*.py")} - {"base"}
    assert set(SENSORS.names()) == files
    assert {SENSORS.load(name).name for name in files} == files


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A temporary package that registers the sensors "shelf" and "broken" with entry points."""
    (tmp_path / "shelf_sensor.py").write_text(
        "from windlass.energy.sensors import Sample, Sensor, SensorMissing\n\n\n"
        "class ShelfSensor(Sensor):\n    name = 'shelf'\n\n    def __init__(self, host):\n"
        "        if not (host.root / 'run/shelf').exists():\n            raise SensorMissing('no power shelf')\n\n"
        "    def read(self):\n        return [Sample('node', 'node', watts=812.5)]\n"
    )
    info = tmp_path / "shelf_sensor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-sensor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[windlass.sensors]\nshelf = shelf_sensor:ShelfSensor\nbroken = absent_module:Sensor\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("shelf_sensor", None)


def test_another_package_adds_a_sensor_with_an_entry_point(shelf):
    assert SENSORS.names()[-2:] == ["broken", "shelf"]
    opened, missing = open_sensors(SensorHost(root=shelf, env={}))
    assert "shelf" not in [s.name for s in opened] and missing["shelf"] == "no power shelf"
    assert missing["broken"].startswith("ModuleNotFoundError")
    (shelf / "run/shelf").mkdir(parents=True)
    opened, missing = open_sensors(SensorHost(root=shelf, env={}))
    assert [s.watts for s in opened[-1].read()] == [812.5]
    assert "shelf" not in missing and "model" not in [s.name for s in opened]


def test_a_fallback_opens_only_where_its_sensor_is_missing(tmp_path, monkeypatch):
    class Answering(sensors.Sensor):
        name = "amdsmi"

    class Fallback(Answering):
        fallback_for = "amdsmi"

    class Broken(Answering):
        def __init__(self, host):
            raise OSError("libamd_smi.so: cannot open shared object file")

    classes = {"fallback": Fallback, "model": type("Model", (Answering,), {"fallback_for": "any"}), "amdsmi": Answering}
    monkeypatch.setattr(SENSORS, "names", lambda: list(classes))
    monkeypatch.setattr(SENSORS, "load", lambda name: classes[name])
    assert [type(s) for s in open_sensors(SensorHost())[0]] == [Answering]
    classes["amdsmi"] = Broken
    opened, missing = open_sensors(SensorHost())
    assert [type(s) for s in opened] == [Fallback]
    assert missing == {"amdsmi": "OSError: libamd_smi.so: cannot open shared object file"}
