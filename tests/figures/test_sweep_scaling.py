"""Scaling curves: which points may be compared, the perfect line, and the efficiency, worked by hand."""

from __future__ import annotations

import pytest

from windlass.figures import Chart
from windlass.figures.sweep import best_bars, scaling


def row(devices: int, speed: float, batch: int | None, engine: str = "native", outcome: str = "ok") -> dict:
    return {"point": f"{engine}-{devices}-{batch}", "outcome": outcome, "devices": devices, "tokens_per_second": speed, "batch_tokens": batch, "engine": engine}  # fmt: skip


def curve(chart, name):
    return next(list(zip(s.x, s.y, strict=True)) for s in chart.series if s.name == name)


def test_strong_scaling_compares_points_of_one_batch():
    rows = [row(1, 100, 4096), row(2, 190, 4096), row(4, 340, 4096), row(4, 300, 4096), row(4, 9000, 8192), row(8, 1e6, 4096, outcome="oom")]  # fmt: skip
    speed, share = scaling(rows, "strong")
    assert speed.title == "Strong scaling" and "4,096 tokens" in speed.caption
    assert curve(speed, "measured") == [(1, 100), (2, 190), (4, 340)]  # the faster of two, and not the larger batch
    assert curve(speed, "perfect scaling") == [(1, 100), (4, 400)]
    assert curve(share, "measured") == [(1, 1.0), (2, 0.95), (4, 0.85)]
    assert share.caption == "1 device: 100 %, 2 devices: 95 %, 4 devices: 85 %"


def test_points_that_use_the_nearest_batch_stay_in_the_curve():
    nearest = {**row(3, 260, 4095), "wanted_batch_tokens": 4096}
    speed, _ = scaling([row(1, 100, 4096), nearest, row(4, 340, 4096)], "strong")
    assert curve(speed, "measured") == [(1, 100), (3, 260), (4, 340)]


def test_weak_scaling_compares_points_of_one_batch_per_device():
    rows = [row(2, 200, 2048), row(4, 360, 4096), row(8, 640, 8192), row(4, 500, 65536), row(8, 9000, 4096)]
    speed, share = scaling(rows, "weak")
    assert speed.title == "Weak scaling" and "1,024 tokens a device" in speed.caption
    assert curve(speed, "measured") == [(2, 200), (4, 360), (8, 640)]
    assert curve(speed, "perfect scaling") == [(2, 200), (8, 800)]
    assert [y for _, y in curve(share, "measured")] == pytest.approx([1.0, 0.9, 0.8])


def test_every_engine_has_its_curve_and_its_own_efficiency():
    rows = [row(1, 100, 64), row(2, 150, 64), row(1, 80, 64, "deepspeed"), row(2, 144, 64, "deepspeed")]
    speed, share = scaling(rows, "strong")
    assert curve(speed, "native") == [(1, 100), (2, 150)] and curve(speed, "deepspeed") == [(1, 80), (2, 144)]
    assert curve(speed, "perfect scaling") == [(1, 100), (2, 200)]
    assert curve(share, "deepspeed")[1] == (2, pytest.approx(0.9))
    assert share.caption == "native: 1 device: 100 %, 2 devices: 75 %; deepspeed: 1 device: 100 %, 2 devices: 90 %"


def test_a_command_without_batches_is_compared_as_it_is_and_one_count_has_no_curve():
    assert curve(scaling([row(1, 10, None), row(2, 18, None)], "weak")[0], "measured") == [(1, 10), (2, 18)]
    assert scaling([row(2, 10, 64), row(2, 11, 64)], "strong") == []
    assert scaling([row(1, 10, 64), row(2, 18, 64)], "none") == []


@pytest.mark.parametrize(
    ("kwh", "title", "shown"), [(2e-4, "J per step", 720.0), (0.02, "Wh per step", 20.0), (3.0, "kWh per step", 3.0)]
)
def test_energy_of_a_step_is_drawn_in_a_unit_that_reads(kwh, title, shown):
    """Not 200 millionths of a kilowatt-hour."""
    rows = [{"point": "a", "outcome": "ok", "shard": "none", "kwh_per_step": kwh, "batch_tokens": 8}]
    chart = next(c for c in best_bars(rows, "shard") if isinstance(c, Chart))
    assert (chart.y_title, chart.series[0].y[0]) == (title, pytest.approx(shown))
