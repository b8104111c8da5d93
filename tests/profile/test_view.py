"""The same values as tables and charts: what a reader sees of unknown, hidden and new."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windlass.figures import Chart, Note, page
from windlass.files import write_json
from windlass.profile.compare import ScalingInput, change_between, scaling_rows
from windlass.profile.job_profile import profile_traces
from windlass.profile.view import (
    print_percent,
    profile_sections,
    run_sections,
    scaling_table,
    side_by_side,
    step_bars,
    summary_table,
)
from windlass.runs import Run


def write_rank(builder, path, rank):
    builder.meta["distributedInfo"]["rank"] = rank
    return builder.write(path)


def test_bars_stand_on_each_other_and_add_up_to_the_step(tmp_path, overlapped):
    job = profile_traces([overlapped.write(tmp_path / "a.json")], label="a")
    chart = step_bars([job])
    assert chart.stacked
    assert sum(series.y[0] for series in chart.series) * 1e3 == pytest.approx(job.step_us)
    assert "Memset" not in [s.name for s in chart.series]  # nothing to draw


def test_one_bar_per_rank_of_a_job(tmp_path, overlapped):
    paths = [write_rank(overlapped, tmp_path / f"{rank}.json", rank) for rank in range(3)]
    assert step_bars([profile_traces(paths)]).series[0].x == (
        "rank 0",
        "rank 1",
        "rank 2",
    )


def test_the_summary_says_what_is_hidden_and_what_is_absent(tmp_path, overlapped):
    table = summary_table(profile_traces([overlapped.write(tmp_path / "a.json")]))
    rows = {row[0]: row for row in table.rows}
    assert rows["Runtime"][1:] == ("2", "2.00 %", "6")
    assert rows["DataLoader"][3] == "none in the trace"
    assert "100.00 %" in table.caption


def test_per_cent_as_in_the_slides():
    assert [print_percent(change_between(*pair)) for pair in ((2786, 3147), (0, 0), (0, 4))] == [
        "12.96 %",
        "N/A",
        "new",
    ]


def test_two_sides_have_deltas_and_three_have_none(tmp_path, overlapped):
    job = profile_traces([overlapped.write(tmp_path / "a.json")])
    assert len(side_by_side([job, job]).columns) == 7
    assert len(side_by_side([job, job, job]).columns) == 7
    assert "delta us" not in side_by_side([job, job, job]).columns


def test_scaling_says_when_the_work_is_assumed():
    parts = {"Kernel": 80.0, "Other": 20.0}
    rows = scaling_rows(
        [
            ScalingInput(label="1x1", step_us=100, categories_us=parts),
            ScalingInput(label="2x8", step_us=150, categories_us={"Kernel": 80.0, "Other": 70.0}),
        ]
    )
    table = scaling_table(rows)
    assert table.rows[1][3:6] == ("66.7 %", "+50", "Other")
    assert table.caption != scaling_table([replace(r, work_per_device=1.0) for r in rows]).caption


def test_a_run_gives_sections_for_the_report_or_none(tmp_path, overlapped):
    run = Run(tmp_path / "run")
    write_json(run.config_file, {"name": "run"})
    assert run_sections(run) == []
    for rank in range(3):
        write_rank(overlapped, run.profile / "step-000000005" / f"rank-{rank:05d}.json.gz", rank)
    trace = run_sections(run, max_ranks=2)
    assert any(isinstance(i, Chart) for i in trace[0].items)
    assert any(isinstance(i, Note) and "2 of 3 traced ranks" in i.text for i in trace[0].items)
    assert "Execution summary of run" in page("report", trace)


def test_advice_and_notes_are_on_the_page(tmp_path, overlapped):
    items = profile_sections(profile_traces([overlapped.write(tmp_path / "a.json")]))[0].items
    assert any(isinstance(i, Note) and i.kind == "warning" and "exposed communication" in i.text for i in items)
