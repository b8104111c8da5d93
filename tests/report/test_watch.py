from __future__ import annotations

import json

import numpy as np
import pytest
from tests.report.sample_run import BEGIN, STEP_SECONDS, make_run, metric
from typer.testing import CliRunner

from windlass.cli import build
from windlass.figures import Chart, Heat
from windlass.files import append_line
from windlass.report.columns import Columns
from windlass.report.sections import curves
from windlass.report.tables import state
from windlass.report.watch import Watch, band, facts, picture, spark
from windlass.runs.events import ExpertLoads, GaveUp
from windlass.runs.folder import Run


def test_spark_falls_with_the_loss():
    assert spark(np.array([3.0, 2.0, 1.0]), 10) == "█▄▁"
    assert spark(np.array([np.nan]), 10) == ""
    assert len(spark(np.arange(1000.0), 60)) == 60


def test_band():
    assert band(np.array([0.91, 0.97, np.nan])) == "91–97 %"
    assert band(np.array([np.nan])) == "not measured"
    assert band(np.array([0.971, 0.972])) == "97 %"


def test_a_look_costs_only_what_was_appended_and_sees_it(tmp_path):
    run = Run(make_run(tmp_path / "going", finished=False, steps=220))
    watch = Watch(run)
    assert watch.look().step == 220
    offset = watch.columns._offset
    append_line(run.metrics_file, metric(221, BEGIN + 1000, None))
    assert watch.look().step == 221
    assert watch.columns._offset > offset


def test_the_first_look_at_a_long_file_is_at_a_sample_and_the_next_at_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.report.watch.LONG_FILE_BYTES", 1000)
    run = Run(make_run(tmp_path / "going", finished=False, steps=220))
    watch = Watch(run, sample_first=True)
    assert watch.look().step == 220 and watch.columns.is_sample
    exact = watch.look()
    assert not watch.columns.is_sample and exact.lines == Watch(run).look().lines


def text_of(renderable, width: int) -> str:
    import io

    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_a_silent_run_is_noticed_and_narrow_windows_work(tmp_path):
    run = Run(make_run(tmp_path / "going", finished=False, steps=220))
    watch = Watch(run)
    summary = watch.look()
    text = text_of(picture(summary, watch.columns, 50, summary.updated_at + 600), 50)
    assert "no new line for 10 min" in text
    assert max(map(len, text.splitlines())) <= 50
    assert dict(facts(summary, watch.columns, summary.updated_at))["time left"] == "1 min 46 s"
    assert dict(facts(summary, watch.columns, summary.updated_at + 600))["time left"] == "silent"


def test_a_mixture_of_experts_shows_its_routing(tmp_path):
    run = Run(make_run(tmp_path / "going", finished=False, steps=20))
    assert "experts" not in dict(facts(Watch(run).look(), Watch(run).columns, BEGIN))
    append_line(run.metrics_file, {**metric(21, BEGIN + 100, None), "expert_imbalance": 1.375, "router_entropy": 2.0})
    run.record(ExpertLoads(step=21, percent={"0": [150, 50], "1": [100, 100]}))
    watch = Watch(run)
    summary = watch.look()
    shown = dict(facts(summary, watch.columns, BEGIN))
    assert shown["experts"] == "fullest 1.38 x the mean" and "2 nats" in shown["router"]
    assert "expert loads" not in text_of(picture(summary, watch.columns, 80, BEGIN), 80)
    items = curves(summary, watch.columns)
    assert {"Most used expert", "Entropy of the routers"} <= {i.title for i in items if isinstance(i, Chart)}
    assert [i.values for i in items if isinstance(i, Heat)] == [[[150, 50], [100, 100]]]


def test_a_run_with_a_line_every_ten_minutes_is_not_silent_in_between(tmp_path):
    run = Run(make_run(tmp_path / "slow", finished=False, steps=151))
    at = BEGIN + 10_000
    for step in range(152, 202):
        append_line(run.metrics_file, metric(step, at := at + 600, None))
    summary = Watch(run).look()
    assert state(summary, at + 1500) == "running"
    assert state(summary, at + 3001) == "silent"


@pytest.mark.parametrize(("width", "height"), [(46, 12), (80, 12), (80, 16), (80, 24), (60, 40), (80, 4)])
def test_a_low_window_keeps_the_first_facts_and_fits(tmp_path, width, height):
    run = Run(make_run(tmp_path / "going", finished=False, steps=220))
    watch = Watch(run)
    summary = watch.look()
    lines = (
        text_of(picture(summary, watch.columns, width, summary.updated_at + 600, height), width).rstrip().splitlines()
    )
    assert len(lines) <= max(4, height - 1)
    assert "silent" in lines[0] and "recent loss" in lines[3]
    assert max(map(len, lines)) <= width


def test_hostile_markup_is_text(run):
    run.record(GaveUp(reason="[bold]x[/bold] [link=http://evil]y[/link]"))
    watch = Watch(run)
    assert "[bold]x[/bold]" in text_of(watch.picture(80), 120)


def test_one_look_at_a_long_file_prints_the_same_numbers_from_a_bounded_part_of_it(tmp_path, monkeypatch):
    """A crash far from every sampled line, a torn line at it, and the highest memory just before it."""
    crash_at, resume_from, steps = 7_777, 7_000, 12_000
    run = Run(make_run(tmp_path / "long", steps=steps, crash_at=crash_at, resume_from=resume_from))
    text = run.metrics_file.read_bytes().splitlines(keepends=True)
    peak = metric(crash_at, BEGIN + 30 + crash_at * STEP_SECONDS, None) | {"memory_bytes": 70 << 30}
    text[crash_at - 1] = json.dumps(peak).encode() + b"\n"
    run.metrics_file.write_bytes(b"".join(text))
    sizes = {"columns.TAIL_BYTES": 128 << 10, "collect.SAMPLE_LINES": 300, "watch.LONG_FILE_BYTES": 1 << 20}
    for name, value in sizes.items():
        monkeypatch.setattr(f"windlass.report.{name}", value)
    parsed = []

    def count_and_parse(data: bytes):
        parsed.append(len(data))
        return json.loads(data)

    monkeypatch.setattr("windlass.report.columns.parse_json", count_and_parse)
    sampled = Watch(run, sample_first=True)
    summary = sampled.look()
    assert sampled.columns.is_sample
    assert sum(parsed) < run.metrics_file.stat().st_size / 10
    exact = Watch(run)
    complete = exact.look()
    assert (summary.memory_bytes, summary.life.lost_steps) == (70 << 30, crash_at - resume_from)
    assert summary.life.goodput == pytest.approx(complete.life.goodput, abs=1e-3)
    now = complete.updated_at
    assert facts(summary, sampled.columns, now) == facts(complete, exact.columns, now)


@pytest.mark.parametrize(("option", "reads_all"), [("--once", False), ("--json", True)])
def test_only_the_exact_json_reads_a_long_file_completely(run, monkeypatch, option, reads_all):
    monkeypatch.setattr("windlass.report.watch.LONG_FILE_BYTES", 1000)
    complete = []
    monkeypatch.setattr(Columns, "refresh", lambda columns: complete.append(columns))
    assert CliRunner().invoke(build(), ["watch", str(run.path), option]).exit_code == 0
    assert bool(complete) == reads_all
