from __future__ import annotations

import time
from dataclasses import replace

import pytest

from windlass.energy.measure import SourceEnergy, measurement, reconcile
from windlass.energy.sensors import Sample
from windlass.energy.window import MeasurementWindow, Sampler


def source(name: str, scope: str, joules: float, method: str = "counter") -> SourceEnergy:
    return SourceEnergy(source=name, scope=scope, method=method, joules=joules, seconds=10.0)


class TestReconcile:
    def test_a_node_contains_its_devices_and_cpus(self):
        sources = [source("nvml", "device", 700), source("cray", "node", 1000), source("rapl", "cpu", 150)]
        assert measurement(sources, 10).joules == 1000

    def test_without_a_node_counter_disjoint_parts_are_added(self):
        result = measurement(
            [source("nvml", "device", 700), source("rapl", "cpu", 150), source("rapl", "memory", 30)], 10
        )
        assert result.joules == 880
        assert result.counted == ("nvml device", "rapl cpu", "rapl memory")

    def test_two_sources_of_one_scope_count_once(self):
        assert [s.source for s in reconcile([source("nvml", "device", 700), source("cray", "device", 690)])] == ["cray"]

    def test_a_superchip_module_contains_gpu_and_cpu_but_not_memory(self):
        result = measurement(
            [source("grace", "module", 600), source("nvml", "device", 500), source("rapl", "memory", 20)], 10
        )
        assert result.joules == 620

    def test_a_model_never_enters_the_measured_figure(self):
        result = measurement([source("model", "node", 500, "modelled")], 10)
        assert result.joules is None and result.watts is None
        assert result.modelled_joules == 500

    def test_nothing_is_none_not_zero(self):
        assert measurement([], 10).joules is None


def tally(script, clock, readings: list[Sample]) -> SourceEnergy:
    sampler = Sampler([script([[r] for r in readings])], clock=clock)
    for _ in readings:
        sampler.read()
    return sampler.measurement().sources[0]


def device(joules: float | None = None, watts: float | None = None, **more) -> Sample:
    return Sample("gpu0", "device", joules, watts, **more)


class TestCounters:
    def test_difference_of_two_readings(self, script, clock):
        assert tally(script, clock, [device(1000.0), device(1400.0), device(1900.0)]).joules == 900.0

    def test_reset_counts_what_the_new_counter_has(self, script, clock):
        energy = tally(script, clock, [device(10_000.0), device(10_500.0), device(300.0), device(800.0)])
        assert (energy.joules, energy.resets) == (500 + 300 + 500, 1)

    def test_a_reset_counter_that_shows_more_than_possible_counts_nothing(self, script, clock):
        energy = tally(script, clock, [device(9e9), device(8e6), device(8e6 + 500)])
        assert (energy.joules, energy.resets) == (500.0, 1)

    def test_a_small_step_back_is_neither_counted_nor_lost(self, script, clock):
        energy = tally(script, clock, [device(1000.0), device(999.0), device(1400.0)])
        assert (energy.joules, energy.resets) == (400.0, 0)

    def test_wrap_around(self, script, clock):
        energy = tally(script, clock, [device(900.0, wraps_at=1000.0), device(100.0, wraps_at=1000.0)])
        assert (energy.joules, energy.resets) == (200.0, 0)

    def test_an_impossible_jump_is_not_energy(self, script, clock):
        energy = tally(script, clock, [device(1000.0), device(9e12), device(9e12 + 500)])
        assert (energy.joules, energy.resets) == (500.0, 1)

    def test_a_new_epoch_is_a_reset_even_upwards(self, script, clock):
        energy = tally(script, clock, [device(100.0, epoch="a"), device(900.0, epoch="b")])
        assert energy.resets == 1

    def test_power_is_summed_by_trapezoids(self, script, clock):
        # The clock moves 1 s per look and is looked at twice per reading: 2 s apart, (100+300)/2*2 + (300+300)/2*2 = 1000 J.
        energy = tally(script, clock, [device(watts=100.0), device(watts=300.0), device(watts=300.0)])
        assert energy.joules == pytest.approx(1000.0)
        assert energy.method == "power"

    def test_a_sensor_that_dies_is_named_and_the_rest_goes_on(self, script, clock):
        class Dying(script):
            def read(self):
                if self.at:
                    raise RuntimeError("GPU is lost")
                return super().read()

        sampler = Sampler(
            [
                Dying([[device(5.0)]]),
                script([[Sample("node", "node", 10.0)], [Sample("node", "node", 60.0)]], name="cray"),
            ],
            clock=clock,
        )
        sampler.read()
        sampler.read()
        result = sampler.measurement()
        assert result.joules == 50.0
        assert "GPU is lost" in result.missing["nvml"]


def test_a_short_window_of_counters_reads_twice(script):
    sensor = script([[device(100.0)], [device(350.0)]])
    window = MeasurementWindow(sensors=[sensor])
    window.begin()
    assert window.end().joules == 250.0
    assert sensor.at == 2


def test_a_long_window_sees_every_turn_of_a_counter_that_wraps(script, monkeypatch):
    """A RAPL counter of 262 kJ turns over every quarter of an hour at 300 W: read at both ends only, whole turns would be lost."""
    monkeypatch.setattr("windlass.energy.window.VISIT_SECONDS", 0.02)
    turns = script(
        [[Sample("package-0", "cpu", value, wraps_at=1000.0)] for value in (900.0, 600.0, 300.0, 0.0, 700.0)]
    )
    with MeasurementWindow(sensors=[turns]) as window:
        while turns.at < 5:
            time.sleep(0.01)
    assert window.result.joules == 4 * 700.0


class TestResolution:
    def test_a_window_says_what_one_update_of_its_counter_is_worth(self, script, clock):
        sampler = Sampler([script([[device(0.0)], [device(1060.0)]], update_seconds=0.1)], clock=clock)
        sampler.read()
        sampler.read()  # 2 s later: 530 W
        assert sampler.measurement().resolution_joules == pytest.approx(53.0)

    def test_it_is_unknown_for_summed_power_and_where_nobody_said(self, script, clock):
        for sensor in (script([[device(watts=100.0)]], update_seconds=0.1), script([[device(0.0)], [device(5.0)]])):
            sampler = Sampler([sensor], clock=clock)
            sampler.read()
            sampler.read()
            assert sampler.measurement().resolution_joules is None

    def test_of_two_sources_it_adds_and_one_unknown_makes_it_unknown(self):
        def part(name, scope, resolution):
            return replace(source(name, scope, 100), resolution_joules=resolution)

        assert measurement([part("nvml", "device", 5.0), part("rapl", "cpu", 0.1)], 10).resolution_joules == 5.1
        assert measurement([part("nvml", "device", 5.0), part("rapl", "cpu", None)], 10).resolution_joules is None


class TestSourcesThatStop:
    def test_a_node_counter_below_its_own_devices_was_cut_short(self):
        sources = [source("ear", "node", 500), source("nvml", "device", 700), source("rapl", "cpu", 150)]
        assert measurement(sources, 10).counted == ("nvml device", "rapl cpu")

    def test_of_one_scope_the_one_that_was_read_to_the_end(self):
        frozen = replace(source("cray", "device", 400), seconds=5.0)
        assert [s.source for s in reconcile([frozen, source("amdsmi", "device", 800)])] == ["amdsmi"]

    def test_counters_that_stand_still_no_longer_grow_in_time(self, script, clock):
        stopping = script([[device(0.0)], [device(100.0)], []], name="cray")
        sampler = Sampler([stopping, script([[device(0.0)]], name="amdsmi")], clock=clock)
        for _ in range(6):
            sampler.read()
        seconds = {s.source: s.seconds for s in sampler.measurement().sources}
        assert seconds["cray"] < seconds["amdsmi"] / 2


class TestDoubt:
    """AMD SMI before ROCm 6.3 counts ten times too little on some boards."""

    def test_a_counter_ten_times_off_its_power_gives_way_to_power(self, script, clock):
        readings = [device(50.0 * 2 * i, watts=500.0) for i in range(30)]  # 2 s apart: counts 50 W where power is 500 W
        energy = tally(script, clock, readings)
        assert (energy.joules, energy.method) == (pytest.approx(29 * 2 * 500.0), "power")
        assert "2,900 J" in energy.note and "29,000 J" in energy.note

    def test_an_honest_counter_stays(self, script, clock):
        energy = tally(script, clock, [device(480.0 * 2 * i, watts=500.0) for i in range(30)])
        assert (energy.joules, energy.method, energy.note) == (29 * 2 * 480.0, "counter", "")


def test_devices_with_and_without_a_counter_are_added(script, clock):
    """One source, one scope: a node with mixed devices must not lose those that only report power."""
    first, second = ([Sample("gpu0", "device", 100.0 * i), Sample("gpu1", "device", watts=50.0)] for i in range(2))
    sampler = Sampler([script([first, second])], clock=clock)
    sampler.read()
    sampler.read()
    result = sampler.measurement()
    assert (result.joules, result.sources[0].method) == (100.0 + 2 * 50.0, "power")


def test_window_of_power_samples_in_between(script):
    with MeasurementWindow(sensors=[script([[device(watts=200.0)]])], interval_seconds=0.01) as window:
        time.sleep(0.2)
    assert window.result.sources[0].watts == pytest.approx(200.0)
