"""Two run folders side by side: what differs, what was achieved, and whether the loss is the same."""

from __future__ import annotations

import random

import pytest

from windlass.files import append_line, write_json
from windlass.profile.compare import compare_loss, compare_runs, find_differences, measure_performance
from windlass.runs import Run
from windlass.runs.metrics import MetricsLine


def lines(count=200, *, shift=0.0, noise=0.02, seed=0, tokens=1000, **more):
    draw = random.Random(seed)
    return [
        {"step": i, "tokens": i * tokens, "loss": 8 / (1 + i / 20) + 2 + shift + draw.gauss(0, noise), **more}
        for i in range(1, count + 1)
    ]


def test_the_same_curve_with_other_noise_is_the_same():
    result = compare_loss(lines(seed=1), lines(seed=2))
    assert result.same is True
    assert result.largest_difference < 0.04
    assert "as expected" in result.reason


def test_a_shifted_curve_is_not_the_same():
    result = compare_loss(lines(seed=1), lines(seed=2, shift=0.1))
    assert result.same is False
    assert result.largest_difference == pytest.approx(0.1, abs=0.03)
    assert compare_loss(lines(seed=1), lines(seed=2, shift=0.1), tolerance=0.2).same is True


def test_only_the_shared_tokens_are_compared():
    long = lines(400)
    result = compare_loss(lines(200), long)
    assert result.same is True
    assert result.tokens[-1] < 200_000


def test_curves_logged_at_other_steps_can_be_compared():
    assert compare_loss(lines(200, seed=1), lines(200, seed=3)[::7]).same is True


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [([], lines(), "too few"), (lines(5), [{**x, "tokens": x["tokens"] + 10**9} for x in lines(5)], "share no range")],
)
def test_too_little_to_tell_is_unknown(a, b, reason):
    result = compare_loss(a, b)
    assert result.same is None
    assert reason in result.reason


def test_a_restart_that_wrote_steps_twice_counts_once():
    again = lines(200)
    assert compare_loss(again, again[:150] + again[100:]).largest_difference == 0


def test_null_losses_are_left_out():
    gappy = lines(200, seed=4)
    for line in gappy[::10]:
        line["loss"] = None
    assert compare_loss(lines(200), gappy).same is True


def test_performance_leaves_the_start_out(tmp_path):
    slow = [
        MetricsLine(step=i, tokens=i * 10, loss=3.0, tokens_per_second=10.0 if i < 5 else 100.0) for i in range(1, 11)
    ]
    result = measure_performance(Run(tmp_path), slow, {"world_size": 2})
    assert (result.tokens_per_second, result.tokens, result.final_loss, result.devices) == (100, 100, 3.0, 2)
    assert (result.mfu, result.watts, result.memory_bytes, result.energy_joules) == (None, None, None, None)


def test_differences_keep_missing_apart_from_other_values():
    rows = find_differences([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "d": 4}])
    assert [(r.key, r.values) for r in rows] == [("b", [2, 3]), ("d", [None, 4])]


@pytest.fixture
def two_runs(tmp_path):
    runs = []
    for name, layers, device, seed in (("a", 2, "A100", 1), ("b", 4, "MI250X", 2)):
        run = Run(tmp_path / name)
        write_json(run.config_file, {"name": name, "model": {"layers": layers, "width": 64}})
        write_json(
            run.manifest_file,
            {
                "windlass": "0.1",
                "packages": {"torch": f"2.1{layers}"},
                "device": device,
                "host": "n1",
                "world_size": layers,
                "tokens_per_step": 1000,
            },
        )
        for line in lines(100, seed=seed, tokens_per_second=1000.0 * layers):
            append_line(run.metrics_file, line)
        runs.append(run)
    return runs


def test_two_folders_side_by_side(two_runs):
    result = compare_runs(two_runs)
    assert [d.key for d in result.config] == ["name", "model.layers"]
    assert [(d.key, d.values) for d in result.packages] == [("torch", ["2.12", "2.14"])]
    assert [d.key for d in result.machine] == ["device", "world_size"]
    assert [p.tokens_per_second for p in result.performance] == [2000, 4000]
    assert result.loss[0].same is True


def test_a_damaged_folder_shows_what_it_has(two_runs):
    two_runs[1].manifest_file.write_text("{")
    two_runs[1].metrics_file.unlink()
    result = compare_runs(two_runs)
    assert result.performance[1].tokens_per_second is None
    assert result.loss[0].same is None
