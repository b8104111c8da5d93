"""Metrics lines: today's keys, further keys kept, repeated steps once."""

from __future__ import annotations

import json

from windlass.runs.folder import Run
from windlass.runs.metrics import METRICS, MetricsLine, last_of_each_step


def test_a_line_is_written_with_null_for_unknown_and_read_back(tmp_path):
    run = Run(tmp_path)
    line = MetricsLine(step=3, tokens=384, loss=float("nan"), lr=1e-3, extra={"val_loss/dutch": 2.5})
    run.record_metrics(line)
    raw = json.loads(run.metrics_file.read_text())
    assert list(raw)[:11] == list(METRICS)[:11] and raw["loss"] is None and raw["energy_joules"] is None
    assert "val_loss" not in raw and "slowest_rank" not in raw and raw["val_loss/dutch"] == 2.5
    [again] = run.metrics_lines()
    assert (again.step, again.loss, again.extra) == (3, None, {"val_loss/dutch": 2.5})
    assert run.last_metrics() == again


def test_no_line_and_bad_values_are_unknown(tmp_path):
    assert Run(tmp_path).last_metrics() == MetricsLine()
    assert MetricsLine.from_dict({"step": "x", "loss": True, "memory_bytes": 5.0}) == MetricsLine(memory_bytes=5)


def test_steps_that_were_done_again_count_once():
    steps = [1, 2, 3, 4, 5, 3, 4]  # killed after 5, resumed from 2; step 5 of the first start is lost
    lines = [MetricsLine(step=step, time=float(i)) for i, step in enumerate(steps)]
    assert [(m.step, m.time) for m in last_of_each_step([*lines, MetricsLine()])] == [(1, 0), (2, 1), (3, 5), (4, 6)]
