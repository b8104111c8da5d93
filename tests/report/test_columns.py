from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from tests.report.sample_run import make_run

from windlass.figures import Chart
from windlass.report.collect import collect
from windlass.report.columns import Columns, axis, moving_mean, superseded, thin
from windlass.report.sections import curves
from windlass.runs.measured import recent_median


def write(path, lines, mode="w"):
    with path.open(mode) as file:
        file.write("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def columns(file) -> Columns:
    made = Columns(file)
    made.refresh()
    return made


def test_unknown_is_nan_and_torn_or_foreign_lines_are_passed_over(file):
    write(
        file,
        [
            {"step": 1, "loss": 3.5},
            '{"step": 2, "lo\n',
            "[1, 2]\n",
            '"text"\n',
            {"loss": 1.0},
            {"step": 3, "loss": None, "note": "text"},
            {"step": 4, "loss": True},
        ],
    )
    made = columns(file)
    assert made.get("step").tolist() == [1, 3, 4]
    assert made.get("loss")[0] == 3.5
    assert np.isnan(made.get("mfu")).all()
    assert "note" not in made.names()


@pytest.mark.parametrize("without", [(), ("orjson",)])
def test_figures_that_can_be_none_are_unknown(file, monkeypatch, without):
    """NaN, infinity and numbers of 400 digits, with the fast parser and with Python's own."""
    for name in without:
        monkeypatch.setitem(sys.modules, name, None)
    huge = "9" * 400
    wild = [f'{{"step": {x}, "loss": 1.0}}\n' for x in ("NaN", "1e999", "-1e999", huge, "-7")]
    write(file, [{"step": 1, "loss": 2.0}, *wild, f'{{"step": 2, "loss": {huge}}}\n', '{"step": 3, "loss": 1e999}\n'])
    made = columns(file)
    assert set(made.get("step").tolist()) <= {1.0, 2.0, 3.0}
    assert [v for v in made.get("loss").tolist() if v == v] == [2.0]


def test_only_what_was_appended_is_read_and_half_a_line_waits(file):
    write(file, [{"step": 1, "loss": 2.0}, '{"step": 2, "loss": 1'])
    made = columns(file)
    assert len(made) == 1
    write(file, [".5}\n", {"step": 3, "loss": 1.0, "watts": 700}], "a")
    made.refresh()
    assert made.get("loss").tolist() == [2.0, 1.5, 1.0]
    assert made.get("watts").tolist()[2] == 700 and np.isnan(made.get("watts")[0])


def test_while_another_thread_reads_on_all_columns_keep_one_length(file):
    write(file, [{"step": i, "loss": 2.0} for i in range(5)])
    made = columns(file)
    still = made.snapshot()
    write(file, [{"step": 5, "loss": 1.0, "watts": 700}], "a")
    made.refresh()
    assert (len(made), len(still), still.names(), still.version) == (6, 5, ["step", "loss"], 1)
    assert still.get("loss").tolist() == [2.0] * 5 and still.get("step").tolist() == [0, 1, 2, 3, 4]
    assert len(still.get("watts")) == len(still.get("mfu")) == 5
    write(file, [{"step": 9}])  # replaced by a shorter file
    made.refresh()
    assert len(made) == 1 and len(still.get("loss")) == len(still.get("step")) == 5


def test_a_file_that_cannot_be_read_just_now_keeps_what_is_known(file, monkeypatch):
    write(file, [{"step": 1}])
    made = columns(file)
    write(file, [{"step": 2}], "a")
    with monkeypatch.context() as patch:  # a stale handle of a file server
        stale = lambda path: (_ for _ in ()).throw(OSError(116, "Stale file handle"))  # noqa: E731
        patch.setattr("windlass.report.columns.open_file", stale)
        assert made.refresh()
    assert len(made) == 1
    made.refresh()
    assert made.get("step").tolist() == [1, 2]


def test_a_replaced_or_shortened_file_is_read_again(file):
    write(file, [{"step": i} for i in range(10)])
    made = columns(file)
    write(file, [{"step": 99}])
    made.refresh()
    assert made.get("step").tolist() == [99]


def test_pieces_give_the_same_as_the_whole(file, monkeypatch):
    monkeypatch.setattr("windlass.report.columns.READ_BLOCK_BYTES", 100)
    write(file, [{"step": i, "loss": 1 / (i + 1)} for i in range(500)])
    made = Columns(file)
    pieces = 1
    while not made.refresh(1000):
        pieces += 1
    assert pieces > 10
    assert made.get("step").tolist() == list(range(500))


def test_absent_file_is_empty(file):
    assert len(columns(file)) == 0


def test_thinning_keeps_the_extremes():
    y = np.zeros(100_000)
    y[54_321], y[77_777] = 9.0, -9.0
    xs, ys = thin(np.arange(100_000.0), y, 400)
    assert len(xs) <= 402
    assert (max(ys), min(ys)) == (9.0, -9.0)
    assert (xs[0], xs[-1]) == (0.0, 99_999.0)


def test_a_restart_breaks_the_line():
    xs, ys = thin(np.array([1.0, 2, 3, 2, 3, 4]), np.array([5.0, 4, 3, 4, 3, 2]))
    assert ys == [5, 4, 3, None, 4, 3, 2]
    assert xs == [1, 2, 3, 3, 2, 3, 4]


def test_a_quick_look_spans_a_long_file_and_has_its_end(file, monkeypatch):
    monkeypatch.setattr("windlass.report.columns.TAIL_BYTES", 16384)
    write(file, [{"step": i, "loss": float(i)} for i in range(20_000)])
    made = Columns.sample(file, lines=50)
    steps = made.get("step")
    assert len(made) < 1000
    assert (steps.min(), steps.max()) == (0, 19_999)
    assert len(np.unique(steps // 2000)) == 10


def test_axes(file):
    write(
        file,
        [
            {"step": 1, "tokens": 10, "time": 3600.0, "energy_joules": 3.6e6},
            {"step": 2, "tokens": 20, "time": 7200.0, "energy_joules": None},
        ],
    )
    made = columns(file)
    assert axis(made, "time").tolist() == [0.0, 1.0]
    assert axis(made, "kwh")[0] == 1.0 and np.isnan(axis(made, "kwh")[1])
    assert axis(made, "tokens").tolist() == [10, 20]


def test_middle_leaves_the_first_lines_out():
    assert recent_median(np.array([9.0, 9.0, 1.0, 1.0, 1.0])) == 1.0
    assert recent_median(np.array([np.nan])) is None


def test_a_thousand_invented_metric_names_do_not_fill_the_memory(file):
    write(file, [{"step": 1, **{f"x{i}": i for i in range(1000)}}])
    assert len(columns(file).names()) < 120


def test_a_line_longer_than_a_block_does_not_stop_the_reader(file, monkeypatch):
    monkeypatch.setattr("windlass.report.columns.READ_BLOCK_BYTES", 50)
    write(file, [{"step": 1, "note": "x" * 1000}, {"step": 2}])
    assert columns(file).get("step").tolist() == [1, 2]


@pytest.mark.parametrize(
    ("steps", "repeated"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 4], []),  # a validation writes a second line of its step
        ([1, 2, 3, 4, 3, 4, 5], [2, 3]),
        ([1, 2, 3, 4, 5, 3], [2]),  # 4 and 5 are lost, and not repeated yet
        ([1, 2, 3, 2, 3, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3, 1, 4, 5], [0]),  # one stray line
    ],
)
def test_steps_that_a_resume_repeats(steps, repeated):
    assert np.nonzero(superseded(np.array(steps, dtype=float)))[0].tolist() == repeated


def test_a_moving_mean_is_centred_and_bears_one_absurd_number():
    assert moving_mean(np.array([1.0, 2.0, 6.0, 4.0, 5.0]), 3).tolist() == [1.0, 3.0, 4.0, 5.0, 5.0]
    assert moving_mean(np.array([1.0, 1e299, 1.0, 1.0, 1.0, 1.0]), 3)[-2] == 1.0
    assert moving_mean(np.array([]), 10).tolist() == []


def test_curves_of_the_report_have_each_step_once(tmp_path):
    run = make_run(tmp_path / "run")  # steps 151 to 180 were repeated
    columns = Columns(run / "metrics.jsonl")
    columns.refresh()
    charts = [item for item in curves(collect(run), columns) if isinstance(item, Chart)]
    for chart in charts:
        drawn = list(chart.series[0].x)
        assert drawn == sorted(drawn) and len(drawn) == 301, chart.title  # of 331; the last line is in the file twice
