from __future__ import annotations

import json
import time

import pytest

from windlass.config.observe import EnergyConfig
from windlass.energy.ledger import read_ledger
from windlass.energy.meter import Meter
from windlass.energy.sensors import Sample
from windlass.runs.folder import Run


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


def counter(script, start: float, step: float = 50.0):
    return script([[Sample("gpu0", "device", start + step * i, 400.0)] for i in range(200)], used=0.9)


def test_carried_joules_go_on(script, run, monkeypatch):
    meter = Meter(None, EnergyConfig(interval_seconds=60), run=run, node="n1", sensors=[counter(script, 1000.0)])
    monkeypatch.setattr("windlass.energy.meter.FRESH_SECONDS", 3600.0)
    meter.start(carried_joules=5000.0)
    assert meter.joules() == 5000.0  # a fresh reading is used again
    monkeypatch.setattr("windlass.energy.meter.FRESH_SECONDS", 0.0)
    assert meter.joules() == 5050.0
    monkeypatch.setattr("windlass.energy.meter.FRESH_SECONDS", 3600.0)
    assert meter.watts() == 400.0
    assert meter.utilization() == 0.9
    assert meter.stop().joules == 100.0
    assert meter.stop().joules == 100.0  # twice is safe


def test_two_processes_of_a_run_add_up_in_the_record(script, run):
    for start in (1000.0, 7000.0):
        meter = Meter(None, EnergyConfig(interval_seconds=60), run=run, node="n1", sensors=[counter(script, start)])
        meter._session = f"{int(start)}-1"
        meter.start()
        meter.stop()
    assert read_ledger(run).joules == 100.0


def test_the_sampler_writes_while_the_run_lasts(script, run):
    meter = Meter(None, EnergyConfig(interval_seconds=0.02), run=run, node="n1", sensors=[counter(script, 0.0)])
    meter.start()
    patience = time.monotonic() + 60
    while (before_stop := len(run.energy_file.read_text().splitlines())) < 3 and time.monotonic() < patience:
        time.sleep(0.02)
    meter.stop()
    lines = [json.loads(line) for line in run.energy_file.read_text().splitlines()]
    assert before_stop >= 3
    assert lines[-1]["final"] is True
    assert [line["joules"] for line in lines] == sorted(line["joules"] for line in lines)


def test_without_sensor_joules_is_none_and_the_model_is_labelled(run):
    meter = Meter(None, EnergyConfig(interval_seconds=60), run=run, node="n1")
    if meter._sampler.sensors and meter._sampler.sensors[0].name != "model":
        pytest.skip("this machine has a sensor")
    meter.start(carried_joules=10.0)
    time.sleep(0.15)
    assert meter.joules() is None
    result = meter.stop()
    assert result.modelled_joules >= 0 and [s.label for s in result.sources] == ["model node (modelled)"]
    ledger = read_ledger(run)
    assert ledger.basis == "modelled"
    assert ledger.joules is None
    assert set(ledger.missing) >= {"nvml", "cray", "rapl"}


def test_disabled_reads_and_writes_nothing(run):
    meter = Meter(None, EnergyConfig(enabled=False), run=run)
    meter.start()
    assert meter.joules() is None
    assert meter.stop().missing == {"all": "energy.enabled = false"}
    assert not run.energy_file.exists()


def test_a_full_disk_does_not_stop_training(script, run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("windlass.energy.meter.append_line", full)
    meter = Meter(None, EnergyConfig(interval_seconds=60), run=run, sensors=[counter(script, 0.0)])
    meter.start()
    assert meter.stop().joules == 50.0
