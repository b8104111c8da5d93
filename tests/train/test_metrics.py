"""Metrics lines: step times that are read later, energy per token, and values that were not measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.test_loop import recipe, train

from windlass.train import loop, metrics
from windlass.train.hooks import Hook, Training
from windlass.train.metrics import EnergyPerToken, Recorder


def test_a_cost_is_taken_over_seconds_not_over_a_step_in_which_the_counter_did_not_move() -> None:
    """700 W, steps of 40 ms and 1,000 tokens, a counter that is read every quarter of a second."""
    cost, costs = EnergyPerToken(), []
    for step in range(1, 800):
        joules = 700 * 0.25 * (step * 0.04 // 0.25)
        costs.append(cost.add(0.04, 1000 * step, joules, 1))
    assert costs[:50] == [None] * 50, "two seconds tell too little"
    assert min(costs[60:]) > 0
    assert all(value == pytest.approx(0.028, rel=0.04) for value in costs[300:])


def test_lines_that_are_far_apart_are_taken_one_by_one() -> None:
    cost = EnergyPerToken()
    costs = [cost.add(60.0, 1000 * n, joules, 1) for n, joules in enumerate([500.0, 1500.0, 3500.0], start=1)]
    assert costs == [None, 1.0, 2.0]


@pytest.mark.parametrize(
    "line",
    [(60.0, 3000, None, 0), (60.0, 3000, 2500.0, 2), (60.0, 3000, 900.0, 1), (60.0, 2000, 2500.0, 1)],
    ids=["no sensor", "another node answers", "the counter fell", "no token"],
)
def test_what_does_not_compare_is_unknown(line: tuple[float, int, float | None, int]) -> None:
    cost = EnergyPerToken()
    cost.add(60.0, 1000, 500.0, 1)
    assert cost.add(60.0, 2000, 1500.0, 1) == 1.0
    assert cost.add(*line) is None


def test_step_times_are_right_although_lines_are_read_two_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; a save reads what is left, and the lines after it wait again."""
    clock = itertools.count()
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=lambda: float(next(clock))))
    drain = Recorder.drain
    monkeypatch.setattr(
        Recorder, "drain", lambda self, training, keep: drain(self, training, keep if self.asked else metrics.LAG)
    )
    monkeypatch.setattr(Recorder, "asked", False, raising=False)
    inner = Recorder.on_step_end

    def on_step_end(self: Recorder, training: Any, result: Any) -> None:
        self.asked = False
        inner(self, training, result)
        self.asked = True  # whoever asks from outside gets what is left

    monkeypatch.setattr(Recorder, "on_step_end", on_step_end)
    _, run = train(tmp_path, recipe(train={"steps": 12}, save={"every": 4}))
    lines = [m.as_dict() for m in run.metrics_lines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {line["step_seconds"] for line in lines} == {1.0}
    assert {line["tokens_per_second"] for line in lines} == {128.0}


def test_energy_of_a_validation_pass_is_not_in_joules_per_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 1,000 J and 128 tokens; half of what was used by step 4 was validation's."""
    now, used, totals = [0.0], [0.0], []
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(Training, "energy", lambda self: {"joules": used[0], "watts": None, "utilization": 0.5})
    add = EnergyPerToken.add
    monkeypatch.setattr(EnergyPerToken, "add", lambda self, *args: totals.append(args[2]) or add(self, *args))

    recorder = Recorder()
    monkeypatch.setattr(loop, "Recorder", lambda listeners: recorder)

    class Meter(Hook):
        def on_step_begin(self, training: Any) -> None:
            now[0] += 60.0
            used[0] += 1000.0

        def on_step_end(self, training: Any, result: Any) -> None:
            if training.step == 2:
                used[0] += 2000.0
                recorder.leave_out(5.0, 2000.0)
                recorder.leave_out(0.0, None)

    _, run = train(tmp_path, recipe(train={"steps": 4}), Meter())
    assert totals == [1000.0, 2000.0, 3000.0, 4000.0]
    lines = [line.as_dict() for line in run.metrics_lines()]
    assert [line["joules_per_token"] for line in lines] == [None, *[pytest.approx(1000 / 128)] * 3]
    assert [line["energy_joules"] for line in lines] == [1000.0, 2000.0, 5000.0, 6000.0]
    assert lines[-1]["utilization"] == 0.5 and lines[-1]["watts"] is None and lines[-1]["energy_nodes"] == 1
